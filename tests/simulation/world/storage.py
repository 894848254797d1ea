"""Where simulated tiers keep their frames. A storage outlives the stacks that are opened over it, as a disk does."""

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
"""Beyond these a header page is zero."""

_T = TypeVar("_T")

FrameCheck = Callable[[Key, memoryview], bool]
"""Looks at every frame that a stack writes; raises where it is wrong, and is False where a fault has spoiled it."""


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
        """A call takes effect now.

        Raises:
            BackendUnavailableError: the backend is closed.
        """
        if self.is_gone:
            name = self._storage.name
            self._storage.keep_violation(Violation(DETACHED, f"{name} is called although it is said to have left"))
        if self.is_closed:
            raise BackendUnavailableError("this backend is closed")


class Storage:
    """The frames of one tier, and all that its fault schedule does to them. Every verb takes effect at one moment.

    Attributes:
        frames: what lies there.
        suspects: keys whose frame was lost or spoiled by a fault, so that nobody is owed it.
        orphans: keys whose frame lies there although the stack was reported, or decided, that its write failed.
        judge: looks at what is written. verdict: what it has said first.
        under_way, deletes_under_way: what async calls are to do, by call.
        over_capacity: the first moment at which more lay there than was allowed, in words.
        index_lost: the stack was opened without learning what lies here. is_asked: it is being opened.
        stale: keys whose frame was there, or on its way, when the cache was emptied. Nobody may read it.
        opening: the backend that has it open. Nobody else may open it meanwhile.
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
        self.is_asked = False
        self.stale: set[Key] = set()
        self.stale_writes: set[Key] = set()
        self.opening: Opening | None = None
        self._rng: Random = fault_schedule.rng

    @property
    def used_bytes(self) -> int:
        """Bytes at rest."""
        return sum(map(len, self.frames.values()))

    def keep_violation(self, violation: AssertionError) -> None:
        """Remember what was found, for who looks after the step: here it would be lost among a backend's errors."""
        self.violation = self.violation or violation

    # -- who has it open -------------------------------------------------------------------------------------------

    def open(self) -> Opening:
        """A backend is made for this storage.

        Raises:
            BackendError: another one has it open.
        """
        if self.opening is not None:
            raise BackendError("another stack has it open")
        self.opening = Opening(self)
        return self.opening

    def close(self, opening: Opening) -> None:
        """A backend is closed."""
        opening.is_closed = True
        if self.opening is opening:
            self.opening = None

    def was_emptied(self, writing: Iterable[Key]) -> None:
        """The cache was emptied while these were being written."""
        self.stale_writes = set(writing)
        self.stale = self.stale_writes | self.frames.keys()

    def was_indexed(self) -> None:
        """A new tier over this storage has learned what lies here: what it was to forget, it did not in time."""
        self.index_lost = False
        self.orphans.clear()
        self.stale.clear()
        self.stale_writes.clear()

    # -- verbs -------------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See :class:`tierkv.abc.Backend`."""
        self._gate()
        lies = self.fault_schedule.fault is Fault.FALSE_PRESENCE
        return self._reply(keys, [(key in self.frames) != (lies and self._rng.random() < 0.5) for key in keys])

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """See :class:`tierkv.abc.Backend`."""
        self._gate()
        return self._reply(requests, [self._read(request) for request in requests])

    def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """See :class:`tierkv.abc.Backend`."""
        self._gate()
        return self._reply(requests, [self._write(request) for request in requests])

    def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """See :class:`tierkv.abc.Backend`."""
        self._gate()
        return self._reply(keys, [self._delete(key) for key in keys])

    def scan(self) -> list[Entry]:
        """See :class:`tierkv.abc.SupportsScan`."""
        self._gate()
        self.index_lost = self.index_lost and not self.is_asked
        return [Entry(key, len(frame)) for key, frame in self.frames.items()]

    def _gate(self) -> None:
        if self.fault_schedule.raises:
            raise self.fault_schedule.error()

    def _reply(self, batch: Sequence[Any], results: list[_T]) -> Sequence[_T]:
        """What the caller hears: the results, unless the fault schedule spoils them."""
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
            return self._rng.randrange(len(request.buffer) + 1)  # whatever lies in the rest of the buffer
        return len(frame)

    def _spoiled(self, key: Key, frame: bytes | None) -> bytes | None:
        """Other bytes than were stored."""
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
        """Have a frame judged. A verdict must not be lost among the errors that a backend may raise."""
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
        """Somebody deletes frames."""
        for key in self._some(count):
            del self.frames[key]
            self.suspects.add(key)

    def rot(self, count: int) -> None:
        """Bits of frames flip."""
        for key in self._some(count):
            self.frames[key] = flipped(self.frames[key], self._rng)
            self.suspects.add(key)

    def _some(self, count: int) -> list[Key]:
        return self._rng.sample(list(self.frames), min(count, len(self.frames)))

    def power_cut(self, requests: Sequence[WriteRequest], deletes: Sequence[Key]) -> None:
        """These were under way when the process died: each is done, or not, or in part."""
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
    """One bit of some bytes changed: in the header, in the first bytes of the payload, or anywhere."""
    if not frame:
        return frame
    spoiled = bytearray(frame)
    start, stop = rng.choice(((0, HEADER_USED_BYTES), (HEADER_BYTES, HEADER_BYTES + 32), (0, len(frame))))
    spoiled[rng.randrange(start, stop) % len(spoiled)] ^= 1 << rng.randrange(8)
    return bytes(spoiled)
