"""Open namespace of a disk tier: the verbs, on top of segments, table and index log.

The steps of a write are in the package's docstring; their order is the whole of the crash safety.

Locks. The append lock of :class:`~tierkv_disk.log.group_commit.GroupCommit` serialises log appends, so that log and
table change in the same order. ``_grow_lock`` lets one thread at a time allocate a segment. ``_table_lock`` guards
table and quarantine for a few instructions. They nest in this order, and none is held while frames move.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, starmap
from pathlib import Path

from tierkv.abc import Entry, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.abc.logs import plugin_logger
from tierkv.errors import BackendError, CorruptFrameError, OutOfSpaceError, TierKVError
from tierkv.types.keys import Key
from tierkv_disk.directory.layout import LOG_NAME
from tierkv_disk.extents import PAGE_BYTES, Run, columns_of, pages_for, rows_of, segment_of
from tierkv_disk.failures import BAD_MEDIUM, LIMITS, NO_FILES, NO_SPACE, as_tier_error, growth_error
from tierkv_disk.gate import CallGate
from tierkv_disk.log.group_commit import GroupCommit
from tierkv_disk.log.index_log import (
    KEY_BYTES_MAX,
    RANKED_KEY_BYTES_MAX,
    IndexLog,
    Record,
    RecordKind,
    records_of,
)
from tierkv_disk.log.rewriting import LogRewriter
from tierkv_disk.namespace import LockedNamespace
from tierkv_disk.recovery.recovery import is_mostly_dead, log_reserve, records_of_table, recover
from tierkv_disk.space.quarantine import Quarantine, QuarantineEntry
from tierkv_disk.space.table import StoredFrame

GROWTH_RETRY_S = 1.0
"""Interval between attempts to grow at a limit: each attempt sums up the sizes of all files of the directory."""
logger = plugin_logger("tierkv_disk")
_make_entry = partial(tuple.__new__, Entry)


class OpenNamespace:
    """One namespace, with scan and quarantine. All verbs may be called on several threads at once.

    Attributes:
        recovery: report on the recovery at open.
    """

    def __init__(self, locked: LockedNamespace, clock: Callable[[], float] = time.monotonic) -> None:
        """Recover a locked namespace; :meth:`close` will release it.

        Raises:
            OSError: a file cannot be read or written.
        """
        self._locked = locked
        self._segments = locked.files.segments
        self._directory = locked.files.directory
        self._tier = locked.tier
        self._grow_lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._quarantine = Quarantine(self._directory, locked.quarantine_bytes_max)
        self._table, log, self.recovery = recover(locked.files, self._quarantine, sync=locked.sync)
        try:
            locked.mark_upgraded()
        except BaseException:
            log.close()
            raise
        rewriter = LogRewriter(self._create_log, f"tier {self._tier}, {self._directory}", clock)
        self._commits = GroupCommit(log, rewriter, self._compact_if_dead)
        self._compact_after = 0
        self._clock = clock
        self._grow_again_s = 0.0
        self._is_full = False
        self._watch = locked.lock.watch(self._tier, clock, self._segments.removed_files)
        self._gate = CallGate(self._release)
        if not self.recovery.lossless:
            logger.warning("tier %s, %s: %s", self._tier, self._directory, "; ".join(self.recovery.losses()))

    @property
    def tier(self) -> str:
        """Name of the tier, for messages."""
        return self._tier

    @property
    def directory(self) -> Path:
        """Directory of the namespace."""
        return self._directory

    def is_removed(self) -> bool:
        """Whether lock and log were removed, or another file system has their place. At a bounded rate.

        May be called on any thread. A lock file that was removed alone is made again.
        """
        if not self._watch.is_removed():
            return self._watch.has_new_place()
        if not os.path.lexists(self._directory / LOG_NAME):
            return True
        with contextlib.suppress(BackendError), self._gate.entered():  # nothing is released meanwhile
            self._watch.take_again(self._locked.lock.take_again)
        return False

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is in the table. No I/O."""
        with self._table_lock:
            return [key in self._table.entries for key in keys]

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read each frame into its caller's buffer; a read that the medium fails quarantines the pages."""
        with self._gate.entered():
            self._watch.look()  # for the log; open files are read all the same
            return self._read(requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Store frames; with durability "batch" or "always" they are on the device when this returns."""
        with self._gate.entered():
            if self._locked.sync_each:
                return [result for request in requests for result in self._write([request])]
            return self._write(requests)

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Remove keys with one append to the log; absent keys are no error."""
        with self._gate.entered():
            present = [key for key in dict.fromkeys(keys) if key in self._table.entries]
            if not present:
                return [None] * len(keys)
            try:
                self._watch.require()
                records = [Record(RecordKind.DELETE, key) for key in present]
                self._commits.commit(records, partial(self._drop, present))
            except OSError as error:
                failed = set(present)
                return [self._error(error, "cannot delete", key) if key in failed else None for key in keys]
            return [None] * len(keys)

    def scan(self) -> Iterable[Entry]:
        """All stored keys with their frame lengths, oldest first."""
        with self._table_lock:
            keys, extents = list(self._table.entries), list(self._table.entries.values())
        columns = columns_of(extents)  # without a call per entry, since there may be millions
        return map(_make_entry, zip(keys, columns["frame_bytes"].tolist(), columns["rank"].tolist(), strict=True))

    def quarantine(self, key: Key, reason: str) -> None:
        """Quarantine the frame's pages: they are not reused when the frame is deleted."""
        with self._gate.entered():
            with self._table_lock:
                found = self._table.find_frame(key)
            if found is not None:
                self._isolate(QuarantineEntry(key, found[0], reason))

    def close(self) -> None:
        """Refuse further calls. Files stay open and locked until the last call in flight has ended."""
        self._gate.close()

    def _read(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read adjacent frames in one call. Where that fails, each is read alone, and has a result of its own."""
        with self._table_lock:
            found = [self._table.find_frame(request.key) for request in requests]
            pinned = [frame[0][0].address for frame in found if frame is not None]
            for address in pinned:
                self._table.pin(address)
        try:
            whole = {
                number: frame[0][0]
                for number, frame in enumerate(found)
                if frame is not None and _is_whole(frame[0], len(requests[number].buffer))
            }
            done: set[int] = set()
            for row in rows_of(whole):
                buffers = [requests[number].buffer[: whole[number].pages * PAGE_BYTES] for number in row]
                if self._segments.read_row(whole[row[0]].address, buffers):
                    done.update(row)
            return [
                None if frame is None else frame[1] if number in done else self._read_alone(requests[number], *frame)
                for number, frame in enumerate(found)
            ]
        finally:
            with self._table_lock:
                for address in pinned:
                    self._table.unpin(address)

    def _read_alone(self, request: ReadRequest, runs: tuple[Run, ...], size: int) -> ReadResult:
        try:
            if len(request.buffer) < size:
                error = BackendError(f"the buffer has {len(request.buffer)} bytes, the frame {size}")
                return self._error(error, "cannot read", request.key)
            count = self._segments.read_frame(runs, request.buffer, size)
        except OSError as error:
            if error.errno in BAD_MEDIUM:
                self._isolate(QuarantineEntry(request.key, runs, f"reading it failed: {error.strerror}"))
            return self._error(error, "cannot read", request.key)
        if count < size:
            message = f"segment {segment_of(runs[0].address)} ends {size - count} bytes before the frame does"
            return CorruptFrameError(message, tier=self._tier, key=request.key)
        return count

    def _write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        results: list[WriteResult] = [None] * len(requests)
        try:
            self._watch.require()
            self._commits.mend()
        except OSError as error:
            return [self._error(error, "cannot write", request.key) for request in requests]
        sync_failures = self._segments.sync_failures
        placed = self._place(requests, results)
        if not placed:
            return results
        stored = [_stored(requests[number], runs) for number, runs in placed.items()]
        try:
            if self._locked.sync:
                written = {segment_of(run.address) for runs in placed.values() for run in runs}
                self._segments.sync(written, sync_failures)
            records = list(chain.from_iterable(starmap(records_of, stored)))
            self._commits.commit(records, partial(self._put, stored))
        except OSError as error:
            with self._table_lock:
                for number, runs in placed.items():
                    results[number] = self._error(error, "cannot write", requests[number].key)
                    self._table.release_runs(runs)
        return results

    def _place(self, requests: Sequence[WriteRequest], results: list[WriteResult]) -> dict[int, tuple[Run, ...]]:
        """Write frames into free pages, adjacent ones in one call. They are not visible to readers yet.

        Returns:
            Runs of each frame that was written, by its number; ``results`` gets the errors of the others.
        """
        taken = self._take_all(requests, results)
        whole = {number: runs[0] for number, runs in taken.items() if _is_whole(runs, len(requests[number].frame))}
        done: set[int] = set()
        for row in rows_of(whole):
            if self._segments.write_row(whole[row[0]].address, [requests[number].frame for number in row]):
                done.update(row)
        for number in [number for number in taken if number not in done]:
            try:
                self._write_alone(requests[number], taken[number])
            except OSError as error:
                del taken[number]
                results[number] = self._error(error, "cannot write", requests[number].key)
        return taken

    def _write_alone(self, request: WriteRequest, runs: tuple[Run, ...]) -> None:
        try:
            self._segments.write_frame(runs, request.frame)
        except OSError as error:
            if error.errno in BAD_MEDIUM:
                self._isolate(QuarantineEntry(request.key, runs, f"writing it failed: {error.strerror}"))
            with self._table_lock:
                self._table.release_runs(runs)
            raise

    def _take_all(self, requests: Sequence[WriteRequest], results: list[WriteResult]) -> dict[int, tuple[Run, ...]]:
        """Take free pages for each frame, adjacent where possible; ``results`` gets the errors."""
        frame_bytes_max = self._locked.frame_bytes_max
        left = [
            number
            for number, request in enumerate(requests)
            if 0 < len(request.frame) <= frame_bytes_max and 0 < len(request.key) <= KEY_BYTES_MAX
        ]
        if len(left) < len(requests):
            for number in set(range(len(requests))).difference(left):
                results[number] = self._error(
                    self._not_storable(requests[number]), "cannot write", requests[number].key
                )
        taken: dict[int, tuple[Run, ...]] = {}
        while left:
            with self._table_lock:
                row = self._table.take_row([pages_for(len(requests[number].frame)) for number in left])
            taken.update((number, (run,)) for number, run in zip(left, row, strict=False))
            left = left[len(row) :]
            if left:  # no free run is long enough
                number = left.pop(0)
                try:
                    taken[number] = self._take(pages_for(len(requests[number].frame)))
                except OSError as error:
                    results[number] = self._error(error, "cannot write", requests[number].key)
        return taken

    def _not_storable(self, request: WriteRequest) -> BackendError:
        size, frame_bytes_max = len(request.frame), self._locked.frame_bytes_max
        if not 0 < size <= frame_bytes_max:
            return BackendError(f"a frame of {size} bytes: 1 to {frame_bytes_max} are possible here")
        return BackendError(f"a key of {len(request.key)} bytes: 1 to {KEY_BYTES_MAX} are possible")

    def _take(self, pages: int) -> tuple[Run, ...]:
        """Take free pages: in one run, or in one run of a new segment, or in several runs, in this order."""
        with self._table_lock:
            runs = self._table.take_run(pages)
        if runs is not None:
            return runs
        with self._grow_lock:
            with self._table_lock:
                runs = self._table.take_run(pages)
            if runs is not None:
                return runs
            grown = self._grow(pages)
            # Add and take within one hold of the lock, so that no other thread takes the new pages first.
            with self._table_lock:
                if grown is not None:
                    self._table.add_free(grown)
                runs = self._table.gather_runs(pages)
        if runs is None:
            raise OutOfSpaceError(
                f"capacity, directory_bytes_max or min_free_bytes is reached: {self._segments.room()}"
            )
        return runs

    def _grow(self, pages: int) -> Run | None:
        """Allocate a segment if there is room. If several free runs could hold the frame, try once per interval."""
        if self._table.free_pages >= pages and self._clock() < self._grow_again_s:
            return None
        self._watch.require(at_once=True)  # a new file in a directory of others would make them suspect it
        try:
            grown = self._segments.grow(log_reserve(self._commits.log_bytes, len(self._table.entries)))
        except OSError as error:
            self._note_growth(None, LIMITS if error.errno in NO_SPACE else str(error))
            if error.errno not in NO_SPACE | NO_FILES or self._table.free_pages < pages:
                raise growth_error(error) from None
            return None
        self._note_growth(grown)
        return grown

    def _note_growth(self, grown: Run | None, why: str = LIMITS) -> None:
        """Set the time of the next attempt, and log once that the tier is full below its capacity."""
        self._grow_again_s = self._clock() + GROWTH_RETRY_S if grown is None else 0.0
        if grown is not None:
            self._is_full = False
        elif self._segments.wants_more and not self._is_full:
            self._is_full = True
            logger.warning(
                "tier %s: %s cannot grow beyond %d bytes, less than its capacity (%s): "
                "chunks are evicted, and it grows when there is room again",
                self._tier, self._directory, self._segments.size_bytes, why,
            )  # fmt: skip

    def _put(self, stored: Sequence[StoredFrame]) -> None:
        with self._table_lock:
            self._table.put_frames(stored)

    def _drop(self, keys: Sequence[Key]) -> None:
        with self._table_lock:
            for key in keys:
                self._table.drop_frame(key)

    def _isolate(self, entry: QuarantineEntry) -> None:
        """Quarantine pages, and return to service those that the bound pushed out of the list."""
        with self._table_lock:
            self._table.take_out_of_service(entry.runs[0].address)
            for released in self._quarantine.add_entry(entry):
                self._table.return_to_service(released.key, released.runs)
            self._segments.set_pages_out_of_service(self._quarantine.pages)
        self._quarantine.save()

    def _compact_if_dead(self) -> None:
        """Replace a long log by a shorter one. Only writers wait: the table changes under the append lock alone."""
        records = self._commits.records
        if records <= self._compact_after or not is_mostly_dead(records, len(self._table.entries)):
            return
        try:
            log = self._create_log()
        except OSError as error:
            # The old log still serves; the next attempt is due when it has doubled.
            self._compact_after = 2 * records
            logger.warning("tier %s: the index log could not be compacted: %s", self._tier, error)
            return
        self._commits.replace_log(log)
        self._compact_after = 0

    def _create_log(self) -> IndexLog:
        """Write a new log of the table. Runs under the append lock, so the table does not change meanwhile."""
        locked = self._locked
        return IndexLog.create(self._directory, locked.files.identity, records_of_table(self._table), sync=locked.sync)

    def _release(self) -> None:
        try:
            self._commits.close()
        finally:  # a last sync that fails must not keep the directory locked
            self._locked.release()

    def _error(self, error: OSError, what: str, key: Key) -> TierKVError:
        return as_tier_error(error, f"{what} in {self._directory}", tier=self._tier, key=key)


def _is_whole(runs: tuple[Run, ...], size: int) -> bool:
    """Whether a frame is in one run, and ``size`` bytes of memory are its pages, or begin with them."""
    return len(runs) == 1 and size >= runs[0].pages * PAGE_BYTES


def _stored(request: WriteRequest, runs: tuple[Run, ...]) -> StoredFrame:
    """Describe a written frame, with the rank that the log has room for."""
    key = request.key
    return key, runs, len(request.frame), request.rank if len(key) <= RANKED_KEY_BYTES_MAX else 0
