"""A tier that was reported as cleared: no further events are reported for it, and it is not probed."""

from __future__ import annotations

from core_parts import Core, disk, make_core, objects

from tierkv.manager.contract import RequestContext
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import OutcomeKind, TierOp, Verb

WHO = RequestContext("a")


def run(first: int, count: int) -> list[Key]:
    """Keys of a prefix."""
    return [make_key(b"chunk %d" % i, 0) for i in range(first, first + count)]


def only(core: Core, verb: Verb) -> TierOp:
    """This step's single instruction."""
    (op,) = core.manager.take_ops()
    assert op.verb is verb
    return op


def events_of(core: Core, tier: str = "disk") -> list[CacheEventKind]:
    """Events of a tier since the last call."""
    return [event.kind for event in core.manager.take_events() if event.tier == tier]


def test_deletions_of_a_reset_are_not_told_again() -> None:
    """A consumer of events has removed all its chunks, and would remove chunks that it does not have."""
    core = make_core(tiers=[disk()])
    core.keep_below(run(0, 2))
    core.manager.reset_cache("all")
    core.begin()
    deletion = only(core, Verb.DELETE)
    core.finish(deletion)
    assert events_of(core) == [CacheEventKind.CLEARED]


def test_a_write_that_a_reset_has_overtaken_is_not_told() -> None:
    """A write that ends during a reset is deleted at once, so no event may announce it."""
    core = make_core(tiers=[disk()])
    core.put(run(0, 1))
    write = only(core, Verb.WRITE)
    core.manager.reset_cache("all")
    core.finish(write)
    core.begin()
    core.finish(only(core, Verb.DELETE))
    assert events_of(core) == [CacheEventKind.CLEARED]
    core.begin()
    core.put(run(1, 1))
    core.finish(only(core, Verb.WRITE))
    assert events_of(core) == [CacheEventKind.STORED], "the tier is in use again"


def test_a_deletion_in_a_detached_tier_is_not_told() -> None:
    """A tier of the same name may be back by then, and hold the chunk."""
    core = make_core(tiers=[disk(frames=1)])
    core.keep_below(run(0, 1))
    core.put(run(1, 1))
    deletion = only(core, Verb.DELETE)
    core.manager.detach("disk")
    core.finish(deletion)
    assert events_of(core) == [CacheEventKind.CLEARED]


def test_a_chunk_that_a_detached_tier_lacks_is_not_told() -> None:
    """A read that finds nothing after the tier was reported as cleared reports no removal."""
    core = make_core(tiers=[disk()])
    core.keep_below(run(0, 1))
    core.manager.passages.reserve(WHO.request_id, tuple(run(0, 1)), WHO.hints)
    read = only(core, Verb.READ)
    core.manager.detach("disk")
    core.finish(read, OutcomeKind.ABSENT)
    assert events_of(core) == [CacheEventKind.CLEARED]


def test_questions_that_waited_for_a_detached_tier_are_dropped() -> None:
    """Keys that waited for an earlier probe are discarded with the tier."""
    core = make_core(tiers=[objects()])
    first, second = run(0, 2)
    assert core.manager.lookup(first, WHO) is LookupResult.RETRY
    probe = only(core, Verb.PROBE)
    assert core.manager.lookup(second, WHO) is LookupResult.RETRY
    core.manager.detach("objects")
    core.finish(probe)
    assert core.manager.take_ops() == []
    assert core.manager.lookup(second, WHO) is LookupResult.MISS
