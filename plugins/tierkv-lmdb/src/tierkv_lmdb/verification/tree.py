"""Walk through one tree of a data file, in key order, with a check of each page."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from tierkv_lmdb.verification.file_format import (
    BIG_DATA,
    BRANCH,
    LEAF,
    NO_PAGE,
    NODE_HEADER,
    PAGE_HEADER,
    DamageError,
    Tree,
    overflow_pages,
)

KEY_BYTES_MAX = 511
DEPTH_MAX = 32
_HEADER_BYTES, _NODE_BYTES, _PAGE_NUMBER_BYTES = PAGE_HEADER.size, NODE_HEADER.size, 8
_PAGE_NUMBER = struct.Struct("<Q")


class Node(NamedTuple):
    """Entry of a leaf."""

    key: bytes
    """Key of the entry."""
    flags: int
    """``BIG_DATA``, ``SUB_DATABASE``, or 0."""
    size: int
    """Length of the value in bytes."""
    value: bytes
    """The value, or the number of its first page (8 bytes)."""


class Pages(Protocol):
    """Pages of the file, each of which has one use."""

    def read(self, number: int) -> bytes:
        """Read a page of a tree.

        Raises:
            DamageError: it is not in the file, or has two parents.
            OSError: the disk cannot read it.
        """

    def take(self, page: int, count: int) -> None:
        """Note the pages of a value: the first one and their count.

        Raises:
            DamageError: they are not in the file.
        """


class TreeWalk:
    """Iterator over the nodes of one tree. At its end, the counts of the tree have been checked.

    Args:
        tree: root and counts, as stored.
        name: of the tree, for messages.
        page_bytes: length of a page.
        pages: of the file.
        order: sort key of a key.
    """

    def __init__(
        self,
        tree: Tree,
        name: str,
        page_bytes: int,
        pages: Pages,
        order: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._tree = tree
        self._name = name
        self._page_bytes = page_bytes
        self._pages = pages
        self._order = order
        self._branches = self._leaves = self._overflows = self._entries = 0

    def __iter__(self) -> Iterator[Node]:
        """Yield every node in key order.

        Raises:
            DamageError: a page or a count is damaged.
            OSError: the disk cannot read a page.
        """
        tree = self._tree
        if (tree.root == NO_PAGE) != (tree.depth == 0) or tree.depth > DEPTH_MAX:
            raise self._damage("root or depth")
        if tree.root != NO_PAGE:
            yield from self._level(tree.root, tree.depth, b"", None)
        counts = (self._branches, self._leaves, self._overflows, self._entries)
        if counts != (tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries):
            raise self._damage("counts")

    def _level(self, number: int, depth: int, low: bytes, high: bytes | None) -> Iterator[Node]:
        """Walk the subtree of one page; its keys lie from ``low`` (inclusive) to ``high`` (exclusive)."""
        page = self._pages.read(number)
        if depth == 1:
            self._leaves += 1
            yield from self._leaf(number, page, low, high)
            return
        self._branches += 1
        children = self._children(number, page, low, high)
        for place, (key, child) in enumerate(children):
            following = children[place + 1][0] if place + 1 < len(children) else high
            yield from self._level(child, depth - 1, key, following)

    def _leaf(self, number: int, page: bytes, low: bytes, high: bytes | None) -> Iterator[Node]:
        used, previous = 0, None
        offsets = self._offsets(number, page, LEAF)
        self._entries += len(offsets)
        for offset in offsets:
            lower, upper, flags, key_bytes = NODE_HEADER.unpack_from(page, offset)
            size, is_big = lower | upper << 16, flags & BIG_DATA
            stored = _PAGE_NUMBER_BYTES if is_big else size
            start = offset + _NODE_BYTES + key_bytes
            key, value = page[start - key_bytes : start], page[start : start + stored]
            order = self._order(key)
            in_order = order > previous if previous is not None else order >= low
            if len(value) != stored or not 0 < key_bytes <= KEY_BYTES_MAX or flags & ~3 or not in_order:
                raise self._damage(f"leaf {number}")
            previous = order
            used += _even(_NODE_BYTES + key_bytes + stored)
            if is_big:
                count = overflow_pages(size, self._page_bytes)
                self._overflows += count
                self._pages.take(_PAGE_NUMBER.unpack(value)[0], count)
            yield Node(key, flags, size, value)
        self._require_full(number, page, used)
        if previous is not None and high is not None and previous >= high:
            raise self._damage(f"leaf {number}")

    def _children(self, number: int, page: bytes, low: bytes, high: bytes | None) -> list[tuple[bytes, int]]:
        """Lower bounds and page numbers of the children of a branch. The key of the first one does not count."""
        used, children = 0, list[tuple[bytes, int]]()
        for offset in self._offsets(number, page, BRANCH):
            first, second, third, key_bytes = NODE_HEADER.unpack_from(page, offset)
            start = offset + _NODE_BYTES
            key = page[start : start + key_bytes]
            if len(key) != key_bytes or key_bytes > KEY_BYTES_MAX:
                raise self._damage(f"branch {number}")
            used += _even(_NODE_BYTES + key_bytes)
            bound = self._order(key) if children else low
            if children and (bound <= children[-1][0] or (high is not None and bound >= high)):
                raise self._damage(f"branch {number}")
            children.append((bound, first | second << 16 | third << 32))
        self._require_full(number, page, used)
        return children

    def _offsets(self, number: int, page: bytes, kind: int) -> tuple[int, ...]:
        """Offsets of the nodes of a page, whose header and offsets are checked."""
        stored, _, flags, lower, upper = PAGE_HEADER.unpack_from(page)
        count = (lower - _HEADER_BYTES) // 2
        if (stored, flags) != (number, kind) or count < 1 or lower % 2 or not lower <= upper <= self._page_bytes:
            raise self._damage(f"page {number}")
        offsets: tuple[int, ...] = struct.unpack_from(f"<{count}H", page, _HEADER_BYTES)
        last = self._page_bytes - _NODE_BYTES
        if any(offset % 2 or not upper <= offset <= last for offset in offsets) or len(set(offsets)) < count:
            raise self._damage(f"page {number}")
        return offsets

    def _require_full(self, number: int, page: bytes, used: int) -> None:
        """Require that the nodes fill the end of the page, as LMDB packs them."""
        if used != self._page_bytes - PAGE_HEADER.unpack_from(page)[4]:
            raise self._damage(f"page {number}")

    def _damage(self, where: str) -> DamageError:
        return DamageError(f"{where} of the tree of {self._name} is damaged")


def _even(size: int) -> int:
    return size + (size & 1)
