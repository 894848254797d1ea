"""Opening an existing namespace: from log and segment files to the table and the free space.

``recovery`` replays the log, then makes the table agree with the files. ``claims`` does the arithmetic on page
addresses: contradictory claims, gaps between used runs, segments to shorten. ``frame_search`` reads pages that no
record accounts for and recognises frames in them; it runs only if the log is missing or damaged.

Flow: open segments, replay log, search if the log has losses, drop entries without pages, apply the current limits,
derive the free runs, then resume the log or replace it by a compact one.

Invariants: when two records claim a page, the newer one keeps it; a recovered table never refers to a page that is not
there; a rewritten log refers only to frames that are durable.
"""
