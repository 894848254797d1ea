"""Storage: the frames of a simulated tier. It outlives the stacks that are opened over it, as a disk does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, TypeVar, cast

from simulation.checks.failure import Violation
from simulation.world.fault_schedule import Fault, FaultSchedule
from tierkv.abc import Entry, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, BackendUnavailableError, OutOfSpaceError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.testing.faults import LIES
from tierkv.types.keys import Key

HEADER_USED_BYTES = 362
"""Bytes of a header page that are used; the others are zero."""

_T = TypeVar("_T")

FrameCheck = Callable[[Key, memoryview], bool]
"""Check of every frame that a stack writes; raises if it is wrong, and is False if a fault has damaged it."""


DETACHED = "a detached tier is left alone"


class Opening:
    """One backend over a storage.

    Attributes:
        is_closed: it was reported to close. is_gone: the stack has said that nothing goes on in it any more.
    """

    def __init__(self, storage: Storage) -> None:
        self.is_closed = False
        self.is_gone = False
        self._storage = storage

    def check(self) -> None:
        """Check that a call may take effect now.

        Raises:
            BackendUnavailableError: the backend is closed.
        """
        if self.is_gone:
            name = self._storage.name
            self._storage.keep_violation(Violation(DETACHED, f"{name} is called although it is said to have left"))
        if self.is_closed:
            raise BackendUnavailableError("this backend is closed")


class Storage:
    """Frames of one tier, with the effects of its fault schedule. Every verb takes effect at one moment.

    Attributes:
        frames: stored frames, by key.
        suspects: keys whose frame a fault has lost or damaged, so that it may miss.
        orphans: keys of stored frames whose write has failed as far as the stack knows.
        frame_check: check of every written frame. violation: the first one kept for the check after the step.
        under_way, deletes_under_way: requests of async calls in flight, by call.
        over_capacity: text of the first moment at which the stored bytes exceeded the capacity.
        index_lost: the stack was opened, and has not listed the frames yet.
        stale: keys that were stored, or being written, when the cache was emptied; none may be read.
        opening: the backend that has the storage open; no other may open it meanwhile.
    """

    def __init__(self, name: str, capacity_bytes: int | None, fault_schedule: FaultSchedule) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.fault_schedule = fault_schedule
        self.frame_check: FrameCheck | None = None
        self.frames: dict[Key, bytes] = {}
        self.suspects: set[Key] = set()
        self.orphans: set[Key] = set()
        self.under_way: dict[object, Sequence[WriteRequest]] = {}
        self.deletes_under_way: dict[object, Sequence[Key]] = {}
        self.over_capacity = ""
        self.violation: AssertionError | None = None
        self.index_lost = False
        self.stale: set[Key] = set()
        self.stale_writes: set[Key] = set()
        self.opening: Opening | None = None
        self._rng: Random = fault_schedule.rng

    @property
    def used_bytes(self) -> int:
        """Bytes at rest."""
        return sum(map(len, self.frames.values()))

    def keep_violation(self, violation: AssertionError) -> None:
        """Keep a violation for the check after the step: raised here, it would count as a backend's error."""
        self.violation = self.violation or violation

    # -- who has it open -------------------------------------------------------------------------------------------

    def open(self) -> Opening:
        """Open the storage for a backend.

        Raises:
            BackendError: another one has it open.
        """
        if self.opening is not None:
            raise BackendError("another stack has it open")
        self.opening = Opening(self)
        return self.opening

    def close(self, opening: Opening) -> None:
        """Close a backend."""
        opening.is_closed = True
        if self.opening is opening:
            self.opening = None

    def was_emptied(self, writing: Iterable[Key]) -> None:
        """Note that the cache was emptied while these keys were being written."""
        self.stale_writes = set(writing)
        self.stale = self.stale_writes | self.frames.keys()

    def was_indexed(self) -> None:
        """Note that a new tier has listed the storage, also chunks whose deletion was too late."""
        self.index_lost = False
        self.orphans.clear()
        self.stale.clear()
        self.stale_writes.clear()

    # -- verbs -------------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Report the presence of each key, unless the fault is a wrong answer."""
        self._gate()
        lies = self.fault_schedule.fault is Fault.FALSE_PRESENCE
        return self._reply(keys, [(key in self.frames) != (lies and self._rng.random() < 0.5) for key in keys])

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Read frames."""
        self._gate()
        return self._reply(requests, [self._read(request) for request in requests])

    def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Write frames."""
        self._gate()
        return self._reply(requests, [self._write(request) for request in requests])

    def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Delete frames."""
        self._gate()
        return self._reply(keys, [self._delete(key) for key in keys])

    def scan(self) -> list[Entry]:
        """List all frames."""
        self._gate()
        self.index_lost = False
        return [Entry(key, len(frame)) for key, frame in self.frames.items()]

    def _gate(self) -> None:
        if self.fault_schedule.raises:
            raise self.fault_schedule.error()

    def _reply(self, batch: Sequence[Any], results: list[_T]) -> Sequence[_T]:
        """Results that the caller gets, after the effect of the fault."""
        match self.fault_schedule.fault:
            case Fault.LOST_REPLIES:
                raise self.fault_schedule.error()
            case Fault.BABBLING:
                return cast("Sequence[_T]", LIES[self._rng.choice(sorted(LIES))](batch, lambda _: results))
        return results

    def _read(self, request: ReadRequest) -> ReadResult:
        error = self.fault_schedule.key_error()
        if error is not None and not isinstance(error, OutOfSpaceError):
            return error
        frame = self.frames.get(request.key)
        if self.fault_schedule.fault is Fault.BAD_READS and self._rng.random() < 0.7:
            frame = self._spoiled(request.key, frame)
        if frame is None:
            return None
        frame = frame[: len(request.buffer)]
        request.buffer[: len(frame)] = frame
        if self.fault_schedule.fault is Fault.BAD_READS and self._rng.random() < 0.1:
            return self._rng.randrange(len(request.buffer) + 1)  # with the previous bytes in the rest of the buffer
        return len(frame)

    def _spoiled(self, key: Key, frame: bytes | None) -> bytes | None:
        """Bytes other than the stored ones."""
        whim = self._rng.randrange(4)
        if whim == 0 and self.frames:
            return self._rng.choice(list(self.frames.values()))
        if frame is None:
            return None
        if whim == 1:
            self.orphans.add(key)  # called absent, so the stack takes it off its account
            return None
        if whim == 2:
            return frame[: self._rng.randrange(len(frame))]
        return flipped(frame, self._rng)

    def _write(self, request: WriteRequest) -> WriteResult:
        sound = self._is_sound(request)
        if (error := self.fault_schedule.key_error()) is not None:
            return error
        frame = bytes(request.frame)
        others = self.used_bytes - len(self.frames.get(request.key, b""))
        if self.capacity_bytes is not None and others + len(frame) > self.capacity_bytes:
            if self.index_lost or self.orphans:
                return OutOfSpaceError("no room left")  # bytes that the stack was never reported of: not its doing
            self.over_capacity = f"{others + len(frame)} bytes in {self.name}, {self.capacity_bytes} are allowed"
        self.suspects.discard(request.key)
        self.orphans.discard(request.key)
        if request.key not in self.stale_writes:
            self.stale.discard(request.key)
        if self.fault_schedule.fault is Fault.FORGETFUL:
            self.suspects.add(request.key)
            self.frames.pop(request.key, None)
            if self._rng.random() < 0.5:
                return None
            frame = frame[: self._rng.randrange(len(frame))]
        self.frames[request.key] = frame
        if not sound:
            self.suspects.add(request.key)
        return None

    def _is_sound(self, request: WriteRequest) -> bool:
        """Check a frame. A violation is kept: raised here, it would count as a backend's error."""
        try:
            return self.frame_check is None or self.frame_check(request.key, request.frame)
        except AssertionError as violation:
            self.keep_violation(violation)
            return False

    def _delete(self, key: Key) -> WriteResult:
        error = self.fault_schedule.key_error()
        if error is not None and not isinstance(error, OutOfSpaceError):
            return error
        self.frames.pop(key, None)
        self.orphans.discard(key)
        return None

    # -- what happens behind the stack's back ------------------------------------------------------------------------

    def lose(self, count: int) -> None:
        """Delete frames behind the stack's back."""
        for key in self._some(count):
            del self.frames[key]
            self.suspects.add(key)

    def rot(self, count: int) -> None:
        """Flip bits of frames."""
        for key in self._some(count):
            self.frames[key] = flipped(self.frames[key], self._rng)
            self.suspects.add(key)

    def _some(self, count: int) -> list[Key]:
        return self._rng.sample(list(self.frames), min(count, len(self.frames)))

    def power_cut(self, requests: Sequence[WriteRequest], deletes: Sequence[Key]) -> None:
        """Apply the operations in flight at a kill: each is done, or not, or in part."""
        for key in deletes:
            self.suspects.add(key)
            if self._rng.random() < 0.5:
                self.frames.pop(key, None)
        for request in requests:
            fate = self._rng.randrange(3)
            if fate:
                frame = bytes(request.frame)
                self.suspects.add(request.key)
                self.frames[request.key] = frame if fate == 1 else frame[: self._rng.randrange(len(frame))]


def flipped(frame: bytes, rng: Random) -> bytes:
    """Frame with one bit changed: in the header, in the first bytes of the payload, or anywhere."""
    if not frame:
        return frame
    spoiled = bytearray(frame)
    start, stop = rng.choice(((0, HEADER_USED_BYTES), (HEADER_BYTES, HEADER_BYTES + 32), (0, len(frame))))
    spoiled[rng.randrange(start, stop) % len(spoiled)] ^= 1 << rng.randrange(8)
    return bytes(spoiled)
