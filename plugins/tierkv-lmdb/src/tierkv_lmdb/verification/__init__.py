"""Check of a data file before LMDB uses it: LMDB trusts its pages, and damage can end the process.

``file_format`` decodes meta pages and tree pages as LMDB 0.9 writes them on 64-bit little-endian machines. ``tree``
walks one tree in key order and checks each page. ``verify`` checks the file as a whole: both meta pages, every tree,
the list of free pages, and that no page has two uses.

The check reads meta pages, tree pages and the list of free pages, with read calls, never through a map. It reads no
frame: frames have checksums of their own, and the header of a frame's pages is checked when the frame is replaced or
deleted. It needs exclusive access: a writer would change pages meanwhile.
"""
