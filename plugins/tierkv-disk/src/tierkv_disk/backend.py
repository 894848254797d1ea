"""The backend: frames in runs of pages, keys in a table, the table's history in a log.

Order of a write, which is all of the crash safety: frame into free pages; force it to the device; append the log record
and force that; only then tell the table, free the old pages and answer. A kill between any two leaves the old state or
the new.

Locks. The turn of :class:`~tierkv_disk.commits.Commits` serialises log appends, so that log and table change in the
same order; ``_grow_lock`` lets one thread at a time allocate a segment; ``_table_lock`` guards table and quarantine for
a few instructions. They nest in this order, and none is held while frames move.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tierkv.abc import Entry, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, CorruptFrameError, OutOfSpaceError, TierKVError
from tierkv.types.keys import Key
from tierkv_disk.commits import Commits
from tierkv_disk.failures import NO_SPACE, as_tier_error
from tierkv_disk.gate import Gate
from tierkv_disk.home import Home
from tierkv_disk.index_log import KEY_BYTES_MAX, IndexLog, Record, RecordKind, records_of
from tierkv_disk.places import Run, frame_bytes_of, pages_for, segment_of
from tierkv_disk.quarantine import Quarantine, Suspect
from tierkv_disk.recovery import mostly_dead, put_records, recover

GROWTH_PAUSE_S = 1.0
"""Whether a limit still stands against growth takes a look at all files of the directory."""
logger = logging.getLogger("tierkv_disk")


class DiskBackend:
    """See :class:`tierkv.abc.Backend`. All verbs may be called on several threads at once.

    Attributes:
        recovery: what opening found.
    """

    def __init__(self, home: Home, clock: Callable[[], float] = time.monotonic) -> None:
        """Recover what lies in a locked home; :meth:`close` will release it.

        Raises:
            OSError: something cannot be read or written.
        """
        self._home = home
        self._segments = home.source.segments
        self._directory = home.source.directory
        self._tier = home.tier
        self._grow_lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._quarantine = Quarantine(self._directory, home.quarantine_bytes_max)
        self._table, log, self.recovery = recover(home.source, self._quarantine, sync=home.sync)
        try:
            home.settled()
        except BaseException:
            log.close()
            raise
        self._commits = Commits(log, self._compact_if_dead)
        self._compact_after = 0
        self._clock = clock
        self._ask_again_s = 0.0
        self._gate = Gate(self._release)
        if not self.recovery.lossless:
            logger.warning("tier %s, %s: %s", self._tier, self._directory, "; ".join(self.recovery.losses()))

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """See :meth:`tierkv.abc.Backend.contains`."""
        with self._table_lock:
            return [key in self._table.entries for key in keys]

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """See :meth:`tierkv.abc.Backend.read_into`."""
        with self._gate.entered():
            return [self._read(request) for request in requests]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """See :meth:`tierkv.abc.Backend.write`."""
        with self._gate.entered():
            if self._home.sync_each:
                return [result for request in requests for result in self._write([request])]
            return self._write(requests)

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """See :meth:`tierkv.abc.Backend.delete`."""
        with self._gate.entered():
            present = [key for key in dict.fromkeys(keys) if key in self._table.entries]
            if not present:
                return [None] * len(keys)
            try:
                records = [Record(RecordKind.DELETE, key) for key in present]
                self._commits.commit(records, partial(self._drop, present))
            except OSError as error:
                failed = set(present)
                return [self._error(error, "cannot delete", key) if key in failed else None for key in keys]
            return [None] * len(keys)

    def scan(self) -> Iterable[Entry]:
        """See :meth:`tierkv.abc.SupportsScan.scan`; oldest first."""
        with self._table_lock:
            entries = dict(self._table.entries)
        return map(Entry, entries, map(frame_bytes_of, entries.values()))

    def quarantine(self, key: Key, reason: str) -> None:
        """See :class:`tierkv.abc.SupportsQuarantine`: the frame's pages are not used again when it is deleted."""
        with self._gate.entered():
            with self._table_lock:
                found = self._table.find(key)
            if found is not None:
                self._isolate(Suspect(key, found[0], reason))

    def close(self) -> None:
        """See :meth:`tierkv.abc.Backend.close`. Files stay open, and locked, until the last call has left."""
        self._gate.close()

    def _read(self, request: ReadRequest) -> ReadResult:
        with self._table_lock:
            found = self._table.find(request.key)
            if found is None:
                return None
            runs, size = found
            self._table.pins.pin(runs[0].place)
        try:
            if len(request.buffer) < size:
                error = BackendError(f"the buffer has {len(request.buffer)} bytes, the frame {size}")
                return self._error(error, "cannot read", request.key)
            count = self._segments.read(runs, request.buffer, size)
        except OSError as error:
            self._isolate(Suspect(request.key, runs, f"reading it failed: {error.strerror}"))
            return self._error(error, "cannot read", request.key)
        finally:
            with self._table_lock:
                self._table.unpin(runs[0].place)
        if count < size:
            message = f"segment {segment_of(runs[0].place)} ends {size - count} bytes before the frame does"
            return CorruptFrameError(message, tier=self._tier, key=request.key)
        return count

    def _write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        results: list[WriteResult] = [None] * len(requests)
        placed: dict[int, tuple[Run, ...]] = {}
        for number, request in enumerate(requests):
            try:
                placed[number] = self._place(request)
            except OSError as error:
                results[number] = self._error(error, "cannot write", request.key)
        if not placed:
            return results
        stored = [(requests[number].key, runs, len(requests[number].frame)) for number, runs in placed.items()]
        try:
            if self._home.sync:
                self._segments.sync({segment_of(run.place) for runs in placed.values() for run in runs})
            records = [record for key, runs, size in stored for record in records_of(key, runs, size)]
            self._commits.commit(records, partial(self._put, stored))
        except OSError as error:
            with self._table_lock:
                for number, runs in placed.items():
                    results[number] = self._error(error, "cannot write", requests[number].key)
                    self._table.give_back(runs)
        return results

    def _place(self, request: WriteRequest) -> tuple[Run, ...]:
        """Put a frame into free pages; nobody can see it there yet."""
        size = len(request.frame)
        if self._commits.log.broken:
            raise BackendError(self._commits.log.broken)
        if not 0 < len(request.key) <= KEY_BYTES_MAX:
            raise BackendError(f"a key of {len(request.key)} bytes: 1 to {KEY_BYTES_MAX} are possible")
        if not 0 < size <= self._home.frame_bytes_max:
            raise BackendError(f"a frame of {size} bytes: 1 to {self._home.frame_bytes_max} are possible here")
        runs = self._take(pages_for(size))
        try:
            self._segments.write(runs, request.frame)
        except OSError as error:
            if error.errno not in NO_SPACE:
                self._isolate(Suspect(request.key, runs, f"writing it failed: {error.strerror}"))
            with self._table_lock:
                self._table.give_back(runs)
            raise
        return runs

    def _take(self, pages: int) -> tuple[Run, ...]:
        """Free pages: in one run, in one run of a new segment, or in several runs, whichever can be had first."""
        with self._table_lock:
            runs = self._table.take(pages)
        if runs is not None:
            return runs
        with self._grow_lock:
            with self._table_lock:
                runs = self._table.take(pages)
            if runs is not None:
                return runs
            grown = self._grow(pages)
            # Within one hold of the lock, so that no other thread can be faster to take what this one brought.
            with self._table_lock:
                if grown is not None:
                    self._table.free.add(grown)
                runs = self._table.free.gather(pages)
        if runs is None:
            raise OutOfSpaceError("capacity, directory_bytes_max or min_free_bytes is reached, and too little is free")
        return runs

    def _grow(self, pages: int) -> Run | None:
        """One more segment if there is room. Where a frame can be laid into several runs, not asked all the time."""
        if self._table.free.pages >= pages and self._clock() < self._ask_again_s:
            return None
        grown = self._segments.grow()
        self._ask_again_s = self._clock() + GROWTH_PAUSE_S if grown is None else 0.0
        return grown

    def _put(self, stored: Sequence[tuple[Key, tuple[Run, ...], int]]) -> None:
        with self._table_lock:
            for key, runs, size in stored:
                self._table.put(key, runs, size)

    def _drop(self, keys: Sequence[Key]) -> None:
        with self._table_lock:
            for key in keys:
                self._table.drop(key)

    def _isolate(self, suspect: Suspect) -> None:
        """Take a place out of service, and others back that have been long enough out."""
        table = self._table
        with self._table_lock:
            table.out_of_service.add(suspect.runs[0].place)
            for released in self._quarantine.add(suspect):
                table.out_of_service.discard(released.runs[0].place)
                found = table.find(released.key)
                if found is None or found[0] != released.runs:
                    table.give_back(released.runs)
            self._segments.pages_out_of_service = self._quarantine.pages
        self._quarantine.save()

    def _compact_if_dead(self) -> None:
        """Replace a long log by a shorter one. Only writers wait: the table changes in the turn of commits alone."""
        log, home = self._commits.log, self._home
        if log.records <= self._compact_after or not mostly_dead(log.records, len(self._table.entries)):
            return
        try:
            new = IndexLog.create(self._directory, home.source.identity, put_records(self._table), sync=home.sync)
        except OSError as error:
            # The old log still serves; try again when it has doubled.
            self._compact_after = 2 * log.records
            logger.warning("tier %s: the index log could not be compacted: %s", self._tier, error)
            return
        log.close()
        self._commits.log = new
        self._compact_after = 0

    def _release(self) -> None:
        self._commits.close()
        self._home.release()

    def _error(self, error: OSError, what: str, key: Key) -> TierKVError:
        return as_tier_error(error, f"{what} in {self._directory}", tier=self._tier, key=key)
