"""Lanes: threads that write, overwrite and delete, and announce each operation; and the check of a room afterwards."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.processes import SILENCE, Message, run_alone
from harness.targets import SIZES, Target
from tierkv.errors import TierKVError
from tierkv.testing.conformance.crash import random_operations
from tierkv.testing.conformance.crash_ledger import Ledger, Operation
from tierkv.testing.conformance.session import Session

LANE_KEYS = 12
BATCH_MAX = 4
OPEN_MAX_S = 5.0
"""Longest time in seconds to open a place after a crash, and to write again after a fault."""
Send = Callable[[Message], None]


def keys_of(lane: int) -> range:
    """Numbers of the keys that a lane of a room writes."""
    return range(lane * LANE_KEYS, (lane + 1) * LANE_KEYS)


@dataclass(slots=True)
class Verdict:
    """Outcome of one play."""

    broken: str = ""
    """Promise that broke, in words; empty: none."""
    note: str = ""
    """Word that the summary counts; empty: none."""
    open_s: float = 0.0
    """Longest time of opening in seconds."""
    heal_s: float = 0.0
    """Seconds from a fault to the first write of everything."""
    count: int = 1
    """Number of kills, faults or cuts."""


@dataclass(slots=True)
class Room:
    """One namespace of a place, and what is known of it."""

    target: Target
    place: Path
    number: int
    lanes: int
    variant: int = 0
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.lanes * LANE_KEYS)

    def take(self, message: Message) -> None:
        """Enter a lane's message into the ledger."""
        kind, operation = message
        if kind == "begin":
            self.ledger.begin(operation)
        elif kind == "end":
            self.ledger.acknowledge(operation)
        elif kind == "fail":
            self.ledger.fail(operation)


def write_on(session: Session, lane: int, seed: int, start: int, send: Send, count: int | None = None) -> None:
    """Write with one lane: announce each operation, run it, announce its end.

    Args:
        session: an open room.
        lane: number of the lane.
        seed: determines the operations.
        start: number of the first operation.
        send: takes the messages.
        count: number of operations; None: without end.
    """
    operations = random_operations(SIZES, BATCH_MAX, start, random.Random(f"{seed}/{lane}"), keys_of(lane))
    for operation in operations:
        if count is not None and operation.number - start >= count:
            break
        send(("begin", operation))
        send(("end" if perform(session, operation) else "fail", operation))


def perform(session: Session, operation: Operation) -> bool:
    """Run an operation. Returns whether every key succeeded; errors of tierkv are failures, others are raised."""
    try:
        results = [*session.write(operation.frames), *session.delete(operation.deleted)]
    except TierKVError:
        return False
    return not any(results)


def open_again(target: Target, place: Path, room: int, variant: int) -> Session:
    """Open a room, and try again while a fault keeps it from opening, for ``OPEN_MAX_S``.

    Raises:
        TierKVError: it does not open.
    """
    give_up_s = time.monotonic() + OPEN_MAX_S
    while True:
        try:
            return target.open(place, room, variant)
        except TierKVError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.01)


def store_everything(session: Session, keys: Sequence[int], number: int, send: Send) -> float:
    """Write every key until all are stored, and read them back. Returns the time in seconds.

    Raises:
        AssertionError: not everything is storable within ``OPEN_MAX_S``, or something else is read.
    """
    started = time.monotonic()
    for key in keys:
        operation = Operation(number, {key: SIZES[key % len(SIZES)]})
        send(("begin", operation))
        while not perform(session, operation):
            send(("fail", operation))
            assert time.monotonic() - started < OPEN_MAX_S, f"no write succeeds: {_error_of(session, operation)}"
            time.sleep(0.01)
            send(("begin", operation))
        send(("end", operation))
    took_s = time.monotonic() - started
    for key in keys:
        ((name, frame),) = Operation(number, {key: SIZES[key % len(SIZES)]}).frames.items()
        assert session.get(name) == frame, f"key {key} is not what was stored just now"
    return took_s


def _error_of(session: Session, operation: Operation) -> str:
    with contextlib.suppress(TierKVError):
        return str(session.write(operation.frames))
    return "raised"


def verify(room: Room, number: int) -> Verdict:
    """Open a room after a crash in a process of its own, compare it with its ledger, store everything, and settle.

    Args:
        room: its ledger is replaced by the settled one.
        number: version of the frames that are stored.
    """
    ledger = room.ledger

    def check(_send: Send) -> tuple[float, Ledger]:
        started = time.monotonic()
        with room.target.open(room.place, room.number, room.variant) as session:
            open_s = time.monotonic() - started
            ledger.verify(session)
            store_everything(session, range(room.lanes * LANE_KEYS), number, _enter)
            ledger.verify(session)
            return open_s, ledger

    def _enter(message: Message) -> None:
        room.take(message)

    messages, ends = run_alone(check)
    kind, content = messages[-1] if messages else SILENCE
    if kind == "raised" or ends:
        return Verdict(f"{content} {' '.join(ends)}".strip())
    open_s, room.ledger = content
    return Verdict(f"opened after {open_s:.1f} s" if open_s > OPEN_MAX_S else "", open_s=open_s)
