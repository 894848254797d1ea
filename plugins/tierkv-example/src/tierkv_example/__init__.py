"""Example backend: frames as rows of an SQLite file. Everything that a tier of tierkv needs is on this page.

A namespace is one database file with one table: key to frame. A batch of writes or deletes is one transaction, so it is
stored whole and durably, or not at all. The exclusive lock of the file keeps a second process out. ``scan`` hands the
stored keys to the framework, which keeps the index from then on.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierkv.abc import (
    BackendContext,
    BackendPlugin,
    Capabilities,
    Entry,
    ReadRequest,
    ReadResult,
    WriteRequest,
    WriteResult,
)
from tierkv.abc.places import absolute_path, make_private_directory
from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.hookspecs import hookimpl
from tierkv.types.keys import Key

TIERKV_SPI = 1
"""Version of the plugin interface that this module implements."""


@dataclass(frozen=True, slots=True)
class ExampleOptions:
    """Options of the tier, as written in its table."""

    path: str
    """Directory of the database files, one per namespace."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_path(self.path))


class ExampleBackend:
    """The five verbs and ``scan``. May be called on any threads: one lock serialises the calls."""

    def __init__(self, context: BackendContext, options: ExampleOptions) -> None:
        self._lock = threading.Lock()
        pages = (context.capacity_bytes or 0) // 4096 * 2  # twice the capacity: room for tree and half-used pages
        try:
            make_private_directory(Path(options.path))
            file = Path(options.path) / f"{context.namespace.fingerprint().hex()}.sqlite"
            file.touch(0o600)  # SQLite would let every user read it; its journal takes over the mode
            self._db = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=1)
            self._db.executescript(
                "PRAGMA locking_mode=EXCLUSIVE; PRAGMA synchronous=FULL; BEGIN EXCLUSIVE; CREATE TABLE IF NOT EXISTS"
                f" frames (key BLOB PRIMARY KEY, frame BLOB); COMMIT; PRAGMA max_page_count={pages or 2**32 - 2}"
            )
        except (OSError, sqlite3.Error) as error:
            raise BackendError(f"{options.path}: {error}; give a writable directory of its own") from error

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key has a row."""
        with self._lock:
            return [bool(self._db.execute("SELECT 1 FROM frames WHERE key = ?", (key,)).fetchone()) for key in keys]

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Copy each frame to its caller's buffer; None if there is no row."""
        with self._lock:
            return [self._read(request) for request in requests]

    def _read(self, request: ReadRequest) -> ReadResult:
        row = self._db.execute("SELECT frame FROM frames WHERE key = ?", (request.key,)).fetchone()
        if row is None:
            return None
        request.buffer[: len(row[0])] = row[0]
        return len(row[0])

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Store all frames of the batch in one transaction."""
        return self._change("REPLACE INTO frames VALUES (?, ?)", [(item.key, item.frame) for item in requests])

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Delete all keys in one transaction; absent keys are no error."""
        return self._change("DELETE FROM frames WHERE key = ?", [(key,) for key in keys])

    def _change(self, statement: str, rows: Sequence[tuple[object, ...]]) -> list[WriteResult]:
        with self._lock:
            try:
                with self._db:  # its end commits, and a full disk is often found there; an error rolls back
                    self._db.execute("BEGIN")
                    self._db.executemany(statement, rows)
            except sqlite3.OperationalError as error:  # OutOfSpaceError makes the framework evict: for nothing else
                kind = OutOfSpaceError if error.sqlite_errorcode == sqlite3.SQLITE_FULL else BackendError
                return [kind(f"SQLite: {error}")] * len(rows)
        return [None] * len(rows)

    def scan(self) -> Iterable[Entry]:
        """Everything stored, oldest first."""
        with self._lock:
            return [Entry(*row) for row in self._db.execute("SELECT key, length(frame) FROM frames ORDER BY rowid")]

    def close(self) -> None:
        """Release the file and its lock, after any call that still runs: SQLite must not lose its file then."""
        with self._lock:
            self._db.close()


CAPABILITIES = Capabilities(
    durable=True, authoritative_index=True, scan=True, reads_end_with_call=True, preferred_concurrency=1
)
PLUGIN = BackendPlugin("example", "frames as rows of an SQLite file", ExampleOptions, CAPABILITIES, ExampleBackend)


@hookimpl
def tierkv_backends() -> list[BackendPlugin]:
    """Register the backend ``example``."""
    return [PLUGIN]
