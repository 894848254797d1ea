"""Chunks read from a slow tier are written to the tiers between, by their write policies, if they are exact."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_parts import Core, disk, make_core, objects, with_limits
from edge_moves import load, put, run, written

from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, TierHealth, Verb

SLOTS = 16


def core_over(write: str, *, exact: bool = True) -> Core:
    """A disk with this write policy, and below it a tier that has chunks 0 to 3."""
    core = make_core(slots=SLOTS, tiers=[disk(write=write), with_limits(disk(name="far"), exact=exact)])
    core.keep_below(run(0, 4), tier=1)
    return core


@pytest.mark.parametrize("write", ["through", "on_reuse"])
def test_a_promotion_fills_the_tier_between(write: str) -> None:
    """The next read uses the nearer tier. A promotion counts as a reuse."""
    core = core_over(write)
    load(core, run(0, 4))
    assert sorted(written(core)) == run(0, 4)
    core.manager.reset_cache()
    load(core, run(0, 4))
    assert core.counters.promotions == {"far": 4, "disk": 4}


def test_a_promotion_reaches_a_tier_written_back_to_when_it_leaves() -> None:
    """Not before the host tier evicts it."""
    core = core_over("back")
    load(core, run(0, 4))
    assert not core.manager.take_ops()
    for i in range(10, 10 + SLOTS):
        put(core, run(i, 1))
        core.finish_all()
    assert set(run(0, 4)) < set(core.lower[0].residency)


def test_a_promotion_does_not_reach_a_read_only_tier() -> None:
    """Whatever is read below it."""
    core = core_over("read_only")
    load(core, run(0, 4))
    assert not core.manager.take_ops()


def test_a_promotion_goes_further_down_too() -> None:
    """A bucket below the disk gets what proves worth reading again, although it missed the store."""
    core = make_core(tiers=[disk(), objects(write="on_reuse")])
    core.keep_below(run(0, 2))
    load(core, run(0, 2))
    answer(core, absent=run(0, 2))
    assert sorted(written(core, tier=1)) == run(0, 2)


# -- no second write ---------------------------------------------------------------------------------------------------


def answer(core: Core, absent: Sequence[Key] = ()) -> list[Key]:
    """Answer the probes that are due. Returns their keys."""
    probes = [op for op in core.manager.take_ops() if op.verb is Verb.PROBE]
    for op in probes:
        core.finish(op, [OutcomeKind.ABSENT if key in absent else OutcomeKind.OK for key in op.keys])
    return [key for op in probes for key in op.keys]


@pytest.mark.parametrize("write", ["through", "on_reuse"])
def test_a_shared_tier_is_asked_before_a_promoted_chunk_is_written(write: str) -> None:
    """Most chunks of the disk were written to the bucket when they were stored, also by earlier processes. 44 of 65
    were encoded and checksummed for nothing, and counted as written."""
    core = make_core(tiers=[disk(), objects(write=write)])
    core.keep_below(run(0, 4))
    load(core, run(0, 4))
    assert sorted(answer(core, absent=run(3, 1))) == run(0, 4)
    assert written(core, tier=1) == run(3, 1)
    assert core.counters.writes_skipped == {"objects": 3}
    assert core.counters.cascades == {"objects": 1}
    assert not core.manager.has_pending_changes


def test_a_tier_that_is_known_to_have_a_promoted_chunk_is_not_asked() -> None:
    """By its index, by its own acknowledgement, or by a recent answer."""
    core = make_core(tiers=[disk(), disk(name="far"), objects()])
    put(core, run(0, 2))
    assert sorted(written(core, tier=2)) == run(0, 2)
    core.manager.reset_cache()
    core.begin()
    load(core, run(0, 2))
    assert not core.manager.take_ops()
    assert core.counters.writes_skipped == {"far": 2, "objects": 2}


def test_a_tier_is_not_asked_for_what_was_read_from_it() -> None:
    """It may take longer to load a prompt than an answer is remembered."""
    core = make_core(tiers=[objects()])
    core.lower[0].probed(run(0, 1)[0], 0.0, present=True)
    core.manager.passages.reserve("reader", tuple(run(0, 1)), NO_HINTS)
    (read,) = core.manager.take_ops()
    core.begin(1000.0)
    core.finish(read)
    assert not core.manager.take_ops()
    assert not core.counters.writes_skipped


def test_no_answer_in_time_means_a_write() -> None:
    """A lost chunk is worse than a second write."""
    core = make_core(tiers=[disk(), objects()])
    core.keep_below(run(0, 1))
    load(core, run(0, 1))
    (probe,) = core.manager.take_ops()
    core.finish(probe, OutcomeKind.TIMED_OUT)
    assert written(core, tier=1) == run(0, 1)


def test_a_chunk_whose_answer_cannot_come_is_dropped() -> None:
    """A flush would wait for ever for a tier that was taken out of service before it was asked."""
    core = make_core(tiers=[disk(), objects()])
    core.keep_below(run(0, 2))
    load(core, run(0, 2))
    core.manager._tier_io.cascades.offer_ready(core.now)
    core.manager.on_completion(TierHealth(1, usable=False))
    core.manager.on_completion(TierHealth(1, usable=True))
    assert not core.finish_all()
    assert not core.manager.has_pending_changes
    assert core.counters.cascades_dropped == {"objects": 2}


def test_lookups_of_requests_are_not_queued_behind_many_such_questions() -> None:
    """Over the bound of a probe, chunks are written without asking."""
    core = make_core(tiers=[disk(), objects(probe_keys_max=4)])
    core.keep_below(run(0, 10))
    load(core, run(0, 10))
    ops = core.manager.take_ops()
    assert sum(len(op.keys) for op in ops if op.verb is Verb.PROBE) == 4
    assert sum(len(op.keys) for op in ops if op.verb is Verb.WRITE) == 6


@pytest.mark.parametrize("write", ["through", "on_reuse"])
def test_what_a_shared_tier_has_is_not_written_there_on_later_reuse(write: str) -> None:
    """Its answer is soon forgotten, but the chunk is still the same."""
    core = make_core(tiers=[disk(), objects(write=write)])
    core.keep_below(run(0, 2))
    load(core, run(0, 2))
    assert sorted(answer(core)) == run(0, 2)
    core.begin(1000.0)
    load(core, run(0, 2))
    assert not core.manager.take_ops()


@pytest.mark.parametrize("write", ["through", "on_reuse", "back"])
def test_bytes_that_are_not_exact_are_not_spread(write: str) -> None:
    """A chunk from a tier with a lossy codec is used, but written nowhere: not on arrival, reuse or eviction, and not
    by a flush. Otherwise an exact tier would have inexact bytes under the key of exact ones."""
    core = core_over(write, exact=False)
    load(core, run(0, 4))
    load(core, run(0, 4))
    core.manager.flush()
    assert not core.finish_all()
    for i in range(10, 10 + SLOTS):
        put(core, run(i, 1))
        core.finish_all()
    assert not set(run(0, 4)) & set(core.lower[0].residency)
    assert not set(run(0, 4)) & core.ready()
    assert not core.counters.demotions_dropped


def test_exact_bytes_of_the_same_chunk_are_spread() -> None:
    """A chunk that is computed again is exact, also in a slot that had an inexact one."""
    core = core_over("through", exact=False)
    load(core, run(0, 4))
    core.finish_all()
    core.manager.reset_cache()
    core.begin()
    put(core, run(0, 4))
    assert sorted(written(core)) == run(0, 4)


def test_a_lossy_tier_is_filled_like_any_other() -> None:
    """A lossy codec loses precision on the way back."""
    core = make_core(tiers=[with_limits(disk(), exact=False)])
    put(core, run(0, 2))
    assert sorted(written(core)) == run(0, 2)


def test_a_one_shot_request_reads_and_another_one_fills() -> None:
    """A one-shot prompt is not expected again. A request that uses it all the same ends that, for every tier."""
    core = core_over("through")
    load(core, run(0, 4), one_shot=True)
    assert not core.manager.take_ops()
    load(core, run(0, 4))
    assert sorted(written(core)) == run(0, 4)


def test_what_comes_from_a_bucket_is_not_uploaded_to_it_when_it_leaves() -> None:
    """Its yes is forgotten after a while, but the chunk came from there."""
    core = make_core(slots=SLOTS, tiers=[objects(write="back")])
    for key in run(0, 4):
        core.lower[0].probed(key, 0.0, present=True)
    load(core, run(0, 4))
    core.begin(1000.0)
    put(core, run(10, SLOTS - 4))
    assert not core.manager.take_ops()
    put(core, run(40, 2))
    assert not set(written(core)) & set(run(0, 4))


def test_one_read_serves_all_who_wait() -> None:
    """Requests in flight are not repeated: two want the same chunks, there is one read, and one write between."""
    core = core_over("through")
    core.begin()
    for who in ("a", "b"):
        core.manager.passages.reserve(
            core.record(core.arrive(4, who)).ctx.request_id,
            tuple(run(0, 4)),
            core.record(core.arrive(4, who)).ctx.hints,
        )
    ops = core.manager.take_ops()
    assert [(op.verb, sorted(op.keys)) for op in ops] == [(Verb.READ, run(0, 4))]
    core.finish(ops[0], [OutcomeKind.OK] * 4)
    assert sorted(written(core)) == run(0, 4)


def test_chunks_are_offered_to_many_tiers_within_the_budget_of_each_step() -> None:
    """Ten tiers, of which each takes each chunk of a long prompt: a step offers a bounded number."""
    core = make_core(slots=64, tiers=[disk(name=f"disk-{i}") for i in range(11)])
    core.keep_below(run(0, 40), tier=10)
    load(core, run(0, 40))
    core.manager.budget.keys_max = 40
    offered = [0]
    while core.manager._tier_io.cascades.ready:
        core.begin()
        core.manager._tier_io.cascades.offer_ready(core.now)
        offered.append(sum([len(tier.write_queue) for tier in core.lower]))
        assert offered[-1] - offered[-2] <= 40 + 10, "the budget, and one chunk more for each tier"
        assert offered[-1] > offered[-2], "every step makes progress"
    assert offered[-1] == 40 * 10


def test_a_chunk_that_is_offered_soon_is_not_queued_twice() -> None:
    """A one-shot request has read it, and another one uses it in the same step, which ends that: the tier between waits
    for it once. Twice in the queue, it lost its dirty pin at the first write, and was evicted before others if that
    failed."""
    core = core_over("through")
    core.manager.passages.reserve("first", tuple(run(0, 4)), RequestHints(one_shot=True))
    for op in core.manager.take_ops():
        core.finish(op)
    cascades, slots = core.manager._tier_io.cascades, core.host.slots.find_all(run(0, 4))
    assert cascades.ready
    cascades.used([slot for slot in slots if slot is not None], NO_HINTS, 0.0)
    cascades.offer_ready(0.0)
    assert len(core.lower[0].write_queue) == 4
