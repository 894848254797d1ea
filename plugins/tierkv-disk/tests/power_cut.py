"""Simulated power cuts: unsynced data may be lost, sector by sector and name by name.

The tier runs on real files. Every call that changes or syncs a file is watched. From synced and unsynced bytes,
:meth:`Platter.image` builds one of the many possible states of the device after a cut.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

SECTOR = 512
CHANGES = ("pwrite", "pwritev", "posix_fallocate", "ftruncate")
SYNCS = ("fsync", "fdatasync")


class Platter:
    """Watch all files below ``root``. ``on_step`` runs before each change and each sync: possible moments of a cut."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, on_step: Callable[[], None]) -> None:
        self._root = root
        self._on_step = on_step
        self._durable_bytes: dict[int, bytes] = {}
        self._durable_names: dict[Path, int] = {}
        # An open descriptor keeps an inode's number from being reused.
        self._held: dict[int, int] = {}
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))
        for name in SYNCS:
            monkeypatch.setattr(os, name, self._watched_sync(getattr(os, name)))

    def image(self, target: Path, rng: random.Random) -> None:
        """Write a possible state after a power cut at this moment to ``target``."""
        names = self._names()
        for path in names.keys() | self._durable_names.keys():
            inode = rng.choice([names.get(path), self._durable_names.get(path)])
            if inode is not None:
                copy = target / path.relative_to(self._root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(self._content(inode, rng))

    def release(self) -> None:
        """Close the files."""
        for fd in self._held.values():
            os.close(fd)

    def _content(self, inode: int, rng: random.Random) -> bytes:
        durable, current = self._durable_bytes.get(inode, b""), self._read(inode)
        size = rng.choice([len(durable), len(current)])
        durable, current = durable.ljust(size, b"\0"), current.ljust(size, b"\0")
        sectors = range(0, size, SECTOR)
        # Mostly, many sectors share a fate: otherwise whole frames would hardly ever survive or get lost.
        share = rng.choice([0.0, 0.5, 0.95, 1.0])
        return b"".join((current if rng.random() < share else durable)[at : at + SECTOR] for at in sectors)[:size]

    def _watched(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self._on_step()
            return original(*arguments)

        return call

    def _watched_sync(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            self._on_step()
            original(fd)
            target = Path(f"/proc/self/fd/{fd}").readlink()
            if not target.is_relative_to(self._root):
                return
            if target.is_dir():
                kept = {path: inode for path, inode in self._durable_names.items() if path.parent != target}
                now = {path: inode for path, inode in self._names().items() if path.parent == target}
                self._durable_names = kept | now
            else:
                inode = os.fstat(fd).st_ino
                self._names()
                self._durable_bytes[inode] = self._read(inode)

        return call

    def _names(self) -> dict[Path, int]:
        found = {}
        for path in self._root.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                inode = os.fstat(fd).st_ino
                if self._held.setdefault(inode, fd) != fd:
                    os.close(fd)
                found[path] = inode
        return found

    def _read(self, inode: int) -> bytes:
        fd = self._held[inode]
        return os.pread(fd, os.fstat(fd).st_size, 0)
