"""The backend: frames in slots, keys in a table, the table's history in a log.

Order of a write, which is all of the crash safety: frame into a free slot; force it to the device; append the log
record and force that; only then tell the table, free the old slot and answer. A kill between any two leaves the old
state or the new.

Locks. ``_commit_lock`` serialises log appends, so that log and table change in the same order; ``_grow_lock`` lets one
thread at a time allocate a segment; ``_table_lock`` guards table and slots for a few instructions. They nest in this
order, and none is held while frames move.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from tierkv.abc import Entry, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, CorruptFrameError, OutOfSpaceError, TierKVError
from tierkv.types.keys import Key
from tierkv_disk.failures import as_tier_error
from tierkv_disk.gate import Gate
from tierkv_disk.home import Home
from tierkv_disk.index_log import KEY_BYTES_MAX, IndexLog, Record, RecordKind
from tierkv_disk.recovery import mostly_dead, put_records, recover
from tierkv_disk.slots import Slot, frame_bytes_of, location_at, segment_of, slot_at, slot_of

logger = logging.getLogger("tierkv_disk")


class DiskBackend:
    """See :class:`tierkv.abc.Backend`. All verbs may be called on several threads at once.

    Attributes:
        recovery: what opening found.
    """

    def __init__(self, home: Home) -> None:
        """Recover what lies in a locked home; :meth:`close` will release it.

        Raises:
            OSError: something cannot be read or written.
        """
        self._home = home
        self._segments = home.segments
        self._tier = home.tier
        self._commit_lock = threading.Lock()
        self._grow_lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._entries, self._slots, self._log, self.recovery = recover(
            home.directory, home.identity, home.segments, sync=home.sync
        )
        if not self.recovery.lossless:
            logger.warning("tier %s, %s: %s", self._tier, home.directory, "; ".join(self.recovery.losses()))
        self._compact_after = 0
        self._gate = Gate(self._release)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """See :meth:`tierkv.abc.Backend.contains`."""
        with self._table_lock:
            return [key in self._entries for key in keys]

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
            present = [key for key in dict.fromkeys(keys) if key in self._entries]
            try:
                self._commit([Record(RecordKind.DELETE, key) for key in present])
            except OSError as error:
                failed = set(present)
                return [self._error(error, "cannot delete", key) if key in failed else None for key in keys]
            return [None] * len(keys)

    def scan(self) -> Iterable[Entry]:
        """See :meth:`tierkv.abc.Scannable.scan`; oldest first."""
        with self._table_lock:
            entries = list(self._entries.items())
        return (Entry(key, frame_bytes_of(location)) for key, location in entries)

    def close(self) -> None:
        """See :meth:`tierkv.abc.Backend.close`. Files stay open, and locked, until the last call has left."""
        self._gate.close()

    def _read(self, request: ReadRequest) -> ReadResult:
        with self._table_lock:
            location = self._entries.get(request.key)
            if location is None:
                return None
            slot, size = slot_of(location), frame_bytes_of(location)
            self._slots.pin(slot)
        try:
            if len(request.buffer) < size:
                raise BackendError(f"the buffer has {len(request.buffer)} bytes, the frame {size}")
            count = self._segments.read(slot, request.buffer, size)
        except OSError as error:
            return self._error(error, "cannot read", request.key)
        finally:
            with self._table_lock:
                self._slots.unpin(slot)
        if count < size:
            message = f"segment {segment_of(slot)} ends {size - count} bytes before the frame does"
            return CorruptFrameError(message, tier=self._tier, key=request.key)
        return count

    def _write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        results: list[WriteResult] = [None] * len(requests)
        placed: dict[int, Slot] = {}
        for number, request in enumerate(requests):
            try:
                placed[number] = self._place(request)
            except OSError as error:
                results[number] = self._error(error, "cannot write", request.key)
        try:
            if self._home.sync:
                self._segments.sync(set(map(segment_of, placed.values())))
            stored = ((requests[number], slot) for number, slot in placed.items())
            self._commit([Record(RecordKind.PUT, r.key, slot, len(r.frame)) for r, slot in stored])
        except OSError as error:
            for number, slot in placed.items():
                results[number] = self._error(error, "cannot write", requests[number].key)
                self._free(slot)
        return results

    def _place(self, request: WriteRequest) -> Slot:
        """Put a frame into a free slot; nobody can see it there yet."""
        size = len(request.frame)
        if self._log.broken:
            raise BackendError(self._log.broken)
        if not 0 < len(request.key) <= KEY_BYTES_MAX:
            raise BackendError(f"a key of {len(request.key)} bytes: 1 to {KEY_BYTES_MAX} are possible")
        if size > self._home.slot_bytes:
            raise BackendError(f"a frame of {size} bytes: slots of this namespace have {self._home.slot_bytes}")
        slot = self._take_slot()
        try:
            self._segments.write(slot, request.frame)
        except OSError:
            self._free(slot)
            raise
        return slot

    def _take_slot(self) -> Slot:
        with self._table_lock:
            slot = self._slots.take()
        if slot is not None:
            return slot
        with self._grow_lock:
            with self._table_lock:
                slot = self._slots.take()
            if slot is not None:
                return slot
            grown = self._segments.grow()
            if grown is None:
                raise OutOfSpaceError("capacity_bytes or min_free_bytes is reached and no slot is free")
            segment, slots = grown
            # Its first slot goes to this call, so that no other thread can be faster to take it.
            first = slot_at(segment, 0)
            with self._table_lock:
                self._slots.add_segment(segment, slots, used=(first,))
            return first

    def _free(self, slot: Slot) -> None:
        with self._table_lock:
            self._slots.free(slot)

    def _commit(self, records: list[Record]) -> None:
        """Make records durable, then true."""
        if not records:
            return
        with self._commit_lock:
            self._log.append(records)
            with self._table_lock:
                for record in records:
                    self._apply(record)
            if self._log.records > self._compact_after and mostly_dead(self._log.records, len(self._entries)):
                self._compact()

    def _apply(self, record: Record) -> None:
        old = self._entries.pop(record.key, None)
        if old is not None:
            self._slots.free(slot_of(old))
        if record.kind is RecordKind.PUT:
            self._entries[record.key] = location_at(record.slot, record.frame_bytes)

    def _compact(self) -> None:
        """Replace the log by a shorter one. Only writers wait: the table changes under ``_commit_lock`` alone."""
        home = self._home
        try:
            log = IndexLog.create(home.directory, home.identity, put_records(self._entries), sync=home.sync)
        except OSError as error:
            # The old log still serves; try again when it has doubled.
            self._compact_after = 2 * self._log.records
            logger.warning("tier %s: the index log could not be compacted: %s", self._tier, error)
            return
        self._log.close()
        self._log = log
        self._compact_after = 0

    def _release(self) -> None:
        self._log.close()
        self._home.release()

    def _error(self, error: OSError, what: str, key: Key) -> TierKVError:
        return as_tier_error(error, f"{what} in {self._home.directory}", tier=self._tier, key=key)
