"""Account of slots: one cap for all that is held, gathered and copied, and half of it for either side that wants it."""

from __future__ import annotations

import pytest
from core_parts import Core, disk, make_core, objects

from tierkv.errors import InvariantError
from tierkv.manager.contract import LoadGrant, RequestContext
from tierkv.manager.passages.passage import Passage
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


def start_stream(core: Core, owner: str, keys: tuple[Key, ...] = ()) -> LoadGrant:
    """Send the first segment of a load that continues."""
    return core.manager.prepare_load(keys, RequestContext(owner), continues=True)


def reserve(core: Core, owner: str, keys: tuple[Key, ...]) -> Passage:
    """Reserve as a request does once per step."""
    return core.manager.passages.reserve(owner, keys)


@pytest.mark.parametrize(("slots", "others"), [(8, 4), (9, 5), (3, 2), (2, 1), (1, 1)])
def test_halves(slots: int, others: int) -> None:
    """One request may hold half as much while a load streams, and all of it again afterwards."""
    core = core_of(slots)
    passages = core.manager.passages
    assert passages.hold_chunks_max == slots
    start_stream(core, "a")
    start_stream(core, "b")
    assert passages.hold_chunks_max == others
    passages.release("a")
    assert passages.hold_chunks_max == others
    passages.release("b")
    assert passages.hold_chunks_max == slots


@pytest.mark.parametrize("first", ["streams", "others"])
def test_neither_half_can_take_the_other(first: str) -> None:
    """Each side gets its own half when both want slots, in any order and for any amount."""
    core = core_of(8)
    start_stream(core, "s")
    reserve(core, "w", run(100, 1))
    if first == "streams":
        stream, other = reserve(core, "s", run(0, 8)), reserve(core, "w", run(100, 8))
    else:
        other, stream = reserve(core, "w", run(100, 8)), reserve(core, "s", run(0, 8))
    assert (stream.num_granted, other.num_granted) == (4, 4)
    core.manager.validate()


def test_streams_use_what_nobody_else_wants() -> None:
    """Alone, streams have all of it: segments of half, one read while the other is copied.

    When a request waits, streams take no more until they are down to their half, and segments become smaller.
    """
    core = core_of(8)
    passages = core.manager.passages
    start_stream(core, "s")
    assert passages.segment_chunks_max == 4
    assert reserve(core, "s", run(0, 4)).complete
    core.finish_all()
    first = start_stream(core, "s", run(0, 4))
    assert reserve(core, "s", run(4, 4)).complete
    reserve(core, "w", run(100, 4))
    assert passages.segment_chunks_max == 2
    core.finish_all()
    second = start_stream(core, "s", run(4, 4))
    assert not reserve(core, "s", run(8, 2)).num_granted
    core.manager.complete_load(first.slots)
    assert not reserve(core, "s", run(8, 2)).num_granted, "four are still being copied: its half"
    core.manager.complete_load(second.slots)
    assert reserve(core, "s", run(8, 2)).complete
    core.manager.validate()


@pytest.mark.parametrize("share", [1, 4, 6, 8])
def test_the_cap_holds_for_everything_together(share: int) -> None:
    """Held, gathered and copied chunks together stay under the cap, whatever the engine loads at once."""
    core = core_of(10, reserved=share)
    passages = core.manager.passages
    for turn in range(6):
        owner = f"r{turn}"
        reserve(core, owner, run(20 * turn, 3))
        core.finish_all()
        passage = passages.get(owner)
        if passage is not None and passage.ready:
            core.manager.prepare_load(run(20 * turn, 3), RequestContext(owner))
        assert passages.account.total <= share
        core.manager.validate()


def test_a_load_counts_until_it_is_copied() -> None:
    """A load in one job uses the account like a stream: others wait for the end of its copy."""
    core = core_of(8, reserved=4)
    assert reserve(core, "a", run(0, 4)).complete
    core.finish_all()
    grant = core.manager.prepare_load(run(0, 4), RequestContext("a"))
    waiting = reserve(core, "b", run(20, 4))
    assert not waiting.num_granted
    core.manager.complete_load(grant.slots)
    core.begin()
    assert waiting.complete, "the step continues, asked or not"
    core.manager.validate()


def test_older_streams_come_first() -> None:
    """Between two streams that want all there is, the older one is served, and the other one afterwards."""
    core = core_of(4)
    start_stream(core, "a")
    start_stream(core, "b")
    reserve(core, "w", run(100, 2))
    younger, older = reserve(core, "b", run(10, 2)), reserve(core, "a", run(0, 2))
    assert (older.num_granted, younger.num_granted) == (0, 2), "the older one wanted nothing when the other asked"
    core.finish_all()
    grant = start_stream(core, "b", run(10, 2))
    reserve(core, "b", run(12, 2))
    core.manager.complete_load(grant.slots)
    assert not reserve(core, "b", run(12, 2)).num_granted
    assert reserve(core, "a", run(0, 2)).complete
    core.manager.validate()


def test_a_yes_of_long_ago_is_believed_by_streams_only() -> None:
    """A shared tier said that it has a chunk, a minute ago: a stream reads it, a lookup asks again."""
    core = make_core(slots=8, tiers=[objects(write="read_only")])
    keys = run(0, 2)
    start_stream(core, "s")
    assert not core.manager.passages.is_lost(keys[0], RequestContext("s"))
    assert reserve(core, "s", keys).complete
    (op,) = core.manager.take_ops()
    assert op.verb is Verb.READ
    assert reserve(core, "w", run(5, 1)).failed


def test_what_is_in_no_tier_is_lost() -> None:
    """A segment that wants it has failed; one without it has not."""
    core = core_of(8)
    start_stream(core, "s")
    gone = run(2000, 1)
    assert reserve(core, "s", (*run(0, 2), *gone)).failed
    assert core.manager.passages.is_lost(gone[0], RequestContext("s"))
    assert not core.manager.passages.is_lost(run(0, 1)[0], RequestContext("s"))
    assert reserve(core, "s", run(0, 2)).complete


def test_two_that_hold_what_the_other_lacks() -> None:
    """The older one takes slots from the youngest that was not offered yet; an offer is never taken back."""
    core = core_of(6)
    reserve(core, "a", run(0, 2))
    reserve(core, "b", run(20, 2))
    reserve(core, "c", run(40, 2))
    core.finish_all()
    core.manager.passages.promise("c")
    assert reserve(core, "a", run(0, 4)).complete, "b gives way"
    assert core.manager.passages.granted("c").keys() == set(run(40, 2))
    assert not core.manager.passages.granted("b")
    core.manager.validate()


def test_validate_sees_what_is_broken() -> None:
    """Each invariant is broken once on purpose."""
    core = core_of(8)
    core.manager.passages.account.copying -= 1
    with pytest.raises(InvariantError, match="counted wrong"):
        core.manager.passages.validate()
    core = core_of(8)
    reserve(core, "w", run(0, 4))
    core.manager.passages.account.chunks_max = 3
    with pytest.raises(InvariantError, match="may be"):
        core.manager.passages.validate()
    core = core_of(8)
    start_stream(core, "s")
    core.manager.passages.account.num_copied = 0
    with pytest.raises(InvariantError, match="are copied"):
        core.manager.passages.validate()
