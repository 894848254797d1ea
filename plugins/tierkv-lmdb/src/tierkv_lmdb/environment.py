"""One open LMDB environment: its transactions, and a map that grows.

A transaction never outlives the call that needed it: one that is left open keeps LMDB from using any page again, here
and in every other process, until the map is full.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import lmdb

from tierkv_lmdb.fetching import FrameFetcher
from tierkv_lmdb.gate import EnvironmentGate

DATA_FILE = "data.mdb"
DATABASES = (b"frames", b"index")
_Value = TypeVar("_Value", bytes, memoryview)
_log = logging.getLogger(__name__)


class Release(Protocol):
    """Called once, when the environment is closed; told whether all of its data is on the disk."""

    def __call__(self, *, synced: bool) -> None:
        """Let go of the place."""


class Environment:
    """Databases ``frames`` and ``index`` in one environment. May be used on any threads.

    Args:
        env: just opened; closed here.
        name: the tier's, for messages.
        map_bytes_max: the map grows up to this, when it is full.
        read_only: whether this process may not write.
        release: called at the end.

    Raises:
        lmdb.Error: the databases are not there, and cannot be made.
        OSError: the data file cannot be opened.
    """

    def __init__(
        self, env: lmdb.Environment, *, name: str, map_bytes_max: int, read_only: bool, release: Release
    ) -> None:
        self._env = env
        self._release = release
        self._read_only = read_only
        self._writer = threading.Lock()
        self.path = Path(env.path())
        self.key_bytes_max = env.max_key_size()
        self.page_bytes = env.stat()["psize"]
        self.map_bytes = env.info()["map_size"]
        self._map_bytes_max = map_bytes_max
        self.frames, self.index = (env.open_db(database, create=not read_only) for database in DATABASES)
        self._fetcher = FrameFetcher(self.path / DATA_FILE, self.page_bytes)
        self._gate = EnvironmentGate(f"{name} ({self.path})", self._close)
        self.copy = self._fetcher.copy

    @contextmanager
    def reading(self, *, frames: bool = False) -> Iterator[lmdb.Transaction[memoryview]]:
        """A snapshot of the frames, or of the index; values are views that end with it.

        Raises:
            BackendError: closed.
            lmdb.Error: it cannot begin.
        """
        db = self.frames if frames else self.index
        with self._used(lambda: self._env.begin(db=db, buffers=True)) as txn:
            yield txn

    @contextmanager
    def writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        """The one transaction that may write; committed at the end unless something is raised.

        Raises:
            BackendError: closed.
            lmdb.Error: it cannot begin, or was not committed.
        """
        # Writers wait here, not in LMDB: with the binding 2.1, a thread that waits there keeps another one, which is in
        # a transaction and must abort it, from doing so.
        with self._writer, self._used(lambda: self._env.begin(write=True)) as txn:
            yield txn

    @contextmanager
    def _used(self, begin: Callable[[], lmdb.Transaction[_Value]]) -> Iterator[lmdb.Transaction[_Value]]:
        txn = self._begin(begin)
        try:
            with txn:
                yield txn
        finally:
            self._gate.leave()

    def _begin(self, begin: Callable[[], lmdb.Transaction[_Value]]) -> lmdb.Transaction[_Value]:
        """A transaction, within a use of the gate."""
        for last_try in (False, True):
            self._gate.enter()
            try:
                return begin()
            except lmdb.MapResizedError:
                self._gate.leave()
                if last_try:
                    raise
                self._follow_map()
            except BaseException:
                self._gate.leave()
                raise
        raise AssertionError  # the last try returns or raises

    def sync(self) -> None:
        """Bring everything that was committed to the disk. Others write meanwhile.

        Raises:
            BackendError: closed.
            lmdb.Error: the disk does not take it.
        """
        with self._gate.used():
            self._env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword

    def grow(self) -> bool:
        """Make the map larger: twice as large, or as large as it may be. Whether it has room that it had not before."""
        seen = self.map_bytes
        wanted = min(2 * seen, self._map_bytes_max)
        if wanted <= seen:
            return False
        with self._gate.alone() as is_alone:
            if self.map_bytes != seen:
                return True
            if not is_alone or not _is_address_space_for(wanted):
                return False
            self._set_map_bytes(wanted)
            return True

    def clear_stale_readers(self) -> int:
        """Forget readers whose processes died in the middle of a transaction; how many there were."""
        with self._gate.used():
            return self._env.reader_check()

    def busy_readers(self) -> list[int]:
        """Pids of other processes that are in the middle of a transaction."""
        with self._gate.used():
            table = self._env.readers()
        # Lines of pid, thread, transaction; "-" where there is none.
        return sorted({int(pid) for pid in re.findall(r"^ *(\d+) +\w+ +\d+$", table, re.MULTILINE)})

    def close(self) -> None:
        """Refuse further transactions; close now, or when the last one in progress is out."""
        self._gate.close()

    def _follow_map(self) -> None:
        """Another process has put pages beyond this map: make it larger, too."""
        seen = self.map_bytes
        with self._gate.alone() as is_alone:
            wanted = max(2 * seen, (self.path / DATA_FILE).stat().st_size)
            if is_alone and self.map_bytes == seen and _is_address_space_for(wanted):
                self._set_map_bytes(wanted)

    def _set_map_bytes(self, size: int) -> None:
        self._env.set_mapsize(size)
        self.map_bytes = self._env.info()["map_size"]
        self._fetcher.remapped()

    def _close(self) -> None:
        synced = not self._read_only
        try:
            if synced:
                self._env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword
        except lmdb.Error as error:
            _log.warning("%s: not synced at close: %s", self.path, error)
            synced = False
        self._fetcher.close()
        self._env.close()
        self._release(synced=synced)


def _is_address_space_for(size: int) -> bool:
    """Whether the process may map so much. LMDB gives its map up before it asks, and cannot go on without one."""
    with contextlib.suppress(OSError, OverflowError, ValueError):
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
        return True
    return False
