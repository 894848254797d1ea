"""Open LMDB environment: its transactions, and a map that grows.

A transaction never outlives the call that needed it. An open transaction keeps LMDB from reusing any page, in this and
in every other process, until the map is full.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import lmdb

from tierkv.abc.logs import plugin_logger
from tierkv.errors import BackendUnavailableError, TierKVError
from tierkv.types.keys import Key
from tierkv_lmdb.environments.file_watch import DATA_FILE, FileWatch
from tierkv_lmdb.environments.frame_copier import FrameCopier
from tierkv_lmdb.environments.gate import EnvironmentGate
from tierkv_lmdb.environments.trouble import Trouble, trouble_of
from tierkv_lmdb.failures import is_full

DATABASES = (b"frames", b"index")
_ROOM_BYTES = 64 << 10
"""Room that a disk lacks which has just cut a write short."""
_Value = TypeVar("_Value", bytes, memoryview)
_log = plugin_logger(__name__)


class Release(Protocol):
    """Callback for the end of an environment. ``synced``: whether all of its data is on the disk."""

    def __call__(self, *, synced: bool) -> None:
        """Release the directory; called once."""


class Environment:
    """Databases ``frames`` and ``index`` in one environment. May be used on any threads.

    Args:
        env: just opened; closed by this object.
        name: name of the tier, for messages.
        map_bytes_max: bound of the map's growth.
        read_only: whether this process may not write.
        release: called once, when the environment has been closed.

    Attributes:
        trouble: reason why this environment cannot go on; None while it can.
        failed_syncs: commits and syncs that failed. The kernel reports lost bytes to one of several callers only.

    Raises:
        lmdb.Error: the databases do not exist and cannot be created.
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
        self._copier = FrameCopier(self.path / DATA_FILE, self.page_bytes)
        self._files = FileWatch(self.path)
        self.place = self._files.identity
        """Device and inode of the directory."""
        self._gate = EnvironmentGate(f"{name} ({self.path})", self._close)
        self.copy = self._copier.copy
        self.copy_all = self._copier.copy_all
        self.trouble: Trouble | None = None
        self.failed_syncs = 0

    @contextmanager
    def reading(self, *, frames: bool = False) -> Iterator[lmdb.Transaction[memoryview]]:
        """Open a snapshot of the frames, or of the index; values are views that end with it.

        Raises:
            BackendError: closed.
            lmdb.Error: it cannot begin.
        """
        db = self.frames if frames else self.index
        with self._used(lambda: self._env.begin(db=db, buffers=True)) as txn:
            yield txn

    @contextmanager
    def writing(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """Open the only write transaction; committed at the end unless an exception is raised.

        Raises:
            BackendError: closed.
            lmdb.Error: it cannot begin, or was not committed.
        """
        # Writers wait here, not in LMDB: with the binding 2.1, a thread that waits inside LMDB prevents another thread
        # from aborting its transaction.
        is_complete = False
        try:
            with self._writer, self._used(lambda: self._env.begin(write=True, buffers=True)) as txn:
                yield txn
                is_complete = True
        except lmdb.Error as error:
            if is_complete:
                # A full disk refuses the pages of this transaction: those of others were synced by their own commits.
                self.failed_syncs += not is_full(error, self.path, _ROOM_BYTES)
                self._probe()
            raise

    @contextmanager
    def _used(self, begin: Callable[[], lmdb.Transaction[_Value]]) -> Iterator[lmdb.Transaction[_Value]]:
        txn = self._begin(begin)
        try:
            with txn:
                yield txn
        except lmdb.Error as error:
            self._note(error)
            raise
        finally:
            self._gate.leave()

    def _begin(self, begin: Callable[[], lmdb.Transaction[_Value]]) -> lmdb.Transaction[_Value]:
        """Begin a transaction within a use of the gate. If another process has grown the map, follow and retry once."""
        for last_try in (False, True):
            self._gate.enter()
            try:
                self._require_sound()
                return begin()
            except lmdb.MapResizedError:
                self._gate.leave()
                if last_try:
                    raise
                self._follow_map()
            except BaseException as error:
                self._note(error)
                self._gate.leave()
                raise
        raise AssertionError  # the last try returns or raises

    def is_sound(self) -> bool:
        """Whether the environment can go on, with its files in place and of sufficient length.

        LMDB does not survive an access to its map past the end of a file.
        """
        if self.trouble is None:
            self.trouble = self._files.find_trouble()
        return self.trouble is None

    def _require_sound(self) -> None:
        if not self.is_sound():
            raise BackendUnavailableError(f"{self.path}: {self.trouble}")

    def _note(self, error: BaseException) -> None:
        self.trouble = self.trouble or trouble_of(error)

    def _probe(self) -> None:
        """Find out whether a failed commit has ended the environment, before a reader does."""
        with contextlib.suppress(lmdb.Error, TierKVError), self.reading():
            pass

    def delete(self, keys: Iterable[Key]) -> None:
        """Delete frames and their index entries in one transaction; absent keys are no error.

        Raises:
            BackendError: closed, or in trouble.
            lmdb.Error: they were not deleted.
        """
        with self.writing() as txn:
            for key in keys:
                if 0 < len(key) <= self.key_bytes_max:
                    self.check_pages(txn, key)
                    txn.delete(key, db=self.frames)
                    txn.delete(key, db=self.index)

    def check_pages(self, txn: lmdb.Transaction[memoryview], key: bytes) -> None:
        """Check the header of a stored frame's pages, which LMDB trusts when it frees or overwrites them.

        Raises:
            lmdb.CorruptedError: it is damaged.
        """
        value = txn.get(key, db=self.frames)
        if value is not None and not self._copier.has_sound_pages(value):
            raise lmdb.CorruptedError(f"the header of the frame {key.hex()}")

    def page_of(self, txn: lmdb.Transaction[memoryview], key: bytes) -> int:
        """Return the number of the first page of a frame that was just stored; 0 if it shares a page."""
        value = txn.get(key, db=self.frames)
        return 0 if value is None else self._copier.page_of(value)

    def sync(self) -> None:
        """Force everything that was committed to the disk. Other threads may write meanwhile.

        Raises:
            BackendError: closed.
            lmdb.Error: the sync failed.
        """
        with self._gate.used():
            try:
                self._env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword
            except lmdb.Error as error:
                self.failed_syncs += 1
                self._note(error)
                raise

    def grow(self) -> bool:
        """Double the map, up to its bound. Returns whether it is larger than before the call."""
        seen = self.map_bytes
        wanted = min(2 * seen, self._map_bytes_max)
        if wanted <= seen:
            return False
        with self._gate.exclusive() as is_exclusive:
            if self.map_bytes != seen:
                return True
            if not is_exclusive or not _has_address_space(wanted):
                return False
            self._set_map_bytes(wanted)
            return True

    def clear_stale_readers(self) -> int:
        """Clear the slots of readers whose processes died within a transaction. Returns their number."""
        with self._gate.used():
            return self._env.reader_check()

    def busy_readers(self) -> list[int]:
        """Pids of other processes that are within a transaction."""
        with self._gate.used():
            table = self._env.readers()
        # Lines of pid, thread, transaction; "-" without a transaction.
        return sorted({int(pid) for pid in re.findall(r"^ *(\d+) +\w+ +\d+$", table, re.MULTILINE)})

    def close(self) -> None:
        """Refuse further transactions. Closes now, or when the last transaction has ended."""
        self._gate.close()

    def _follow_map(self) -> None:
        """Enlarge the map, because another process has stored pages beyond it."""
        seen = self.map_bytes
        with self._gate.exclusive() as is_exclusive:
            needed = (self._env.info()["last_pgno"] + 1) * self.page_bytes
            if needed > max(self._map_bytes_max, (self.path / DATA_FILE).stat().st_size):
                error = lmdb.CorruptedError(f"the meta page states {needed} bytes, more than the file has")
                self._note(error)
                raise error
            wanted = max(2 * seen, needed)
            if is_exclusive and self.map_bytes == seen and _has_address_space(wanted):
                self._set_map_bytes(wanted)

    def _set_map_bytes(self, size: int) -> None:
        self._env.set_mapsize(size)
        self.map_bytes = self._env.info()["map_size"]
        self._copier.find_map()

    def _close(self) -> None:
        synced = not self._read_only
        try:
            if synced:
                self._env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword
        except lmdb.Error as error:
            _log.warning("%s: not synced at close: %s", self.path, error)
            synced = False
        with contextlib.ExitStack() as ends:  # a close that reports an earlier failure of the device ends none of them
            ends.callback(self._release, synced=synced)
            ends.callback(self._files.close)
            ends.callback(self._env.close)
            ends.callback(self._copier.close)


def _has_address_space(size: int) -> bool:
    """Whether the process may map ``size`` bytes. LMDB drops its map before it asks for a new one, and needs one."""
    with contextlib.suppress(OSError, OverflowError, ValueError):
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
        return True
    return False
