"""Frames as LMDB values: any number of processes that only read, beside the one that writes.

A reader sees what the writer has committed when it asks. It waits for nobody: before the writer has begun, there is
nothing here. Should the writer begin anew with another file, the reader follows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb

from tierkv.abc import BackendContext, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, NamespaceMismatchError, TierKVError
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace
from tierkv_lmdb import frames
from tierkv_lmdb.environment import DATA_FILE, DATABASES, Environment
from tierkv_lmdb.failures import Failures
from tierkv_lmdb.options import LmdbReaderOptions
from tierkv_lmdb.place import MANIFEST, UNSYNCED, boot_id, require_manifest, require_root

MAP_BYTES_MIN = 64 << 20
"""The map is at least so large, and twice the file: it has to be made anew whenever the file outgrows it."""


def open_reader(context: BackendContext, options: LmdbReaderOptions) -> LmdbReader:
    """A reader of one namespace, whether or not there is something to read yet, or its writer is just starting.

    Raises:
        NamespaceMismatchError: the path holds something else, another layout or another namespace.
        BackendError: the path cannot be used.
    """
    directory = options.root / context.namespace.fingerprint().hex()
    reader = LmdbReader(directory, context.namespace, Failures(context.tier, directory), context.tier)
    try:
        require_root(options.root)
        reader.contains([])
    except NamespaceMismatchError as error:
        error.tier = context.tier
        raise
    except BackendError as error:
        _log.warning("tier %s cannot be read yet: %s", context.tier, error)
    except OSError as error:
        raise BackendError(
            f"{options.root}: cannot be used ({error}). Give the path of an LMDB tier that this user can read",
            tier=context.tier,
        ) from error
    return reader


_log = logging.getLogger(__name__)


class _Open(NamedTuple):
    environment: Environment
    file: tuple[int, int]


class LmdbReader:
    """One namespace of an LMDB tier that another process writes. Verbs may be called on any threads.

    Args:
        directory: of the namespace.
        namespace: whose frames may be read.
        failures: words for what goes wrong.
        tier: its name.
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
        """Whether each key is in the index at this moment."""
        environment = self._current()
        return [False] * len(keys) if environment is None else frames.contains(environment, self._failures, keys)

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Copy each frame out of the page cache, a transaction for each."""
        environment = self._current()
        if environment is None:
            return [None] * len(requests)
        return [frames.read(environment, self._failures, request) for request in requests]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Refuse."""
        return [self._failures.error("opened for reading only", request.key) for request in requests]

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Refuse."""
        return [self._failures.error("opened for reading only", key) for key in keys]

    def close(self) -> None:
        """Refuse further calls; let go of the environment now, or when the last call in progress is out."""
        with self._lock:
            self._closed = True
            self._leave()

    def _current(self) -> Environment | None:
        """The environment that is there now, or None.

        Raises:
            BackendError: closed; or what is there cannot be read.
        """
        data = self._directory / DATA_FILE
        with self._lock:
            if self._closed:
                raise self._failures.error("is closed")
            try:
                status = data.stat()
            except FileNotFoundError:
                self._leave()
                return None
            file = (status.st_dev, status.st_ino)
            if self._open is not None and self._open.file == file:
                return self._open.environment
            self._leave()
            environment = self._try_open(status.st_size)
            self._open = None if environment is None else _Open(environment, file)
            return environment

    def _leave(self) -> None:
        if self._open is not None:
            self._open.environment.close()
            self._open = None

    def _try_open(self, file_bytes: int) -> Environment | None:
        try:
            if not (self._directory / MANIFEST).exists() or self._is_untrusted():
                return None
            require_manifest(self._directory, self._namespace)
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
            raise self._failures.of("open for reading", error) from error
        try:
            return Environment(env, name=self._tier, map_bytes_max=0, read_only=True, release=_nothing)
        except (lmdb.ReadonlyError, lmdb.NotFoundError):  # the writer has not made its databases yet
            env.close()
            return None
        except BaseException:
            env.close()
            raise

    def _is_untrusted(self) -> bool:
        """Whether the machine went down over data that was not synced; the next writer will drop it."""
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / UNSYNCED).read_text(errors="replace") != boot_id()
        return False


def _nothing(*, synced: bool) -> None:
    """A reader holds nothing but the environment."""
    del synced
