"""SQLite file with the snapshots of stored chunks: one row each, with a checksum, bounded in number."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from tierkv.abc.places import check_private_directory, open_private, set_aside
from tierkv.errors import BackendError, ConfigError
from tierkv.logs.definitions import TOKENS_NOT_KEPT, TOKENS_SET_ASIDE
from tierkv.logs.stack_log import StackLog
from tierkv.types.keys import Key

CHECKSUM_BYTES = 16
LOCK_TIMEOUT_S = 0.5
"""Seconds that another process may still hold the file, as one that is ending does."""

_SIBLINGS = ("-wal", "-shm", "-journal")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    number INTEGER PRIMARY KEY AUTOINCREMENT, namespace BLOB NOT NULL, key BLOB NOT NULL, snapshot BLOB NOT NULL,
    UNIQUE (namespace, key))
"""
_INSERT = "INSERT OR REPLACE INTO chunks (namespace, key, snapshot) VALUES (?, ?, ?)"
_SELECT = "SELECT key, snapshot FROM chunks WHERE namespace = ? ORDER BY number"
_DELETE = "DELETE FROM chunks WHERE namespace = ? AND key = ?"
_TRIM = """
DELETE FROM chunks WHERE (namespace = ?) = ? AND number NOT IN (
    SELECT number FROM chunks WHERE (namespace = ?) = ? ORDER BY number DESC LIMIT ?)
"""

Row = tuple[Key, bytes | None]
"""A chunk and its snapshot as bytes; None: to be deleted."""


class TokenFile:
    """Open file. One thread at a time; another one may go on when the first has ended.

    Args:
        path: of the file. Its folder must exist, and only the user of this process may write in it.
        namespace: fingerprint of the stack's namespace. Rows of others are kept, and never read.
        rows_max: largest number of rows of this namespace, and of all others together. The oldest are deleted.
        log: log of the stack.

    Raises:
        ConfigError: the file cannot be opened, or another process uses it.
    """

    def __init__(self, path: Path, namespace: bytes, rows_max: int, log: StackLog) -> None:
        self._path = path
        self._namespace = namespace
        self._rows_max = rows_max
        self._log = log
        try:
            check_private_directory(path.parent, "events.tokens_path")
            os.close(open_private(str(path), os.O_RDWR | os.O_CREAT))
            try:
                self._connection = self._opened()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # locked, full, not writable
                    raise
                log.report(TOKENS_SET_ASIDE, path=path, reason=error)
                self._set_aside()
                self._connection = self._opened()
        except (OSError, sqlite3.Error, BackendError) as error:
            reason = "another process uses it" if "locked" in str(error) else getattr(error, "strerror", None) or error
            raise ConfigError(
                f'events.tokens_path = "{path}": {reason}; name a file in a private folder that exists, one for each '
                "process, or leave the key out"
            ) from error

    def _opened(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_SCHEMA)
            for is_ours in (0, 1):
                facts = (self._namespace, is_ours)
                connection.execute(_TRIM, (*facts, *facts, self._rows_max))
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_aside(self) -> None:
        for sibling in _SIBLINGS:
            with contextlib.suppress(FileNotFoundError):
                self._path.with_name(self._path.name + sibling).unlink()
        set_aside(self._path)
        os.close(open_private(str(self._path), os.O_RDWR | os.O_CREAT))

    def rows(self) -> Iterator[tuple[Key, bytes]]:
        """Keys and snapshots of this namespace, the oldest first, without damaged rows. A bad page ends them."""
        damaged, reason = 0, ""
        try:
            for key, value in self._connection.execute(_SELECT, (self._namespace,)):
                if type(key) is type(value) is bytes and value[:CHECKSUM_BYTES] == self._checksum(
                    key, snapshot := value[CHECKSUM_BYTES:]
                ):
                    yield Key(key), snapshot
                else:
                    damaged += 1
        except sqlite3.DatabaseError as error:
            reason = f", and its list ends early: {error}"
        if damaged or reason:
            self._log.report(TOKENS_NOT_KEPT, reason=f"{damaged} rows of {self._path} are damaged{reason}")

    def apply(self, changes: Sequence[Row]) -> None:
        """Write and delete rows, all or none.

        Raises:
            sqlite3.Error: none was written, as on a full disk.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for key, snapshot in changes:
                if snapshot is None:
                    self._connection.execute(_DELETE, (self._namespace, key))
                else:
                    row = self._checksum(key, snapshot) + snapshot
                    self._connection.execute(_INSERT, (self._namespace, key, row))
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def delete(self, keys: Iterable[Key]) -> None:
        """Delete the rows of chunks. As :meth:`apply`."""
        self.apply([(key, None) for key in keys])

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _checksum(self, key: bytes, snapshot: bytes) -> bytes:
        return xxhash.xxh3_128_digest(self._namespace + len(key).to_bytes(2, "little") + key + snapshot)
