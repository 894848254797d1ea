"""Opening an existing namespace: from log and segment files to the table and the free space.

``recovery`` replays the log, then makes the table agree with the files. ``claims`` does the arithmetic on page
addresses: contradictory claims, gaps between used runs, segments to shorten. ``frame_search`` reads pages that no
record accounts for and recognises frames in them; it runs only if the log is missing or damaged.

Flow. Open the segments, replay the log, and search if the log has losses. Drop entries without pages, apply the current
limits, and derive the free runs. Then resume the log, or replace it by a compact one.

Invariants. If two records claim a page, the newer one keeps it. A recovered table refers to existing pages only. A
rewritten log refers to durable frames only.
"""
