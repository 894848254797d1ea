"""Edges with ``write = "on_reuse"``: a tier gets what is wanted a second time, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_parts import Core, disk, make_core, objects, with_limits
from edge_moves import load, put, run, writes, written

from tierkv.manager.contract import RequestContext
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import OutcomeKind, TierHealth, Verb


def again_by_load(core: Core, keys: list[Key]) -> None:
    """Another request loads them from the host tier."""
    load(core, keys)


def again_by_offer(core: Core, keys: list[Key]) -> None:
    """Another request has computed them too."""
    put(core, keys)


def again_after_eviction(core: Core, keys: list[Key]) -> None:
    """They are computed again after the host tier has lost them."""
    put(core, run(1000, core.host.num_slots))  # a flood
    assert not core.ready() & set(keys)
    put(core, keys)


@pytest.mark.parametrize("again", [again_by_load, again_by_offer, again_after_eviction])
def test_the_second_sight_writes(again: Callable[[Core, list[Key]], None]) -> None:
    """Once stored is not enough; loaded, offered again, or stored again after it was lost: each is a second sight."""
    core = make_core(slots=8, tiers=[disk(write="on_reuse")])
    keys = run(0, 4)
    put(core, keys)
    assert not core.manager.take_ops()
    assert not core.manager.has_pending_changes
    again(core, keys)
    assert sorted(written(core)) == sorted(keys)
    assert core.counters.cascades == {"disk": 4}


def test_a_second_sight_while_the_first_store_runs() -> None:
    """Two requests compute the same chunks at the same time: they are written as soon as they can be read."""
    core = make_core(tiers=[disk(write="on_reuse")])
    keys = [(key, 0) for key in run(0, 2)]
    first = core.manager.prepare_store(keys, RequestContext("first"))
    second = core.manager.prepare_store(keys[:1], RequestContext("second"))
    assert first is not None
    assert second is not None
    assert not second.keys
    assert not core.manager.take_ops(), "nothing is readable yet"
    core.manager.complete_store(first.slots)
    assert written(core) == run(0, 1)


def test_one_shot_prompts_are_never_written() -> None:
    """Landscape G9: a thousand prompts that share only their head leave that head on the disk, each chunk once, and
    none of their tails."""
    core = make_core(slots=64, tiers=[disk(write="on_reuse")])
    head = run(0, 3)
    for i in range(1000):
        put(core, head + run(10 + 10 * i, 8))
        written(core)
    assert sorted(core.lower[0].residency) == sorted(head)
    assert core.counters.cascades == {"disk": 3}
    assert core.counters.cascades_dropped == {}


def test_what_is_promoted_is_used_again() -> None:
    """It was stored once and is wanted now: the tier between gets it."""
    core = make_core(tiers=[disk(name="near", write="on_reuse"), disk(name="far")])
    keys = run(0, 2)
    core.keep_below(keys, tier=1)
    ctx = RequestContext("gone")
    core.manager.passages.reserve(ctx.request_id, tuple(keys), ctx.hints)
    core.manager.passages.release(ctx.request_id)  # the request ends before the chunk arrives, and loads nothing
    assert sorted(written(core)) == sorted(keys)


def test_memory_of_what_was_seen_is_bounded() -> None:
    """A bounded number of chunks is remembered between two uses; a forgotten chunk counts as new."""
    core = make_core(slots=4, tiers=[with_limits(disk(write="on_reuse"), seen_keys_max=8)])
    put(core, run(0, 1))
    for i in range(100):
        put(core, run(10 + i, 1))
    put(core, run(0, 1))
    assert not core.manager.take_ops()
    put(core, run(109, 1))
    assert written(core) == run(109, 1)


def test_a_chunk_in_constant_use_is_written_once() -> None:
    """The answer of a shared tier expires after a while; a chunk that stays in the host tier is not uploaded again."""
    core = make_core(tiers=[objects(write="on_reuse")])
    put(core, run(0, 1))
    for step in range(20):
        core.begin(step * 10.0)
        load(core, run(0, 1))
        if not step:
            (probe,) = core.manager.take_ops()
            core.finish(probe, OutcomeKind.ABSENT)
        core.finish_all()
    assert core.counters.cascades == {"objects": 1}


def test_a_shared_tier_that_has_a_chunk_gets_no_second_one() -> None:
    """It is asked before the first write too: another process may have written the chunk."""
    core = make_core(tiers=[objects(write="on_reuse")])
    put(core, run(0, 2))
    load(core, run(0, 2))
    (probe,) = core.manager.take_ops()
    assert (probe.verb, sorted(probe.keys)) == (Verb.PROBE, run(0, 2))
    core.finish(probe, [OutcomeKind.OK if key == run(0, 1)[0] else OutcomeKind.ABSENT for key in probe.keys])
    assert written(core) == run(1, 1)
    assert core.counters.writes_skipped == {"objects": 1}


def test_a_chunk_that_waits_is_not_queued_twice() -> None:
    """Promise 6: uses of one chunk while a tier does not keep up neither fill its queue nor drop others."""
    core = make_core(slots=8, tiers=[disk(write="on_reuse", queue=1)])
    put(core, run(0, 3))
    load(core, run(0, 1))
    core.manager.take_ops()  # under way, and does not end
    for _ in range(50):
        load(core, run(0, 3))
    assert len(core.lower[0].write_queue) == 2
    assert core.counters.cascades_dropped == {}


def test_a_write_that_failed_may_be_tried_at_the_next_use() -> None:
    """One failure must not keep a hot chunk off the disk for as long as it stays hot."""
    core = make_core(tiers=[objects(write="on_reuse")])
    put(core, run(0, 1))
    load(core, run(0, 1))
    (probe,) = core.manager.take_ops()
    core.finish(probe, OutcomeKind.ABSENT)
    (write,) = core.manager.take_ops()
    core.finish(write, OutcomeKind.FAILED)
    assert not core.manager.take_ops()
    load(core, run(0, 1))
    assert writes(core) == run(0, 1)


def test_a_tier_out_of_service() -> None:
    """Chunks used during an outage are dropped and counted; used again after it, they are written."""
    core = make_core(tiers=[disk(write="on_reuse")])
    put(core, run(0, 2))
    core.manager.on_completion(TierHealth(0, usable=False))
    load(core, run(0, 2))
    assert not core.manager.take_ops()
    assert core.counters.cascades_dropped == {"disk": 2}
    core.manager.on_completion(TierHealth(0, usable=True))
    load(core, run(0, 2))
    assert sorted(writes(core)) == run(0, 2)


def test_hints_are_kept_at_the_second_sight() -> None:
    """The write mask of a chunk is set when it is stored, and still holds when it is used."""
    core = make_core(tiers=[disk(write="on_reuse"), objects(write="on_reuse")])
    put(core, run(0, 1), store=frozenset({"objects"}))
    put(core, run(1, 1), store=frozenset({"host"}))
    put(core, run(2, 1), ttl_s=60.0)
    load(core, run(0, 3), ttl_s=60.0)
    first = core.manager.take_ops()
    for op in first:
        core.finish(op, OutcomeKind.ABSENT if op.verb is Verb.PROBE else OutcomeKind.OK)
    done = first + core.finish_all()
    found = {(op.tier, key) for op in done if op.verb is Verb.WRITE for key in op.keys}
    assert found == {(1, run(0, 1)[0]), (0, run(2, 1)[0])}


def test_one_shot_uses_do_not_write_what_a_one_shot_request_stored() -> None:
    """A one-shot chunk is not written before another kind of request uses it."""
    core = make_core(tiers=[disk(write="on_reuse")])
    put(core, run(0, 2), one_shot=True)
    load(core, run(0, 2), one_shot=True)
    assert not core.manager.take_ops()
    load(core, run(0, 1))
    assert written(core) == run(0, 1)


def test_nothing_is_written_for_a_lookup() -> None:
    """Being asked whether a chunk is there is no use of it: the answer may be declined."""
    core = make_core(tiers=[disk(write="on_reuse")])
    put(core, run(0, 2))
    ctx = RequestContext("asker", hints=RequestHints())
    assert core.manager.lookup(run(0, 1)[0], ctx) is LookupResult.HIT
    core.manager.passages.reserve(ctx.request_id, tuple(run(0, 2)), ctx.hints)
    core.manager.passages.release(ctx.request_id)
    core.manager.touch(run(0, 2))
    assert not core.manager.take_ops()
