"""Tiers that are detached or reset while chunks are being written to them: no endless wait, no loss."""

from __future__ import annotations

from core_parts import FRAME_BYTES, disk, make_core
from edge_moves import late, load, put, run, writes, written

from tierkv.types.tier_ops import OutcomeKind, TierHealth, Verb


def test_a_flush_ends_though_its_tier_leaves() -> None:
    """A write-back tier is detached in the middle of a flush, so the rest of the slots is not checked any more. A flush
    that did not end would run into its timeout, as would each later one, and close would report a loss."""
    count = 128
    core = make_core(slots=2 * count, tiers=[disk(write="back")], step_keys=64)
    put(core, run(0, count))
    core.manager.flush()
    core.finish_all()
    core.manager.flush()
    core.manager.detach("disk")
    core.finish_all()
    core.manager.forget(0)
    assert not core.manager.has_pending_changes


def test_what_waits_for_an_emptied_tier_is_dropped_when_it_leaves() -> None:
    """Chunks wait in the queue of a tier that deletes everything. When that is detached they wait for nothing."""
    core = make_core(slots=16, tiers=[disk()])
    put(core, run(0, 2))
    core.finish_all()
    core.manager.reset_cache("all")
    put(core, run(4, 3))
    core.begin()
    deletion = core.manager.take_ops()
    assert [op.verb for op in deletion] == [Verb.DELETE]
    core.manager.detach("disk")
    assert not core.manager.take_ops()
    assert not core.manager.has_pending_changes
    assert core.counters.cascades_dropped == {"disk": 3}


def test_nothing_is_written_back_to_a_tier_that_is_being_emptied() -> None:
    """Of two tiers the smaller is empty first. A chunk demoted then must not be written to the other as well: its own
    reset would delete it, and would not end while that goes on."""
    tiers = [disk(write="back", name="small"), disk(write="back", name="large")]
    core = make_core(slots=16, tiers=tiers, step_keys=64)
    core.keep_below(run(100, 128), tier=1)
    core.manager.reset_cache("all")
    core.manager.take_ops()
    core.begin()
    assert not core.lower[0].phase.emptying
    assert core.lower[1].phase.emptying
    put(core, run(0, 16))
    ops = core.manager.take_ops()
    assert [op.tier for op in ops if op.verb is Verb.WRITE] == [0]


def test_a_tier_that_cannot_be_reached_is_not_asked_to_empty() -> None:
    """Otherwise each step would issue deletions that are refused at once. They are issued again when the tier is
    back in service."""
    core = make_core(slots=16, tiers=[disk()])
    core.keep_below(run(0, 4))
    core.manager.on_completion(TierHealth(0, usable=False))
    core.manager.reset_cache("all")
    core.begin()
    assert not core.manager.take_ops()
    core.manager.on_completion(TierHealth(0, usable=True))
    core.begin()
    assert [op.verb for op in core.finish_all()] == [Verb.DELETE]
    core.begin()
    assert not core.lower[0].phase.emptying


def test_a_flush_writes_again_what_the_tier_has_lost_since() -> None:
    """The first flush wrote a chunk, the tier evicted it to make room, and the host tier still has it. The second must
    not say that all is there while it is not."""
    core = make_core(slots=32, tiers=[disk(write="back", frames=4)])
    put(core, run(0, 2))
    core.manager.flush()
    assert written(core) == run(0, 2)[::-1]
    tier = core.lower[0]
    for key in run(0, 2):
        tier.residency.schedule_delete(key)
    core.finish_all()
    assert not len(tier.residency)
    core.manager.flush()
    assert written(core) == run(0, 2)[::-1]


def test_a_chunk_used_again_is_written_again_if_the_tier_has_lost_it() -> None:
    """An edge that writes on reuse: the tier evicted a chunk that the host tier kept. Wanted again, it is worth
    a write again."""
    core = make_core(slots=32, tiers=[disk(write="on_reuse", frames=4)])
    put(core, run(0, 1))
    load(core, run(0, 1))
    assert writes(core) == run(0, 1)
    tier = core.lower[0]
    tier.residency.schedule_delete(run(0, 1)[0])
    core.finish_all()
    load(core, run(0, 1))
    assert writes(core) == run(0, 1)


def test_a_tier_that_comes_to_a_host_tier_full_of_one_shot_chunks() -> None:
    """Promise 2: a step drops a bounded number of chunks, also of one-shot chunks."""
    step, slots = 64, 1024
    core = make_core(slots=slots, tiers=[], step_keys=step)
    put(core, run(0, slots), one_shot=True)
    core.manager.attach(make_core(tiers=[disk(write="back", queue=slots)]).lower[0])
    core.manager.take_ops()
    assert 0 < core.host.free <= step


def test_a_write_that_is_late_keeps_no_chunk_from_being_written_elsewhere() -> None:
    """A chunk whose write hangs in a detached tier is held, but can still be written to an attached one."""
    core = make_core(slots=8, tiers=[disk(write="back", name="old")])
    for i in range(8):
        put(core, run(i, 1))
    (op,) = core.manager.take_ops()
    late(core, op)
    core.manager.detach("old")
    other = make_core(tiers=[disk(write="back", name="a"), disk(write="back", name="new")]).lower[1]
    core.manager.attach(other)
    core.finish_all()
    core.finish(op, OutcomeKind.TIMED_OUT)
    core.manager.forget(0)
    core.manager.validate()
    assert len(other.residency) * FRAME_BYTES == other.residency.used_bytes
