"""Writer of a record: on a thread of its own, bounded in memory and on disk. The engine never waits for it.

The newest file has the configured name; older ones end in ``.1``, ``.2``, ... Only the last line of a file whose
process was killed may be incomplete; readers skip it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from tierkv.abc.places import exists, open_private
from tierkv.dispatch.threads.batch_writer import BatchWriter
from tierkv.dispatch.threads.spawn import Spawn, start_thread
from tierkv.errors import ConfigError
from tierkv.logs.definitions import RECORD_NOT_WRITTEN
from tierkv.logs.stack_log import StackLog
from tierkv.recording.entries import Entry, short_key

ENTRIES_MAX = 65_536
"""Pending entries at most, where the disk is slow; further ones are dropped and counted."""


class RecordWriter:
    """Files of entries, written in batches. ``put`` and ``close`` belong to the engine's thread.

    Args:
        path: the newest file. Its folder must exist.
        head: first line of every file; identifies stack and process.
        bytes_max: size at which a new file is begun.
        keep: older files kept.
        clock, engine_sleep: for :meth:`close`.
        entries_max: pending entries at most.
        spawn: starts the thread.
        log: log of the stack; one of its own if left out.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(  # noqa: PLR0913 - where and how much, and three doors for tests
        self,
        path: Path,
        head: Entry,
        bytes_max: int,
        keep: int,
        *,
        clock: Callable[[], float],
        engine_sleep: Callable[[float], None],
        entries_max: int = ENTRIES_MAX,
        spawn: Spawn = start_thread,
        log: StackLog | None = None,
    ) -> None:
        self.dropped = 0
        """Entries that were not written, for any reason."""
        self._path = path
        self._head = head
        self._bytes_max = bytes_max
        self._keep = keep
        self._lost = self._unnoted = self._failed = 0
        self._file: BinaryIO | None = None
        self._log = log or StackLog(clock)
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                f'record.path = "{path}": {error.strerror or error}; name a file in a folder that exists and may be '
                "written to, or leave the section [record] out"
            ) from error
        self._writer: BatchWriter[Entry] = BatchWriter(
            "tierkv-record",
            self._write_or_count,
            self._close_file,
            items_max=entries_max,
            clock=clock,
            engine_sleep=engine_sleep,
            spawn=spawn,
        )

    # -- engine's thread ---------------------------------------------------------------------------------------------

    def put(self, entries: Sequence[Entry]) -> None:
        """Take over entries without waiting. Entries beyond the bound are dropped; the record notes their number."""
        self.dropped = self._lost + self._failed
        if not entries or self._writer.done:
            return
        batch = entries
        if self._unnoted:
            first = entries[0]
            lost = {"is": "lost", "step": first.get("step", 0), "t": first.get("t", 0), "entries": self._unnoted}
            batch = [lost, *entries]
        if self._writer.put(batch):
            self._unnoted = 0
            return
        self._lost += len(entries)
        self._unnoted += len(entries)
        self.dropped += len(entries)

    def close(self, timeout_s: float) -> None:
        """Write pending entries, within ``timeout_s``. Idempotent."""
        self._writer.close(timeout_s)
        self.dropped = self._lost + self._failed

    # -- the writer's thread -----------------------------------------------------------------------------------------

    def _write_or_count(self, entries: Sequence[Entry]) -> None:
        try:
            self._write(entries)
        except OSError as error:
            self._failed += len(entries)
            self._close_file()
            self._log.report(RECORD_NOT_WRITTEN, path=self._path, reason=error)

    def _write(self, entries: Sequence[Entry]) -> None:
        lines = b"".join(map(line_of, entries))
        file = self._file or self._open()
        if file.tell() > len(line_of(self._head)) and file.tell() + len(lines) > self._bytes_max:
            self._rotate()
            file = self._open()
        if file.write(lines) < len(lines):  # unbuffered: a disk that fills up takes the part that fits
            raise OSError(errno.ENOSPC, "only a part of the entries fitted")

    def _open(self) -> BinaryIO:
        file: BinaryIO = os.fdopen(open_private(str(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", 0)
        self._file = file
        size = file.seek(0, os.SEEK_END)
        if size and not _ends_line(self._path, size):
            file.write(b"\n")  # a killed process has left an incomplete line
        file.write(line_of(self._head))
        return file

    def _rotate(self) -> None:
        self._close_file()
        older = [self._path, *(self._path.with_name(f"{self._path.name}.{i}") for i in range(1, self._keep + 1))]
        for newer, old in reversed(list(pairwise(older))):
            if exists(newer):
                newer.replace(old)
        if not self._keep:
            self._path.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def line_of(entry: Entry) -> bytes:
    """Return an entry as a line. Its keys may be bytes."""
    return json.dumps(entry, separators=(",", ":"), default=_plain).encode() + b"\n"


def _plain(value: object) -> str:
    return short_key(value) if isinstance(value, bytes) else str(value)


def _ends_line(path: Path, size: int) -> bool:
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"
