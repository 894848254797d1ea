"""Segment files and the I/O into them.

A segment is a file of up to a wished size, allocated whole before its first page is used. A write therefore cannot run
out of disk half-way. ``segment_files`` opens, grows, cuts, reads and writes them by page address. ``direct_io`` moves
bytes at an offset with O_DIRECT, through a bounce buffer where the caller's memory is not aligned.

This wing knows no keys and no free space: it only knows how many pages each segment has. Reads, writes and syncs may
run on several threads; one thread at a time grows.
"""
