"""Beds on which loads stream, and the moves that their tests repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core_bed import Bed, BedSpec
from core_parts import disk
from core_truth import BedRequest
from simulation.engine.engine import EngineBehaviour

from tierkv.scheduler.load.stream import Stream
from tierkv.scheduler.load.stream_state import StreamState
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind

ALL = EngineBehaviour(budget=100_000)
FAILURES = [kind for kind in OutcomeKind if kind not in {OutcomeKind.OK, OutcomeKind.UNWANTED}]
"""Outcomes of a read that was tried, or could not be."""


def stream_bed(slots: int, **changes: object) -> Bed:
    """Host tier of few slots over a disk that is only read, and a GPU with room for everything."""
    fields: dict[str, object] = {
        "slots": slots, "reserved": slots, "gpu_blocks": 2000, "tiers": (disk(write="read_only"),),
        "gpu_caching": False,
    }  # fmt: skip
    return Bed(BedSpec(**{**fields, **changes}))  # type: ignore[arg-type]  # field names are checked at run time


def arrive(bed: Bed, chunks: int, family: int = 0, *, below: bool = True, **params: object) -> BedRequest:
    """Register a prompt of whole chunks and one token; all of its chunks are in the lower tier."""
    request = bed.add([family * 10_000 + i for i in range(4 * chunks + 1)], params=params or None)
    if below:
        bed.fill_below(request)
    return request


def turn(bed: Bed, *, io: bool = True, transfers: bool = True, seconds: float = 0.01) -> None:
    """One step; I/O in flight ends well."""
    bed.step(ALL, seconds=seconds)
    bed.check()
    if io:
        bed.run_io()
    if transfers:
        bed.run_transfers()


def until(bed: Bed, condition: Callable[[], bool], steps_max: int = 600) -> int:
    """Take turns until a condition holds."""
    for steps in range(steps_max):
        if condition():
            return steps
        turn(bed)
    raise AssertionError(f"nothing came of it in {steps_max} steps")


def finish(bed: Bed, steps_max: int = 600) -> int:
    """Take turns until all requests have ended; nothing may leak."""
    steps = until(bed, lambda: not bed.engine.sequences, steps_max)
    bed.settle()
    bed.check_end()
    return steps


def streams(bed: Bed) -> list[Stream]:
    """Loads that stream."""
    return list(bed.core.scheduler._loads._streams.values())


def the_stream(bed: Bed) -> Stream:
    """The only stream."""
    (stream,) = streams(bed)
    return stream


def until_stream(bed: Bed, state: StreamState, to_come: int = 1000) -> Stream:
    """Take turns until a load streams, is in that state, and has at most ``to_come`` pending chunks."""
    for _ in range(600):
        for stream in streams(bed):
            if stream.state is state and stream.num_pending <= to_come:
                return stream
        turn(bed, transfers=state is StreamState.GATHERING)
        if state is not StreamState.GATHERING and not (
            streams(bed) and the_stream(bed).state is state and the_stream(bed).num_pending <= to_come
        ):
            bed.run_transfers()
    raise AssertionError(f"no load is {state.value}")


def computed(bed: Bed, since: int = 0) -> int:
    """Number of tokens that the engine computed."""
    return bed.engine.tokens_computed - since


def lose(keys: Sequence[Key], bad: Key, kind: OutcomeKind) -> list[OutcomeKind | None]:
    """Faults of a read: one key fails, the others succeed."""
    return [kind if key == bad else None for key in keys]
