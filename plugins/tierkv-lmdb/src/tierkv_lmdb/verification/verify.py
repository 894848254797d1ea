"""Check of a whole data file: meta pages, trees, the list of free pages, and the uses of each page."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierkv_lmdb.verification.file_format import (
    BIG_DATA,
    META_PAGES,
    PAGE_HEADER,
    SUB_DATABASE,
    TREE,
    DamageError,
    Meta,
    Tree,
    read_exactly,
    read_metas,
)
from tierkv_lmdb.verification.tree import Node, TreeWalk

_NUMBER = struct.Struct("<Q")
_FRAME_BYTES = struct.Struct(">8xQ")
"""Length of a frame, in an entry of the index."""
_PLACED = struct.Struct(">24xQ")
"""First page of a frame, in an entry of the index that has it."""


def used_bytes(data: Path) -> int:
    """Bytes of the file that its meta pages account for; 0 if there is no file, or if it is empty.

    Raises:
        DamageError: a meta page is damaged.
        OSError: the file cannot be read.
    """
    try:
        fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        if not os.fstat(fd).st_size:
            return 0
        return max((meta.last_page + 1) * meta.page_bytes for meta in read_metas(fd))
    finally:
        os.close(fd)


def verify(data: Path, bytes_max: int) -> set[bytes]:
    """Check a data file that no process writes.

    Args:
        data: the file; its absence is no damage.
        bytes_max: bound of the tier.

    Returns:
        Keys that only one of the two trees has.

    Raises:
        DamageError: LMDB must not use the file; says why.
        OSError: the file cannot be read.
    """
    try:
        fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return set()
    try:
        return _Verifier(fd, bytes_max).verify() if os.fstat(fd).st_size else set()
    finally:
        os.close(fd)


class _Verifier:
    """Check of one open file."""

    def __init__(self, fd: int, bytes_max: int) -> None:
        self._fd = fd
        metas = read_metas(fd)
        self._meta: Meta = max(metas, key=lambda meta: meta.transaction)
        self._page_bytes = self._meta.page_bytes
        self._file_bytes = os.fstat(fd).st_size
        largest = max(meta.last_page for meta in metas)
        if (largest + 1) * self._page_bytes > max(bytes_max, self._file_bytes):
            raise DamageError(f"a meta page states {largest + 1} pages, more than the file and the capacity have")
        self._starts, self._counts = array("Q"), array("Q")
        self._pages_read = set[int]()

    def verify(self) -> set[bytes]:
        """Check everything. Returns the keys that only one of the two trees has."""
        named = dict[bytes, Tree]()
        for node in self._walk(self._meta.main, "names"):
            if node.flags & SUB_DATABASE:
                if node.size != TREE.size or node.flags & BIG_DATA:
                    raise DamageError(f"the tree {node.key!r} has no description")
                named[node.key] = Tree(*TREE.unpack(node.value))
        frames, index = named.pop(b"frames", None), named.pop(b"index", None)
        for name, tree in named.items():
            if tree.flags == 0:  # another program's; of other kinds only the use of their pages is unknown
                self._require_values(name.decode(errors="replace"), tree)
        lonely = self._compare(frames, index)
        self._check_free_pages()
        self._require_single_uses()
        return lonely

    def read(self, number: int) -> bytes:
        """Read a page of a tree, and note its use."""
        if number in self._pages_read:
            raise DamageError(f"page {number} has two parents")
        self._pages_read.add(number)
        self.take(number, 1)
        return read_exactly(self._fd, self._page_bytes, number * self._page_bytes)

    def take(self, page: int, count: int) -> None:
        """Note pages in use, which must be within the file."""
        if page + count > self._meta.last_page + 1 or (page + count) * self._page_bytes > self._file_bytes:
            raise DamageError(f"page {page} and the following {count - 1} are not in the file")
        self._starts.append(page)
        self._counts.append(count)

    def _walk(self, tree: Tree, name: str) -> TreeWalk:
        return TreeWalk(tree, name, self._page_bytes, self)

    def _require_values(self, name: str, tree: Tree) -> None:
        for node in self._values(name, tree):
            del node

    def _values(self, name: str, tree: Tree | None) -> Iterator[Node]:
        """Nodes of a tree of plain values; an absent tree is empty."""
        if tree is None:
            return
        if tree.flags:
            raise DamageError(f"the tree of {name} has flags {tree.flags}")
        for node in self._walk(tree, name):
            if node.flags & SUB_DATABASE:
                raise DamageError(f"a value of the tree of {name} is a tree")
            yield node

    def _compare(self, frames: Tree | None, index: Tree | None) -> set[bytes]:
        """Walk both trees side by side. Returns the keys that only one of them has."""
        lonely = set[bytes]()
        left, right = iter(self._values("frames", frames)), iter(self._values("index", index))
        frame, entry = next(left, None), next(right, None)
        while frame is not None or entry is not None:
            if entry is None or (frame is not None and frame.key < entry.key):
                lonely.add(frame.key)  # type: ignore[union-attr]  # one of both is there
                frame = next(left, None)
            elif frame is None or entry.key < frame.key:
                lonely.add(entry.key)
                entry = next(right, None)
            else:
                if entry.flags or entry.size not in (16, 24, _PLACED.size):
                    raise DamageError("an entry of the index is damaged")
                if _FRAME_BYTES.unpack_from(entry.value)[0] != frame.size or not _has_place(entry, frame):
                    lonely.add(entry.key)
                frame, entry = next(left, None), next(right, None)
        return lonely

    def _check_free_pages(self) -> None:
        for node in TreeWalk(self._meta.free, "free pages", self._page_bytes, self, lambda key: key[::-1]):
            if len(node.key) != _NUMBER.size or node.flags & SUB_DATABASE or node.size % _NUMBER.size or not node.size:
                raise DamageError("a record of free pages is damaged")
            if not 0 < _NUMBER.unpack(node.key)[0] <= self._meta.transaction:
                raise DamageError("a record of free pages is of a later transaction")
            numbers = np.frombuffer(self._value(node), "<u8")
            count, pages = int(numbers[0]), numbers[1:]
            if count > len(pages):
                raise DamageError("a record of free pages is too short")
            pages = pages[:count]
            if (pages[:-1] <= pages[1:]).any():
                raise DamageError("a record of free pages is not in order")
            self._starts.frombytes(pages.astype(np.uint64).tobytes())
            self._counts.frombytes(np.ones(count, np.uint64).tobytes())

    def _value(self, node: Node) -> bytes:
        if not node.flags & BIG_DATA:
            return node.value
        page = _NUMBER.unpack(node.value)[0]
        return read_exactly(self._fd, node.size, page * self._page_bytes + PAGE_HEADER.size)

    def _require_single_uses(self) -> None:
        starts, counts = np.frombuffer(self._starts, np.uint64), np.frombuffer(self._counts, np.uint64)
        if not len(starts):
            return
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        ends = starts + counts[order]
        if starts[0] < META_PAGES or ends[-1] > self._meta.last_page + 1 or (ends[:-1] > starts[1:]).any():
            raise DamageError("a page has two uses")


def _has_place(entry: Node, frame: Node) -> bool:
    """Whether an entry of the index has the page of its frame, or none."""
    page = _PLACED.unpack(entry.value)[0] if entry.size == _PLACED.size else 0
    return not page or (bool(frame.flags & BIG_DATA) and _NUMBER.unpack(frame.value)[0] == page)
