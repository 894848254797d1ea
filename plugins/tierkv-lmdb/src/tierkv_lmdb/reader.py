"""Read-only backend of an LMDB tier: any number of processes read beside the one that writes.

A reader sees what the writer has committed at the time of the call. It never waits: before the writer has created the
data file, every key is absent. If the writer starts again with another file, the reader reopens it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb

from tierkv.abc import ReadRequest, ReadResult, StoredFrame, WriteRequest, WriteResult
from tierkv.abc.places import exists
from tierkv.errors import TierKVError
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace
from tierkv_lmdb import frame_reads
from tierkv_lmdb.directory import MANIFEST, UNSYNCED, foreign_data, has_manifest, is_of_this_boot
from tierkv_lmdb.environments.environment import DATABASES, Environment
from tierkv_lmdb.environments.file_watch import DATA_FILE
from tierkv_lmdb.failures import Failures

MAP_BYTES_MIN = 64 << 20
"""Smallest map. The map has twice the size of the file, because it must be replaced whenever the file outgrows it."""


class _Open(NamedTuple):
    environment: Environment
    file: tuple[int, int]


class LmdbReader:
    """One namespace of an LMDB tier that another process writes. Verbs may be called on any threads.

    Args:
        directory: of the namespace.
        namespace: expected namespace.
        failures: factory of the tier's errors.
        tier: name of the tier, for messages.
    """

    def __init__(self, directory: Path, namespace: Namespace, failures: Failures, tier: str) -> None:
        self._directory = directory
        self._namespace = namespace
        self._failures = failures
        self._tier = tier
        self._lock = threading.Lock()
        self._open: _Open | None = None
        self._closed = False

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is in the index now."""
        environment = self._current()
        return [False] * len(keys) if environment is None else frame_reads.contains(environment, self._failures, keys)

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Copy each frame to its caller's buffer, several frames per transaction."""
        environment = self._current()
        return (
            [None] * len(requests) if environment is None else frame_reads.read(environment, self._failures, requests)
        )

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Refuse: one error per key."""
        return [self._failures.backend_error("opened for reading only", request.key) for request in requests]

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Refuse: one error per key."""
        return [self._failures.backend_error("opened for reading only", key) for key in keys]

    def list_frames(self, *, keys: bool) -> Iterator[StoredFrame]:
        """Yield everything in the index, in the order of the keys, as committed meanwhile. Times are unknown."""
        del keys  # they cost nothing here
        environment = self._current()
        if environment is not None:
            yield from frame_reads.list_frames(environment, self._failures)

    def close(self) -> None:
        """Refuse further calls. Closes the environment now, or when the last call in flight has ended."""
        with self._lock:
            self._closed = True
            self._close_environment()

    def _current(self) -> Environment | None:
        """Environment of the current data file, opened if necessary; None if there is no file.

        Raises:
            BackendError: the reader is closed, or the file cannot be read.
        """
        data = self._directory / DATA_FILE
        with self._lock:
            if self._closed:
                raise self._failures.backend_error("is closed")
            try:
                status = data.stat()
            except FileNotFoundError:
                self._close_environment()
                return None
            file = (status.st_dev, status.st_ino)
            if self._open is not None and self._open.file == file and self._open.environment.is_sound():
                return self._open.environment
            self._close_environment()
            environment = self._try_open(status.st_size)
            self._open = None if environment is None else _Open(environment, file)
            return environment

    def _close_environment(self) -> None:
        if self._open is not None:
            self._open.environment.close()
            self._open = None

    def _try_open(self, file_bytes: int) -> Environment | None:
        try:
            if not exists(self._directory / MANIFEST) or self._is_untrusted():
                return None
            if foreign := foreign_data(self._directory):
                raise self._failures.backend_error(f"{foreign[0]} is not a regular file with one name")
            has_manifest(self._directory, self._namespace)
            env = lmdb.open(
                str(self._directory),
                map_size=max(MAP_BYTES_MIN, 2 * file_bytes),
                max_dbs=len(DATABASES),
                readonly=True,
                create=False,
            )
        except TierKVError:
            raise
        except (lmdb.Error, OSError) as error:
            raise self._failures.from_cause("open for reading", error) from error
        try:
            return Environment(env, name=self._tier, map_bytes_max=0, read_only=True, release=_nothing)
        except (lmdb.ReadonlyError, lmdb.NotFoundError):  # the writer has not created its databases yet
            env.close()
            return None
        except BaseException:
            env.close()
            raise

    def _is_untrusted(self) -> bool:
        """Whether the machine went down before the data was synced; the next writer will drop it."""
        return os.path.lexists(self._directory / UNSYNCED) and not is_of_this_boot(self._directory)


def _nothing(*, synced: bool) -> None:
    """Release nothing: a reader holds the environment alone."""
    del synced
