"""Division of slots while loads stream: half for streams, half for waiting requests, none for good."""

from __future__ import annotations

import pytest
from core_parts import Core, disk, make_core, objects

from tierkv.errors import InvariantError
from tierkv.manager.contract import RequestContext
from tierkv.manager.reservations.reservation import Reservation
from tierkv.types.keys import Key, make_key
from tierkv.types.tier_ops import Verb


def run(first: int, count: int) -> tuple[Key, ...]:
    """Keys of a prefix."""
    return tuple(make_key(b"chunk %03d" % i, 0) for i in range(first, first + count))


def core_of(slots: int, **changes: object) -> Core:
    """A host tier over a disk that has a thousand chunks."""
    core = make_core(slots=slots, tiers=[disk(write="read_only")], **changes)  # type: ignore[arg-type]
    core.keep_below(run(0, 1000))
    return core


def reserve_segment(core: Core, owner: str, keys: tuple[Key, ...]) -> Reservation:
    """Reserve a segment as a stream does once per step."""
    return core.manager.streams.reserve_segment(keys, RequestContext(owner))


def reserve(core: Core, owner: str, keys: tuple[Key, ...]) -> Reservation:
    """Reserve as a waiting request does once per step."""
    return core.manager.reservations.reserve(owner, keys)


@pytest.mark.parametrize(("slots", "streams", "others"), [(8, 4, 4), (9, 4, 5), (3, 1, 2), (2, 1, 1), (1, 1, 1)])
def test_halves(slots: int, streams: int, others: int) -> None:
    """The reservable chunks are halved while a load streams, and whole again afterwards. A single slot serves both."""
    core = core_of(slots)
    assert core.manager.reserved_chunks_max == slots
    core.manager.streams.open("a", 0)
    core.manager.streams.open("b", 0)
    assert core.manager.reserved_chunks_max == others
    assert core.manager.streams.chunks_max == streams
    core.manager.streams.close("a")
    assert core.manager.reserved_chunks_max == others
    core.manager.streams.close("b")
    assert core.manager.reserved_chunks_max == slots


def test_neither_half_can_take_the_other() -> None:
    """Each side gets its own half when both want slots, in any order and for any amount."""
    for first in ("streams", "others"):
        core = core_of(8)
        core.manager.streams.open("s", 0)
        reserve(core, "w", run(100, 1))
        if first == "streams":
            stream, other = reserve_segment(core, "s", run(0, 8)), reserve(core, "w", run(100, 8))
        else:
            other, stream = reserve(core, "w", run(100, 8)), reserve_segment(core, "s", run(0, 8))
        assert (stream.num_granted, other.num_granted) == (4, 4)
        core.manager.validate()


def test_streams_use_what_nobody_else_wants() -> None:
    """Alone, streams have all of it: segments of half, one read while the other is copied.

    When a request waits, streams take no more until they are down to their half, and segments become smaller.
    """
    core = core_of(8)
    slots = core.manager.streams
    slots.open("s", 0)
    assert slots.segment_chunks_max == 4
    assert reserve_segment(core, "s", run(0, 4)).complete
    core.finish_all()
    first = slots.hand_over(run(0, 4), RequestContext("s"))
    assert reserve_segment(core, "s", run(4, 4)).complete
    reserve(core, "w", run(100, 4))
    assert slots.segment_chunks_max == 2
    core.finish_all()
    second = slots.hand_over(run(4, 4), RequestContext("s"))
    assert not reserve_segment(core, "s", run(8, 2)).num_granted
    core.manager.complete_load(first.slots)
    slots.copied(4)
    assert core.host.room == 4
    assert not reserve_segment(core, "s", run(8, 2)).num_granted, "four are still being copied: its half"
    core.manager.complete_load(second.slots)
    slots.copied(4)
    assert reserve_segment(core, "s", run(8, 2)).complete
    core.manager.validate()


def test_streams_take_turns() -> None:
    """Each segment queues anew: between two streams that want all there is, slots go to and fro."""
    core = core_of(4)
    slots = core.manager.streams
    slots.open("a", 0)
    slots.open("b", 0)
    reserve(core, "w", run(100, 1))
    assert slots.segment_chunks_max == 1
    turns = []
    segments = {"a": run(0, 2), "b": run(10, 2)}
    for _ in range(4):
        granted = {owner: reserve_segment(core, owner, keys).num_granted for owner, keys in segments.items()}
        core.finish_all()
        (owner,) = [owner for owner, count in granted.items() if count == 2]
        turns.append(owner)
        grant = slots.hand_over(segments[owner], RequestContext(owner))
        segments[owner] = run(int(segments[owner][1][6:9]) + 1, 2)
        reserve_segment(core, owner, segments[owner])
        core.manager.complete_load(grant.slots)
        slots.copied(2)
    assert turns == ["a", "b", "a", "b"]


def test_a_yes_of_long_ago_is_believed_by_streams_only() -> None:
    """A shared tier said that it has a chunk, a minute ago: a stream reads it, a lookup asks again."""
    core = make_core(slots=8, tiers=[objects(write="read_only")])
    keys = run(0, 2)
    ctx = RequestContext("s")
    core.manager.streams.open("s", 0)
    assert not core.manager.streams.is_lost(keys[0], ctx)
    assert reserve_segment(core, "s", keys).complete
    (op,) = core.manager.take_ops()
    assert op.verb is Verb.READ
    assert reserve(core, "w", run(5, 1)).failed


def test_what_is_in_no_tier_is_lost() -> None:
    """A segment that wants it has failed; one without it has not."""
    core = core_of(8)
    core.manager.streams.open("s", 0)
    gone = run(2000, 1)
    assert reserve_segment(core, "s", (*run(0, 2), *gone)).failed
    assert core.manager.streams.is_lost(gone[0], RequestContext("s"))
    assert not core.manager.streams.is_lost(run(0, 1)[0], RequestContext("s"))
    assert reserve_segment(core, "s", run(0, 2)).complete


def test_validate_sees_what_is_broken() -> None:
    """Each invariant is broken once on purpose."""
    core = core_of(8)
    reserve_segment(core, "stranger", run(0, 1))
    with pytest.raises(InvariantError, match="does not stream"):
        core.manager.streams.validate()
    core = core_of(8)
    core.manager.streams.copied(1)
    with pytest.raises(InvariantError, match="are being copied"):
        core.manager.streams.validate()
    core = core_of(8)
    core.manager.streams.open("s", 2)
    core.manager.streams.close("s")
    with pytest.raises(InvariantError, match="does not stream"):
        core.manager.streams.validate()
    core = core_of(8)
    core.manager.streams.open("s", 0)
    with pytest.raises(InvariantError, match="is readable"):
        core.manager.streams.hand_over(run(0, 1), RequestContext("s"))
