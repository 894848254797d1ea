"""Edges with ``write = "back"``: a tier gets what the host tier is about to evict, and no store ever waits for it."""

from __future__ import annotations

import pytest
from at_rest import content_of
from core_parts import FRAME_BYTES, Core, disk, make_core, objects
from edge_moves import late, load, put, run, writes, written

from tierkv.manager.contract import RequestContext
from tierkv.manager.moves import write_back
from tierkv.policies.lru import LruPolicy
from tierkv.policies.quotas import Quotas, TenantPolicy
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import OutcomeKind, TierHealth, TierOp, Verb

WHO = RequestContext("a")
SLOTS, KEPT_FREE = 16, 2


@pytest.fixture(autouse=True)
def _steps_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep an eighth of the slots free, however many a step takes: only ``test_free_slots.py`` has large steps."""
    monkeypatch.setattr(write_back, "FREE_SHARE_MAX", write_back.FREE_SHARE)


def full_core(**tier: object) -> Core:
    """A host tier that is full of chunks 0 to 15, in this order, over one tier that is written back to."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back", **tier)])  # type: ignore[arg-type]  # checked at run time
    for i in range(SLOTS):
        put(core, run(i, 1))
    return core


def only(core: Core, verb: Verb) -> TierOp:
    """This step's single instruction."""
    (op,) = core.manager.take_ops()
    assert op.verb is verb
    return op


def test_nothing_is_written_while_there_is_room() -> None:
    """Chunks are not written before they are about to be evicted: most are used, expired or reset first."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back")])
    put(core, run(0, SLOTS - KEPT_FREE))
    load(core, run(0, 4))
    assert not core.manager.take_ops()
    assert not core.manager.has_pending_changes


def test_victims_are_written_ahead_of_need_and_leave_then() -> None:
    """A full host tier writes those that its policy would evict next, the coldest first, and a few only. They are hits
    until they are at rest in the lower tier; then their slots are free and events report it."""
    core = full_core()
    core.manager.take_events()
    write = only(core, Verb.WRITE)
    assert list(write.keys) == run(0, KEPT_FREE)
    assert core.ready() == set(run(0, SLOTS))
    assert core.manager.lookup(run(0, 1)[0], WHO) is LookupResult.HIT
    core.host.validate()
    core.finish(write)
    assert core.host.free == KEPT_FREE
    assert core.ready() == set(run(KEPT_FREE, SLOTS - KEPT_FREE))
    assert sorted(core.lower[0].residency) == run(0, KEPT_FREE)
    assert [(e.kind, e.tier, list(e.keys)) for e in core.manager.take_events()] == [
        (CacheEventKind.STORED, "disk", run(0, KEPT_FREE)),
        (CacheEventKind.REMOVED, "host", run(0, KEPT_FREE)),
    ]
    assert core.counters.demotions == {"disk": 2}
    assert core.counters.evictions == {"host": 2}
    assert not core.manager.take_ops(), "enough slots are free"
    core.manager.validate()


def test_all_of_a_stream_gets_down_if_the_tier_keeps_up() -> None:
    """Stores that come no faster than the tier takes them lose nothing: each chunk is in one of the two tiers."""
    core = full_core()
    for i in range(SLOTS, 200):
        core.finish_all()
        put(core, run(i, 1))
    core.finish_all()
    assert core.ready() | set(core.lower[0].residency) == set(run(0, 200))
    assert core.counters.demotions_dropped == {}


def test_what_is_in_the_tier_already_leaves_without_a_write() -> None:
    """A chunk that came from there is clean."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back")])
    core.keep_below(run(0, SLOTS))
    load(core, run(0, SLOTS))
    assert not core.manager.take_ops()
    assert core.host.free == KEPT_FREE


@pytest.mark.parametrize("wish", ["load", "reserve", "offer", "touch"])
def test_what_is_wanted_again_stays(wish: str) -> None:
    """A chunk that is used while it is being written stays in the host tier, and others are evicted later."""
    core = full_core()
    write = only(core, Verb.WRITE)
    if wish == "load":
        load(core, run(0, 1))
    elif wish == "reserve":
        core.manager.passages.reserve(WHO.request_id, tuple(run(0, 1)), WHO.hints)
    elif wish == "offer":
        put(core, run(0, 1))
    else:
        core.manager.touch(run(0, 1))
    core.host.validate()
    core.finish(write)
    assert core.ready() == set(run(0, 1) + run(2, SLOTS - 2))
    core.manager.passages.release(WHO.request_id)
    core.manager.validate()
    assert written(core) == run(2, 1)
    assert core.host.free == KEPT_FREE


def test_a_hung_tier_never_blocks_a_store() -> None:
    """Promises 2, 4 and 6: the disk takes a write and is silent for ever. Every store finds room at once, also before
    the deadline reveals the hang. Chunks that are not written are counted; few slots are held for the disk."""
    core = full_core(queue=4)
    hung = only(core, Verb.WRITE)
    for i in range(100):
        put(core, run(SLOTS + i, 1))
        core.manager.take_ops()
        if i == 50:
            late(core, hung)
        core.manager.validate()
    assert core.lower[0].residency.num_writing <= 4
    assert core.host.room >= SLOTS - 4
    assert core.counters.stores_refused == 0
    assert core.counters.demotions_dropped["disk"] > 80
    assert core.counters.demotions == {}


def test_a_chunk_whose_write_is_late_makes_way_for_others() -> None:
    """Its slot cannot be free before the I/O has ended, so it stays readable, and others are evicted instead."""
    core = full_core()
    write = only(core, Verb.WRITE)
    late(core, write)
    assert not core.host.slots.demoting
    assert list(only(core, Verb.WRITE).keys) == run(2, KEPT_FREE)
    core.finish(write, OutcomeKind.TIMED_OUT)
    assert set(run(0, 2)) < core.ready()
    core.manager.validate()


def test_one_hung_tier_does_not_keep_chunks_from_another() -> None:
    """Two tiers are written back to; one is silent. The other gets on as if it were alone."""
    core = make_core(slots=SLOTS, tiers=[disk(name="well", write="back"), disk(name="hung", write="back", queue=2)])
    for i in range(60):
        put(core, run(i, 1))
        for op in core.manager.take_ops():
            if op.tier == 0:
                core.finish(op)
            else:
                late(core, op)
        core.manager.validate()
    assert core.counters.demotions["well"] > 35
    assert core.counters.demotions_dropped["hung"] > 35
    assert core.counters.stores_refused == 0


def test_a_tier_out_of_service() -> None:
    """No victim is chosen ahead of need; evictions are counted for this tier only; later the tier gets its own."""
    core = full_core()
    core.manager.on_completion(TierHealth(0, usable=False))
    assert not core.manager.take_ops()
    assert len(core.ready()) == SLOTS
    put(core, run(20, 3))
    assert core.counters.demotions_dropped == {"disk": 3}
    core.manager.on_completion(TierHealth(0, usable=True))
    assert writes(core) == run(3, KEPT_FREE)


@pytest.mark.parametrize("kind", [OutcomeKind.FAILED, OutcomeKind.REFUSED, OutcomeKind.NO_SPACE, OutcomeKind.TIMED_OUT])
def test_a_write_that_fails_is_given_up(kind: OutcomeKind) -> None:
    """The slot is free all the same, the failure is counted, and the next victims are tried."""
    core = full_core()
    core.finish(only(core, Verb.WRITE), kind)
    assert core.host.free == KEPT_FREE
    assert core.counters.writes_failed == {"disk": 2}
    assert not core.ready() & set(run(0, 2))
    put(core, run(20, 2))
    assert run(2, 2) == [key for op in core.manager.take_ops() if op.verb is Verb.WRITE for key in op.keys]
    core.manager.validate()


def test_a_full_tier_makes_room_first() -> None:
    """Room is made below before a demotion begins above, and the capacity holds; the chunks stay readable meanwhile."""
    core = full_core(frames=4)
    core.lower[0].load_index(content_of([(key, FRAME_BYTES) for key in run(100, 4)]))
    deletion = only(core, Verb.DELETE)
    assert len(core.ready()) == SLOTS
    core.finish(deletion)
    assert list(only(core, Verb.WRITE).keys) == run(0, 1), "a quarter of the tier at once"
    core.manager.validate()


def test_room_below_is_made_ahead_of_need_too() -> None:
    """A full host tier over a full disk: in a stream of stores no chunk is lost for want of room on the disk."""
    core = full_core(frames=SLOTS)
    core.lower[0].load_index(content_of([(key, FRAME_BYTES) for key in run(100, SLOTS)]))
    core.finish_all()
    for i in range(200, 260):
        put(core, run(i, 1))
        for op in core.manager.take_ops():
            core.finish(op)
        core.manager.validate()
    assert core.counters.demotions_dropped == {}
    assert core.counters.demotions["disk"] == 62


def test_no_more_leave_than_the_tier_takes_now() -> None:
    """Chunks that cannot be written yet are not evicted yet."""
    core = full_core(queue=1)
    assert list(only(core, Verb.WRITE).keys) == run(0, 1)
    assert not core.manager.take_ops()
    assert len(core.ready()) == SLOTS
    assert core.counters.demotions_dropped == {}


def test_a_tier_that_lacks_room_does_not_keep_chunks_from_another() -> None:
    """Of two that are written back to, one is just making room: its capacity holds, and what it misses is counted."""
    core = make_core(slots=SLOTS, tiers=[disk(name="large", write="back"), disk(name="small", write="back", frames=2)])
    core.keep_below(run(100, 2), tier=1)
    put(core, run(0, SLOTS))
    ops = {op.verb: op for op in core.manager.take_ops()}
    core.manager.validate()
    assert (ops[Verb.DELETE].tier, ops[Verb.WRITE].tier) == (1, 0)
    assert len(ops[Verb.WRITE].keys) == KEPT_FREE
    assert core.counters.demotions_dropped == {"small": KEPT_FREE}


def test_a_frame_that_can_never_fit() -> None:
    """Such a tier gets nothing, and stores go on."""
    core = full_core(frames=0)
    assert not core.manager.take_ops()
    put(core, run(20, 1))
    assert core.counters.demotions_dropped == {"disk": 1}


def test_every_tier_that_is_written_back_to_gets_a_victim() -> None:
    """One hold per write: the slot is free when the last of them has ended. The shared tier is asked first."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back"), objects(write="back")])
    put(core, run(0, SLOTS))
    (first,) = core.manager.take_ops()
    (probe,) = core.manager.take_ops()
    core.finish(probe, OutcomeKind.ABSENT)
    (second,) = core.manager.take_ops()
    assert sorted(probe.keys) == sorted(first.keys) == sorted(second.keys)
    core.finish(first)
    assert core.host.free == 0
    assert len(core.ready()) == SLOTS
    core.finish(second)
    assert core.host.free == KEPT_FREE
    assert core.counters.demotions == {"disk": 2, "objects": 2}


def test_a_victim_below_which_is_also_written_through() -> None:
    """The disk has it since it was stored; the bucket gets it when it is evicted."""
    core = make_core(slots=SLOTS, tiers=[disk(), objects(write="back")])
    put(core, run(0, SLOTS))
    core.finish_all(probed=OutcomeKind.ABSENT)
    assert core.counters.cascades == {"disk": SLOTS}
    assert core.counters.demotions == {"objects": KEPT_FREE}


def asked_for_victims() -> tuple[Core, TierOp]:
    """A full host tier over a shared tier that is being asked for the first victims."""
    core = make_core(slots=SLOTS, tiers=[objects(write="back")])
    put(core, run(0, SLOTS))
    assert not core.manager.take_ops()
    (probe,) = core.manager.take_ops()
    assert (probe.verb, len(probe.keys)) == (Verb.PROBE, KEPT_FREE)
    core.manager.validate()
    return core, probe


def test_a_victim_that_a_shared_tier_has_is_not_written_again() -> None:
    """It is evicted as soon as the tier has answered, and counted apart."""
    core, probe = asked_for_victims()
    core.finish(probe)
    assert not core.manager.take_ops()
    assert core.host.free == KEPT_FREE
    assert (core.counters.writes_skipped, core.counters.demotions) == ({"objects": KEPT_FREE}, {})
    assert not core.counters.demotions_dropped
    core.manager.validate()


def test_a_victim_that_is_used_while_the_tier_is_asked_stays() -> None:
    """The use cancels the demotion; the others are written."""
    core, probe = asked_for_victims()
    load(core, [probe.keys[0]])
    core.finish(probe, OutcomeKind.ABSENT)
    (write,) = core.manager.take_ops()
    assert write.keys == probe.keys[1:]
    assert probe.keys[0] in core.ready()
    core.finish(write)
    core.manager.validate()


def test_victims_leave_when_the_tier_that_was_asked_fails() -> None:
    """No slot waits for an answer that never comes: the chunks are evicted unwritten, and counted."""
    core, probe = asked_for_victims()
    core.manager.on_completion(TierHealth(0, usable=False))
    assert core.host.free == KEPT_FREE
    assert core.counters.demotions_dropped == {"objects": KEPT_FREE}
    core.finish(probe, OutcomeKind.FAILED)
    core.manager.validate()
    assert not list(core.manager._tier_io._demotions.held)


@pytest.mark.parametrize("answer", [OutcomeKind.OK, OutcomeKind.ABSENT])
def test_a_victim_that_is_damaged_and_stored_anew_while_the_tier_is_asked(answer: OutcomeKind) -> None:
    """The tier is asked for one key in two slots. Its answer once freed the second one only: the first was lost."""
    core, probe = asked_for_victims()
    damaged = [probe.keys[0]]
    core.manager.passages.reserve(WHO.request_id, tuple(damaged), WHO.hints)
    grant = core.manager.prepare_load(damaged, WHO)
    core.manager.complete_load(grant.slots, grant.slots)
    put(core, damaged)
    held = core.manager._tier_io._demotions._asked[0]
    for i in range(2 * SLOTS):
        if held[damaged[0]] != grant.slots[0].slot:
            break
        put(core, run(SLOTS + i, 1))
        for op in core.manager.take_ops():
            core.finish(op, OutcomeKind.OK)
    assert held[damaged[0]] != grant.slots[0].slot, "it was never a victim again"
    core.finish(probe, answer)
    core.finish_all()
    core.manager.validate()
    assert core.host.room == SLOTS


def test_victims_outlive_a_reset_until_the_tier_has_answered() -> None:
    """After it nothing is written, and every slot is free."""
    core, probe = asked_for_victims()
    core.manager.reset_cache()
    core.manager.validate()
    core.begin()
    core.finish(probe, OutcomeKind.ABSENT)
    assert not core.manager.take_ops()
    core.begin()
    assert core.host.free == SLOTS
    core.manager.validate()


def test_reset_while_chunks_leave() -> None:
    """They are forgotten like all others; the slot is free when the write has ended, and only then."""
    core = full_core()
    write = only(core, Verb.WRITE)
    core.manager.reset_cache()
    core.manager.validate()
    assert core.manager.lookup(run(0, 1)[0], WHO) is LookupResult.MISS
    core.begin()
    core.finish(write)
    core.manager.validate()
    assert core.host.free == SLOTS
    assert sorted(core.lower[0].residency) == run(0, 2), "the bytes were good, and are there now"


def test_a_chunk_that_turns_out_bad_while_it_leaves() -> None:
    """A load that finds it damaged drops it; its slot is free once the write has ended too."""
    core = full_core()
    write = only(core, Verb.WRITE)
    core.manager.passages.reserve(WHO.request_id, tuple(run(0, 1)), WHO.hints)
    grant = core.manager.prepare_load(run(0, 1), WHO)
    core.manager.complete_load(grant.slots, grant.slots)
    core.manager.validate()
    core.finish(write)
    core.manager.validate()
    assert core.host.free == KEPT_FREE
    assert not core.ready() & set(run(0, 2))


def test_hints_are_kept_on_eviction() -> None:
    """One-shot chunks are evicted first and unwritten; write masks and lifetimes hold as for any other write."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back"), objects(write="back")])
    put(core, run(0, 1), store=frozenset({"disk"}))
    put(core, run(1, 1), ttl_s=60.0)
    put(core, run(2, 1))
    put(core, run(3, 1), one_shot=True)
    put(core, run(4, SLOTS - 4))
    assert writes(core, tier=1) == []
    assert not core.ready() & {run(3, 1)[0], run(0, 1)[0]}
    assert sorted(core.lower[0].residency) == run(0, 1)
    put(core, run(20, 2))
    found = {
        (op.tier, key) for op in core.finish_all(probed=OutcomeKind.ABSENT) if op.verb is Verb.WRITE for key in op.keys
    }
    assert found == {(0, run(1, 1)[0]), (0, run(2, 1)[0]), (1, run(2, 1)[0])}
    assert core.counters.demotions_dropped == {}


def test_what_has_ended_is_not_written() -> None:
    """An expired chunk counts as absent: no request could read it from a lower tier."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back")], step_keys=16)
    put(core, run(0, SLOTS), ttl_s=5.0)
    core.begin(10.0)
    assert not core.manager.take_ops()
    assert KEPT_FREE <= core.host.free < SLOTS, "all were swept before one was chosen"
    assert core.counters.demotions_dropped == {}


def test_a_tier_that_is_being_emptied_gets_nothing_yet() -> None:
    """After a reset of all tiers one of them is still deleting: a write could be among what it deletes. Another tier
    gets the victims; what the first one misses is counted."""
    core = make_core(slots=SLOTS, tiers=[disk(name="well", write="back"), disk(name="emptied", write="back")])
    core.keep_below(run(100, 3), tier=1)
    core.manager.reset_cache("all")
    core.begin()
    put(core, run(0, SLOTS))
    ops = core.manager.take_ops()
    assert {(op.verb, op.tier) for op in ops} == {(Verb.WRITE, 0), (Verb.DELETE, 1)}
    assert core.counters.demotions_dropped == {"emptied": KEPT_FREE}


def test_a_tier_is_detached_while_chunks_leave_for_it() -> None:
    """Writes under way end and free their slots; no victims are chosen for a detached tier."""
    core = full_core()
    write = only(core, Verb.WRITE)
    core.manager._tier_io.detach(core.lower[0])
    assert not core.manager.take_ops()
    core.finish(write)
    core.manager.validate()
    assert core.host.free == KEPT_FREE
    put(core, run(20, 6))
    assert not core.manager.take_ops()
    assert core.counters.demotions_dropped == {}


# -- flush -------------------------------------------------------------------------------------------------------------


def test_a_flush_writes_what_is_only_in_the_host_tier() -> None:
    """Before a restart nothing may be left that only memory holds. What is written stays readable in the host tier."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back")])
    core.keep_below(run(0, 2))
    put(core, run(0, 4))
    core.manager.flush()
    assert core.manager.has_pending_changes
    assert sorted(written(core)) == run(2, 2)
    assert not core.manager.has_pending_changes
    assert core.ready() == set(run(0, 4))
    assert core.counters.demotions == {"disk": 2}


def test_a_flush_goes_step_by_step() -> None:
    """Promise 2: it looks at a bounded number of slots per step, and queues no chunk twice."""
    step, count = 64, 192
    core = make_core(slots=2 * count, tiers=[disk(write="back", queue=1)], step_keys=step)
    put(core, run(0, count))
    for _ in range(2):
        core.manager.flush()
        ops = core.manager.take_ops()
        assert core.manager.has_pending_changes
        assert len(core.lower[0].write_queue) <= step
        for op in ops:
            core.finish(op)
    for _ in range(2 * count):
        core.finish_all()
        core.begin()
    assert not core.manager.has_pending_changes
    assert core.counters.demotions == {"disk": count}


def test_a_flush_without_such_a_tier_has_nothing_to_do() -> None:
    """Chunks seen once do not go down an edge that writes on reuse, and what was written through is there."""
    core = make_core(tiers=[disk(), objects(write="on_reuse")])
    put(core, run(0, 4))
    core.finish_all()
    core.manager.flush()
    assert not core.manager.has_pending_changes


def test_a_flush_into_a_tier_out_of_service_ends() -> None:
    """It counts what it could not write, and does not wait for the tier."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back")])
    put(core, run(0, 4))
    core.manager.on_completion(TierHealth(0, usable=False))
    core.manager.flush()
    assert not core.finish_all()
    assert not core.manager.has_pending_changes
    assert core.counters.demotions_dropped == {"disk": 4}
    assert core.ready() == set(run(0, 4))


# -- quotas ------------------------------------------------------------------------------------------------------------


def test_what_a_tenant_has_too_much_is_written_before_it_goes() -> None:
    """A tenant that always fills its quota of the host tier loses chunks by that alone. If those went unwritten, the
    tier below would never get anything of it."""
    core = make_core(
        slots=64, tiers=[disk(write="back")], host_policy=TenantPolicy(LruPolicy, Quotas(64, 4), chunk_bytes_max=1)
    )
    put(core, run(0, 10))
    core.begin()
    assert core.ready() == set(run(0, 10)), "they are readable until they are at rest below"
    assert sorted(writes(core)) == run(4, 6)
    assert core.ready() == set(run(0, 4)), "the head of a prefix stays longest"
    assert sorted(core.lower[0].residency) == run(4, 6)
    assert core.counters.demotions_dropped == {}
    core.manager.validate()


def test_a_quota_holds_though_the_tier_below_takes_nothing() -> None:
    """No tenant exceeds its quota of the host tier because a disk is full or out of service; the loss is counted."""
    policy = TenantPolicy(LruPolicy, Quotas(64, 4), chunk_bytes_max=1)
    core = make_core(slots=64, tiers=[disk(write="back", frames=1)], host_policy=policy)
    core.keep_below(run(100, 1))
    put(core, run(0, 10))
    core.manager.on_completion(TierHealth(0, usable=False))
    core.begin()
    assert not writes(core)
    assert len(core.ready()) == 4
    assert core.counters.demotions_dropped == {"disk": 6}


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_step_lets_few_leave() -> None:
    """Promise 2: however large the host tier, one step chooses a bounded number of victims."""
    step, slots = 64, 1024
    core = make_core(slots=slots, tiers=[disk(write="back", queue=slots)], step_keys=step)
    put(core, run(0, slots))
    ops = core.manager.take_ops()
    assert 0 < sum(len(op.keys) for op in ops) <= step
