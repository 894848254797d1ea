"""Pages of LMDB 0.9, as stored by 64-bit little-endian machines."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

MAGIC, VERSION = 0xBEEFC0DE, 1
META_PAGES = 2
"""Pages 0 and 1 are meta pages; transactions use them in turn."""
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
"""Kinds of pages: the only flags that a page has on disk."""
BIG_DATA, SUB_DATABASE = 1, 2
"""Flags of a node: its value has pages of its own, or describes a tree."""
INTEGER_KEY = 8
"""Flag of the tree of free pages."""
NO_PAGE = 2**64 - 1
TRANSACTION_MAX = 2**62
PAGE_SIZES = tuple(1 << bits for bits in range(9, 16))
PAGE_HEADER = struct.Struct("<QHHHH")
"""Page number, padding, flags, and the bounds of the free space within the page."""
OVERFLOW_HEADER = struct.Struct("<QHHI")
"""Header before a value with pages of its own: page number, padding, flags, number of pages."""
NODE_HEADER = struct.Struct("<HHHH")
"""Lower and upper half of the value's length (in a branch, with the flags: the page), flags, length of the key."""
TREE = struct.Struct("<IHH5Q")
_META = struct.Struct("<IIQQ")
_META_END = struct.Struct("<QQ")
META_BYTES = PAGE_HEADER.size + _META.size + 2 * TREE.size + _META_END.size


class DamageError(Exception):
    """The file cannot be as LMDB wrote it. The message says why."""


class Tree(NamedTuple):
    """Root and counts of one tree."""

    pad: int
    """Page size in bytes, in the tree of free pages; unused in others."""
    flags: int
    """Order of keys, and whether keys have several values."""
    depth: int
    """Levels."""
    branch_pages: int
    """Number of inner pages."""
    leaf_pages: int
    """Number of leaves."""
    overflow_pages: int
    """Number of pages of values that have pages of their own."""
    entries: int
    """Number of nodes in the leaves."""
    root: int
    """Page of the root; ``NO_PAGE`` if the tree is empty."""


class Meta(NamedTuple):
    """State after one transaction."""

    page_bytes: int
    """Length of a page."""
    free: Tree
    """Tree of free pages: transaction to page numbers."""
    main: Tree
    """Tree of the named trees."""
    last_page: int
    """Largest page number in use."""
    transaction: int
    """Number of the transaction."""


def read_exactly(fd: int, size: int, offset: int) -> bytes:
    """Read a part of the file.

    Raises:
        DamageError: the file ends before.
        OSError: the disk cannot read it.
    """
    try:
        data = os.pread(fd, size, offset)
    except OverflowError:
        data = b""
    if len(data) != size:
        raise DamageError(f"the file ends before byte {offset + size}")
    return data


def read_metas(fd: int) -> tuple[Meta, Meta]:
    """Read both meta pages.

    Raises:
        DamageError: one of them is damaged.
        OSError: the disk cannot read it.
    """
    first = _read_meta(fd, 0, 0)
    second = _read_meta(fd, 1, first.page_bytes)
    if first.page_bytes != second.page_bytes:
        raise DamageError("the meta pages state different page sizes")
    return first, second


def _read_meta(fd: int, number: int, offset: int) -> Meta:
    data = read_exactly(fd, META_BYTES, offset)
    page, _, flags, _, _ = PAGE_HEADER.unpack_from(data)
    magic, version, address, _ = _META.unpack_from(data, PAGE_HEADER.size)
    trees = PAGE_HEADER.size + _META.size
    free, main = Tree(*TREE.unpack_from(data, trees)), Tree(*TREE.unpack_from(data, trees + TREE.size))
    last_page, transaction = _META_END.unpack_from(data, trees + 2 * TREE.size)
    is_sound = (
        (page, flags, magic, version, address) == (number, META, MAGIC, VERSION, 0)
        and free.pad in PAGE_SIZES
        and (free.flags, main.flags) == (INTEGER_KEY, 0)
        and transaction < TRANSACTION_MAX
        and (transaction % META_PAGES == number or transaction == 0)
        and last_page >= META_PAGES - 1
    )
    if not is_sound:
        raise DamageError(f"meta page {number} is damaged")
    return Meta(free.pad, free, main, last_page, transaction)


def overflow_pages(size: int, page_bytes: int) -> int:
    """Number of pages of a value of ``size`` bytes, with its header."""
    return (PAGE_HEADER.size - 1 + size) // page_bytes + 1
