"""Use of the pages: stored frames, free runs, pinned runs and quarantined runs. All in memory but for one list.

``table`` maps keys to runs and owns ``free_space``: free runs by length (best fit), and pins. A pin delays the freeing
of a frame's pages during a read. ``quarantine`` lists runs that held a bad frame. They are not reused, up to a bound,
and the list survives in a file.

Flow of a page: free, then taken by a write, then owned by a key in the table, then freed by an overwrite or a delete.
If it is pinned, it becomes free at the last unpin. If it is quarantined, it stays out of service.

Nothing here locks: the backend serialises all calls.
"""
