"""Open environments: transactions, the map, the copy of frames, and the change from one environment to the next.

``environment`` gives transactions that end with their call; ``gate`` counts them, so that the map never moves under
one. ``frame_copier`` copies a frame out of the page cache or the file. ``file_watch`` notices files that were removed,
replaced or truncated, before LMDB accesses its maps. ``trouble`` names what ends an environment. ``keeper`` holds the
environment in service: it closes one in trouble when its last call has ended, and opens the next one.

Invariants. LMDB has a file open once per process: the next environment is opened after the end of the previous one. An
environment in trouble begins no transaction.
"""
