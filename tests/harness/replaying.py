"""Power cuts by a model: a journal of calls is replayed up to an instant, and any unforced part of it is lost.

Bytes: what a sync forced is there; of later writes any subset is, sector by sector. Names: what a sync of the directory
forced is there; of later changes any subset is.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

SECTOR = 512
_HEADER = struct.Struct("<IIQqQII")


class Kind(IntEnum):
    """Kinds of a record; the C file has the same table."""

    OPEN = 0
    WRITE = 1
    TRUNCATE = 2
    ALLOCATE = 3
    SYNC = 4
    SYNC_NAMES = 5
    RENAME = 6
    LINK = 7
    UNLINK = 8
    MKDIR = 9
    NOTE = 10


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Call that succeeded, or a remark."""

    kind: Kind
    is_forced: bool
    inode: int
    offset: int
    path: str
    other: str
    data: bytes


def read_journal(path: Path) -> Iterator[CallRecord]:
    """Whole records of a journal, in order."""
    data = path.read_bytes()
    at = 0
    while at + _HEADER.size <= len(data):
        kind, flags, inode, offset, size, path_bytes, other_bytes = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        ends = (at + path_bytes, at + path_bytes + other_bytes, at + path_bytes + other_bytes + size)
        if ends[2] > len(data):
            return
        name, other = data[at : ends[0]].decode(), data[ends[0] : ends[1]].decode()
        yield CallRecord(Kind(kind), bool(flags), inode, offset, name, other, data[ends[1] : ends[2]])
        at = ends[2]


@dataclass(slots=True)
class File:
    """Bytes of a file: those that are forced, and later changes as (kind, offset, data, is_forced)."""

    forced: bytearray = field(default_factory=bytearray)
    later: list[tuple[Kind, int, bytes, bool]] = field(default_factory=list)

    def sync(self) -> None:
        """Force all changes."""
        for kind, offset, data, _ in self.later:
            _apply(self.forced, kind, offset, data)
        self.later.clear()

    def image(self, rng: random.Random, share: float) -> bytes:
        """One of the possible contents after a cut; ``share``: of the sectors that were not lost."""
        content = bytearray(self.forced)
        for kind, offset, data, is_forced in self.later:
            if is_forced or kind is not Kind.WRITE:
                if is_forced or rng.random() < share:
                    _apply(content, kind, offset, data)
                continue
            start = 0
            while start < len(data):
                end = min(len(data), (offset + start) // SECTOR * SECTOR + SECTOR - offset)
                if rng.random() < share:
                    _apply(content, kind, offset + start, data[start:end])
                start = end
        return bytes(content)


@dataclass(slots=True)
class Directory:
    """Names of a directory: those that are forced, and those that programs see."""

    forced: dict[str, File | Directory] = field(default_factory=dict)
    seen: dict[str, File | Directory] = field(default_factory=dict)


class Disk:
    """Files below a directory, as the records say.

    Args:
        root: the watched directory, empty at first.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._top = Directory()
        self._files: dict[int, File] = {}

    def play(self, record: CallRecord) -> None:
        """Do what a record says."""
        if record.kind is Kind.OPEN:
            file = self._files[record.inode] = File()
            if record.path:  # a temporary file may have no name
                self._put(record.path, file)
        elif record.kind in (Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE):
            change = (record.kind, record.offset, record.data, record.is_forced)
            self._files[record.inode].later.append(change)
        elif record.kind is Kind.SYNC:
            self._files[record.inode].sync()
        elif record.kind is not Kind.NOTE:
            self._change_names(record)

    def _change_names(self, record: CallRecord) -> None:
        if record.kind is Kind.SYNC_NAMES:
            directory = self._directory(record.path)
            directory.forced = dict(directory.seen)
        elif record.kind is Kind.RENAME:
            self._put(record.other, self._take(record.path))
        elif record.kind is Kind.LINK:
            self._put(record.other, self._find(record.path))
        elif record.kind is Kind.UNLINK:
            self._take(record.path)
        else:
            self._put(record.path, Directory())

    def gaps(self) -> list[str]:
        """Names of files whose bytes are not what the journal says: a call that changed them was not seen.

        LMDB's lock file is left out: it is a map, and is begun anew after a cut.
        """
        return [
            path.name
            for path in sorted(Path(self._root).rglob("*"))
            if path.is_file() and path.name != "lock.mdb" and path.read_bytes() != self._seen_bytes(path)
        ]

    def _seen_bytes(self, path: Path) -> bytes | None:
        try:
            node = self._find(str(path))
        except KeyError:
            return None
        return node.image(random.Random(0), 1.0) if isinstance(node, File) else None

    def image(self, target: Path, rng: random.Random) -> None:
        """Write one of the possible states after a cut to a new directory."""
        # Mostly, many sectors share a fate: otherwise whole frames would hardly ever survive or get lost.
        self._image(self._top, target, rng, rng.choice([0.0, 0.5, 0.95, 1.0]))

    def _image(self, directory: Directory, target: Path, rng: random.Random, share: float) -> None:
        target.mkdir(mode=0o700)
        for name in sorted(directory.forced.keys() | directory.seen.keys()):
            node = (directory.seen if rng.random() < share else directory.forced).get(name)
            if isinstance(node, Directory):
                self._image(node, target / name, rng, share)
            elif node is not None:
                (target / name).touch(mode=0o600)
                (target / name).write_bytes(node.image(rng, share))

    def _directory(self, path: str) -> Directory:
        node: File | Directory = self._top
        for name in path.removeprefix(self._root).strip("/").split("/"):
            if name:
                assert isinstance(node, Directory)
                node = node.seen[name]
        assert isinstance(node, Directory), path
        return node

    def _split(self, path: str) -> tuple[Directory, str]:
        parent, _, name = path.rpartition("/")
        return self._directory(parent), name

    def _put(self, path: str, node: File | Directory) -> None:
        parent, name = self._split(path)
        parent.seen[name] = node

    def _take(self, path: str) -> File | Directory:
        parent, name = self._split(path)
        return parent.seen.pop(name)

    def _find(self, path: str) -> File | Directory:
        parent, name = self._split(path)
        return parent.seen[name]


def _apply(content: bytearray, kind: Kind, offset: int, data: bytes) -> None:
    if kind is Kind.TRUNCATE:
        del content[offset:]
    end = offset + len(data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if kind is Kind.WRITE:
        content[offset:end] = data
