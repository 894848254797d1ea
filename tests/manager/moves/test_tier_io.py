"""Transfers between the host tier and lower tiers, and their effects."""

from __future__ import annotations

from dataclasses import replace

import pytest
from at_rest import content_of
from calls import calls_of
from core_parts import DISK, FRAME_BYTES, OBJECTS, Core, TierSpec, disk, make_core, objects, with_limits

from tierkv.abc import Capabilities
from tierkv.manager.contract import RequestContext
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.lower.chunk_sizes import ChunkSizes, frame_bytes_bound
from tierkv.manager.lower.lower_tier import LowerTierLimits, WritePolicy
from tierkv.manager.lower.residency import EVICTION_PAUSE_S
from tierkv.manager.moves.write_through import Cascades
from tierkv.policies.lru import LruPolicy
from tierkv.policies.quotas import Quotas, TenantPolicy
from tierkv.structures.ranks import ranks_of
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth, TierListing, TierOp, Verb

WHO = RequestContext("a")
GONE_WRONG = [OutcomeKind.FAILED, OutcomeKind.TIMED_OUT, OutcomeKind.REFUSED]


ANSWERS = (OutcomeKind.OK, OutcomeKind.ABSENT, OutcomeKind.REFUSED)


def run(first: int, count: int) -> list[Key]:
    """Keys of a prefix."""
    return [make_key(b"chunk %d" % i, 0) for i in range(first, first + count)]


def ops(core: Core, verb: Verb) -> list[TierOp]:
    """This step's instructions of one kind; there must be no others."""
    taken = core.manager.take_ops()
    assert {op.verb for op in taken} <= {verb}
    return taken


def only(core: Core, verb: Verb) -> TierOp:
    """This step's single instruction."""
    (op,) = ops(core, verb)
    return op


def read_one(core: Core) -> TierOp:
    """The read of chunk 0, which is in the lower tier and wanted by a request."""
    core.manager.passages.reserve(WHO.request_id, tuple(run(0, 1)), WHO.hints)
    return only(core, Verb.READ)


def test_chunks_that_wait_for_a_tier_are_a_reason_to_step() -> None:
    """A tier takes a bounded number at once, and only a step hands over the rest. An engine without requests must know
    that there is a rest, and must not step for a tier that is out of service."""
    core = make_core(tiers=[disk(queue=1)])
    (tier,) = core.lower
    assert not tier.has_backlog
    core.put(run(0, 3))
    assert tier.has_backlog
    for waiting in (2, 1, 0):
        write = only(core, Verb.WRITE)
        assert len(tier.write_queue) == waiting
        assert tier.has_backlog is (waiting > 0)
        core.manager.on_completion(TierHealth(0, usable=False))
        assert not tier.has_backlog
        core.manager.on_completion(TierHealth(0, usable=True))
        core.finish(write)
    assert not tier.has_backlog


def test_write_through_to_every_tier() -> None:
    """A chunk that becomes readable goes to all tiers that take writes, in batches that suit each, under the slots'
    leases; written chunks are known there."""
    small = replace(OBJECTS, preferred_batch=2)
    core = make_core(tiers=[disk(), TierSpec("objects", small), disk(write="read_only", name="frozen")])
    keys = run(0, 3)
    core.put(keys)
    writes = ops(core, Verb.WRITE)
    assert sorted((op.tier, len(op.keys)) for op in writes) == [(0, 3), (1, 1), (1, 2)]
    for op in writes:
        assert [core.host.slots.owner(ref).key for ref in op.slots] == list(op.keys)  # type: ignore[union-attr]  # leased
        core.finish(op)
    assert core.counters.cascades == {"disk": 3, "objects": 3}
    assert [tier.presence(keys[0], 0.0) for tier in core.lower] == [
        LookupResult.HIT, LookupResult.HIT, LookupResult.MISS,
    ]  # fmt: skip
    assert not core.manager.has_pending_changes


def test_reads_in_smaller_batches_than_writes() -> None:
    """A tier that prefers so gets its promotions in more operations, which its threads share; but not one by one."""
    eager = replace(DISK, preferred_batch=8, preferred_read_bytes=1)
    core = make_core(tiers=[TierSpec("disk", eager)])
    keys = run(0, 6)
    core.put(keys)
    (write,) = ops(core, Verb.WRITE)
    assert len(write.keys) == 6
    core.finish(write)
    core.manager.reset_cache()
    core.manager.passages.reserve(WHO.request_id, tuple(keys), WHO.hints)
    assert [len(op.keys) for op in ops(core, Verb.READ)] == [3, 3]


@pytest.mark.parametrize(("count", "sizes"), [(15, [15]), (16, [8, 8]), (31, [11, 11, 9])])
def test_operations_of_one_step_are_nearly_equal(count: int, sizes: list[int]) -> None:
    """A durable write waits for two flushes, of one chunk as of fifteen: a rest of one held a thread as long
    as the others did."""
    core = make_core(slots=2 * count, tiers=[TierSpec("disk", replace(DISK, preferred_batch=15))])
    core.put(run(0, count))
    assert [len(op.keys) for op in ops(core, Verb.WRITE)] == sizes


@pytest.mark.parametrize(("count", "sizes"), [(8, [4, 4]), (32, [4] * 8), (48, [6] * 8), (70, [7] * 10)])
def test_threads_share_the_reads_of_one_load(count: int, sizes: list[int]) -> None:
    """Each of four threads has two turns, so that one that begins late has one. An operation of many chunks is one
    call: with its header, no eighth frame fits into it here."""
    keys = run(0, count)
    shared = replace(DISK, preferred_batch=128, preferred_concurrency=4, preferred_read_bytes=8 * FRAME_BYTES - 1)
    core = make_core(slots=2 * count, tiers=[TierSpec("disk", shared)])
    core.keep_below(keys)
    core.manager.passages.reserve(WHO.request_id, tuple(keys), WHO.hints)
    assert [len(op.keys) for op in ops(core, Verb.READ)] == sizes


def test_what_is_there_is_not_written_again() -> None:
    """A chunk that came from a tier goes to the tiers that lack it, and not back where it came from."""
    core = make_core(tiers=[disk(name="fast"), disk(name="slow")])
    keys = run(0, 2)
    core.keep_below(keys, tier=1)
    core.manager.passages.reserve(WHO.request_id, tuple(keys), WHO.hints)
    core.finish(only(core, Verb.READ))
    assert [op.tier for op in ops(core, Verb.WRITE)] == [0]


def test_deadlines_follow_the_verb() -> None:
    """Each instruction has a deadline on the stack's clock."""
    limits = LowerTierLimits(
        None, WritePolicy.THROUGH, 10, probe_deadline_s=1.0, read_deadline_s=2.0, write_deadline_s=3.0
    )
    core = make_core(tiers=[TierSpec("objects", OBJECTS, limits)])
    core.begin(100.0)
    assert core.manager.lookup(run(0, 1)[0], WHO) is LookupResult.RETRY
    probe = only(core, Verb.PROBE)
    core.finish(probe)
    read = read_one(core)
    core.put(run(9, 1))
    assert (probe.timeout_s, read.timeout_s, only(core, Verb.WRITE).timeout_s) == (1.0, 2.0, 3.0)


def test_loads_come_before_stores() -> None:
    """Of one step's instructions to a tier, those that a request waits for come first."""
    core = make_core(tiers=[disk()])
    core.keep_below(run(0, 1))
    core.put(run(9, 1))
    core.manager.passages.reserve(WHO.request_id, tuple(run(0, 1)), WHO.hints)
    assert [op.verb for op in core.manager.take_ops()] == [Verb.READ, Verb.WRITE]


def test_cascades_hold_few_slots() -> None:
    """Only what is being written is held; what waits behind it may be evicted, and is then counted as dropped."""
    core = make_core(slots=4, tiers=[disk(queue=1)])
    core.put(run(0, 4))
    write = only(core, Verb.WRITE)
    assert len(write.keys) == 1
    assert core.host.room == 3
    core.put(run(10, 3))
    core.finish(write)
    core.finish_all()
    assert core.counters.cascades["disk"] + core.counters.cascades_dropped["disk"] == 7
    assert core.counters.cascades_dropped["disk"] >= 3
    assert not core.manager.has_pending_changes


def test_a_tier_that_does_not_keep_up_has_a_short_queue() -> None:
    """Promise 6: chunks that wait for a hung tier are remembered only as far as the host tier can still hold them."""
    core = make_core(slots=4, tiers=[disk(queue=1)])
    for i in range(100):
        core.put(run(i, 1))
        core.manager.take_ops()
    assert len(core.lower[0].write_queue) <= 4
    assert core.counters.cascades_dropped["disk"] >= 90


def test_an_unusable_tier_gets_nothing() -> None:
    """Its chunks are dropped and counted, also those that waited when it broke; afterwards it gets chunks again."""
    core = make_core(tiers=[disk(queue=1)])
    core.put(run(0, 3))
    write = only(core, Verb.WRITE)
    core.manager.on_completion(TierHealth(0, usable=False))
    core.finish(write, OutcomeKind.REFUSED)
    core.put(run(5, 1))
    assert not core.manager.take_ops()
    assert core.counters.cascades_dropped == {"disk": 3}
    assert not core.manager.has_pending_changes
    core.manager.on_completion(TierHealth(0, usable=True))
    core.put(run(6, 1))
    assert only(core, Verb.WRITE).keys == tuple(run(6, 1))


@pytest.mark.parametrize("kind", GONE_WRONG)
def test_a_write_that_fails(kind: OutcomeKind) -> None:
    """The tier does not have the chunk, its neighbour in the batch it has; slots and reserved bytes come back."""
    core = make_core(tiers=[replace(disk(frames=10), capabilities=replace(DISK, keeps_ranks=True))])
    keys = run(0, 2)
    core.put(keys)
    for key, rank in zip(keys, ranks_of("a", (1, 2)), strict=True):
        core.host.slots.ranks[core.host.slots.find(key) or 0] = rank
    write = only(core, Verb.WRITE)
    assert core.lower[0].residency.reserved_bytes == 2 * FRAME_BYTES
    core.finish(write, [kind if key == keys[0] else OutcomeKind.OK for key in write.keys])
    assert [core.lower[0].presence(key, 0.0) for key in keys] == [LookupResult.MISS, LookupResult.HIT]
    rows, stored = core.lower[0].residency.rows, write.keys.index(keys[1])
    assert rows.written.at(rows.row_of(keys[1])) == write.ranks[stored] != write.ranks[1 - stored]
    assert core.counters.writes_failed == {"disk": 1}
    if kind is not OutcomeKind.REFUSED:  # the tier may contain it all the same: see the next test
        core.finish(only(core, Verb.DELETE))
    assert core.lower[0].residency.reserved_bytes == 0
    assert core.host.room == core.host.num_slots
    assert core.ready() == set(keys)


@pytest.mark.parametrize("kind", [OutcomeKind.FAILED, OutcomeKind.TIMED_OUT])
def test_a_write_that_failed_may_lie_there_all_the_same(kind: OutcomeKind) -> None:
    """The reply of the write was lost or late. Until the deletion is confirmed the bytes count, and the chunk is
    neither read nor written. A deletion that fails is retried. Otherwise frames outside the account would exceed the
    capacity."""
    core = make_core(tiers=[disk(frames=1)])
    first, second = run(0, 2)
    core.put([first])
    core.finish(only(core, Verb.WRITE), kind)
    core.put([second])
    deletion = only(core, Verb.DELETE)
    assert deletion.keys == (first,)
    assert core.manager.lookup(second, WHO) is LookupResult.HIT
    core.finish(deletion, OutcomeKind.FAILED)
    assert not ops(core, Verb.DELETE), "not again at once, and there is no room for the other chunk"
    assert core.lower[0].presence(first, 0.0) is LookupResult.MISS
    core.manager.validate()
    core.begin(6.0)
    core.finish(only(core, Verb.DELETE))
    assert only(core, Verb.WRITE).keys == (second,)
    assert not [event for event in core.manager.take_events() if event.tier == "disk"]
    core.manager.validate()


def test_a_failed_write_to_a_shared_tier_is_not_followed_up() -> None:
    """Its room is not ours to keep, and another engine may have written the same chunk well."""
    core = make_core(tiers=[objects()])
    core.put(run(0, 1))
    core.finish(only(core, Verb.WRITE), OutcomeKind.FAILED)
    assert not core.manager.take_ops()


def test_the_place_itself_is_full() -> None:
    """The disk has less room than its configured capacity: each refusal deletes one chunk, oldest first, and counts."""
    core = make_core(tiers=[disk()])
    core.keep_below(run(0, 2))
    core.put(run(5, 1))
    core.finish(only(core, Verb.WRITE), OutcomeKind.NO_SPACE)
    delete = only(core, Verb.DELETE)
    assert delete.keys == tuple(run(0, 1))
    core.finish(delete)
    assert core.lower[0].presence(run(0, 1)[0], 0.0) is LookupResult.MISS
    assert core.counters.evictions == {"disk": 1}
    assert CacheEvent(CacheEventKind.REMOVED, "disk", tuple(run(0, 1))) in core.manager.take_events()


def test_a_full_place_is_evicted_from_in_time() -> None:
    """After two refusals the tier knows its room: the next chunk waits for a deletion, and is not refused again."""
    core = make_core(tiers=[disk()])
    core.keep_below(run(0, 10))
    for number, now in ((20, 0.0), (21, 1.0)):
        core.begin(now)
        core.put(run(number, 1))
        core.finish(only(core, Verb.WRITE), OutcomeKind.NO_SPACE)
        core.finish(only(core, Verb.DELETE))
    assert core.lower[0].residency.capacity_bytes == 9 * FRAME_BYTES
    core.put(run(30, 4))
    while ops := core.manager.take_ops():
        for op in ops:
            core.finish(op)
            assert core.lower[0].residency.used_bytes <= 9 * FRAME_BYTES
    assert core.counters.writes_failed == {"disk": 2}
    assert all(core.lower[0].presence(key, 0.0) is LookupResult.HIT for key in run(30, 4))
    core.manager.validate()


def test_capacity_is_never_exceeded() -> None:
    """Room is made before anything is written: the deletion goes out, the write waits for it; at no time do bytes at
    rest and bytes under way exceed the capacity."""
    core = make_core(tiers=[disk(frames=2)])
    core.keep_below(run(0, 2))
    core.put(run(5, 1))
    delete = only(core, Verb.DELETE)
    assert delete.keys == tuple(run(0, 1))
    assert not core.manager.take_ops()
    core.finish(delete)
    core.finish(only(core, Verb.WRITE))
    core.manager.validate()
    assert core.lower[0].residency.used_bytes == 2 * FRAME_BYTES


def test_compressed_frames_do_not_stop_a_small_tier() -> None:
    """Frames at rest are smaller than their bound: a tier that is neither full nor has room for one more frame of the
    largest size must still go on, by evicting."""
    core = make_core(tiers=[disk(frames=2)])
    core.lower[0].load_index(content_of([(key, FRAME_BYTES * 7 // 10) for key in run(0, 2)]))
    core.put(run(5, 1))
    written = [op for op in core.finish_all() if op.verb is Verb.WRITE]
    assert [op.keys for op in written] == [tuple(run(5, 1))]


def test_a_frame_that_can_never_fit() -> None:
    """It is dropped and counted, and evicts no other chunk."""
    core = make_core(tiers=[disk(frames=1)])
    core.keep_below(run(0, 1))
    chunk_bytes = 3 * FRAME_BYTES
    core.manager._tier_io.cascades.sizes = ChunkSizes([chunk_bytes])
    core.put(run(5, 1))
    assert not core.manager.take_ops()
    assert core.counters.cascades_dropped == {"disk": 1}
    assert core.lower[0].presence(run(0, 1)[0], 0.0) is LookupResult.HIT


def test_a_corrupt_frame_is_deleted_so_that_it_can_be_written_again() -> None:
    """Found bad, counted, absent from that moment; the deletion frees its place, and the next store writes it anew."""
    core = make_core(tiers=[disk()])
    (key,) = run(0, 1)
    core.keep_below([key])
    core.finish(read_one(core), OutcomeKind.CORRUPT)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS
    assert core.counters.chunks_corrupt == {"disk": 1}
    core.finish(only(core, Verb.DELETE))
    core.put([key])
    core.finish(only(core, Verb.WRITE))
    assert core.lower[0].presence(key, 0.0) is LookupResult.HIT


def test_a_corrupt_frame_that_cannot_be_deleted() -> None:
    """A read-only tier keeps its bad frame: it is left alone for a while instead of being read again every step."""
    frozen = Capabilities(shared=True, read_only=True, bounded=False)
    core = make_core(tiers=[TierSpec("frozen", frozen, LowerTierLimits(None, WritePolicy.READ_ONLY, 1))])
    (key,) = run(0, 1)
    core.lower[0].probed(key, 0.0, present=True)
    core.finish(read_one(core), OutcomeKind.CORRUPT)
    core.finish(only(core, Verb.DELETE), OutcomeKind.FAILED)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS
    core.begin(4.9)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS


def test_a_chunk_deleted_behind_our_back() -> None:
    """A read that finds nothing corrects the index: the false hit is not repeated, and an event is reported."""
    core = make_core(tiers=[disk()])
    (key,) = run(0, 1)
    core.keep_below([key])
    core.finish(read_one(core), OutcomeKind.ABSENT)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS
    assert core.lower[0].residency.used_bytes == 0
    assert CacheEvent(CacheEventKind.REMOVED, "disk", (key,)) in core.manager.take_events()


@pytest.mark.parametrize("kind", [k for k in OutcomeKind if k not in ANSWERS])
def test_a_probe_that_fails_is_a_no(kind: OutcomeKind) -> None:
    """A tier that cannot say counts as one that has nothing, for a short while: no lookup hangs on it."""
    core = make_core(tiers=[objects()])
    (key,) = run(0, 1)
    core.manager.lookup(key, WHO)
    core.finish(only(core, Verb.PROBE), kind)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS


def test_all_shared_tiers_are_asked_at_once() -> None:
    """Two shared tiers cost one round, not two; what the nearer one lacks is fetched from the farther one."""
    core = make_core(tiers=[objects(name="near"), objects(name="far")])
    (key,) = run(0, 1)
    assert core.manager.lookup(key, WHO) is LookupResult.RETRY
    near, far = ops(core, Verb.PROBE)
    core.finish(near, OutcomeKind.ABSENT)
    assert core.manager.lookup(key, WHO) is LookupResult.RETRY
    core.finish(far)
    assert core.manager.lookup(key, WHO) is LookupResult.HIT
    core.manager.passages.reserve(WHO.request_id, (key,), WHO.hints)
    assert only(core, Verb.READ).tier == 1


def test_news_of_unknown_instructions_is_ignored() -> None:
    """A second completion of an instruction, or one of an unknown instruction, changes nothing."""
    core = make_core(tiers=[disk()])
    core.put(run(0, 1))
    write = only(core, Verb.WRITE)
    core.finish(write)
    core.finish(write)
    core.manager.on_completion(Completion(12345, (Outcome(OutcomeKind.OK),)))
    core.manager.validate()
    assert core.counters.cascades == {"disk": 1}


def test_a_promoted_chunk_that_nobody_wants_any_more() -> None:
    """Its reader went away: the chunk arrives, is readable and evictable, and cascades like any other."""
    core = make_core(tiers=[disk(name="fast"), disk(name="slow")])
    core.keep_below(run(0, 1), tier=1)
    core.manager.passages.reserve(WHO.request_id, tuple(run(0, 1)), WHO.hints)
    core.manager.passages.release(WHO.request_id)
    core.finish_all()
    assert core.ready() == set(run(0, 1))
    assert core.host.room == core.host.num_slots
    assert core.counters.cascades == {"fast": 1}


def test_a_chunk_that_is_dropped_while_it_is_written() -> None:
    """A reset makes it invisible; the write ends on memory that is still its own, and the tier has the chunk."""
    core = make_core(slots=1, tiers=[disk()])
    core.put(run(0, 1))
    write = only(core, Verb.WRITE)
    core.manager.reset_cache()
    owner = core.host.slots.owner(write.slots[0])
    assert owner is not None
    assert owner.state is ChunkState.DOOMED
    core.finish(write)
    assert core.host.slots.owner(write.slots[0]) is None
    assert core.manager.lookup(run(0, 1)[0], WHO) is LookupResult.HIT


def test_probes_are_bounded() -> None:
    """A long prompt probes a shared tier for a bounded number of keys at a time, as many times at once as suits it."""
    core = make_core(tiers=[with_limits(objects(), probe_keys_max=4)])
    keys = run(0, 10)
    for key in keys:
        core.manager.lookup(key, WHO)
    assert [op.keys for op in ops(core, Verb.PROBE)] == [tuple(keys[:4]), tuple(keys[4:8])]


def test_what_a_tier_was_not_asked_for_is_asked_again() -> None:
    """A key that no call to the backend included before the deadline is not absent. The next probe begins with it,
    and the answers of the same probe count."""
    core = make_core(tiers=[with_limits(objects(), concurrency=1)])
    keys = run(0, 4)
    for key in keys:
        core.manager.lookup(key, WHO)
    probe = only(core, Verb.PROBE)
    core.manager.lookup(run(9, 1)[0], WHO)
    kinds = (OutcomeKind.OK, OutcomeKind.TIMED_OUT, OutcomeKind.REFUSED, OutcomeKind.REFUSED)
    late = Completion(probe.op_id, tuple(map(Outcome, kinds)), ended=False, elapsed_s=2.0)
    core.manager.on_completion(late)
    hit, miss, retry = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
    assert [core.manager.lookup(key, WHO) for key in keys] == [hit, miss, retry, retry]
    assert only(core, Verb.PROBE).keys == (*keys[2:], *run(9, 1))
    core.manager.on_completion(Completion(probe.op_id, tuple(map(Outcome, kinds))))
    assert core.manager.take_ops() == [], "the late end of a probe is no place for another one"


def test_keys_that_wait_behind_a_tier_that_hangs_become_misses() -> None:
    """No thread of the tier takes the probe before its deadline, and the tier answers nothing else meanwhile. Asking
    again would defer the request for as long as the tier hangs."""
    core = make_core(tiers=[with_limits(objects(), probe_deadline_s=2.0)])
    (key,) = run(0, 1)
    core.manager.lookup(key, WHO)
    probe = only(core, Verb.PROBE)
    core.begin(2.0)
    core.finish(probe, OutcomeKind.REFUSED, elapsed_s=2.0)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS
    assert core.manager.take_ops() == []


def test_a_probe_that_hangs_does_not_stop_the_others() -> None:
    """One of two probes hangs. Those who asked later are served through the other one, and the hanging one ends at its
    deadline."""
    core = make_core(tiers=[with_limits(objects(), concurrency=2, probe_keys_max=4)])
    keys = run(0, 16)
    for key in keys:
        core.manager.lookup(key, WHO)
    hanging, probe = ops(core, Verb.PROBE)
    for start in (4, 8, 12):
        assert probe.keys == tuple(keys[start : start + 4])
        core.finish(probe)
        if start < 12:
            probe = only(core, Verb.PROBE)
    expected = [LookupResult.RETRY] * 4 + [LookupResult.HIT] * 12
    assert [core.manager.lookup(key, WHO) for key in keys] == expected
    late = (Outcome(OutcomeKind.TIMED_OUT),) * 4
    core.manager.on_completion(Completion(hanging.op_id, late, ended=False, elapsed_s=2.0))
    assert [core.manager.lookup(key, WHO) for key in keys[:4]] == [LookupResult.MISS] * 4


def test_probes_wait_for_no_tier_that_is_out_of_service() -> None:
    """The queue of a tier that fails is emptied: its chunks are misses, and old questions are not asked later."""
    core = make_core(tiers=[with_limits(objects(), concurrency=1, probe_keys_max=4)])
    for key in run(0, 10):
        core.manager.lookup(key, WHO)
    probe = only(core, Verb.PROBE)
    core.manager.on_completion(TierHealth(0, usable=False))
    assert len(core.lower[0].probes) == len(probe.keys)
    core.finish(probe, OutcomeKind.REFUSED)
    core.manager.on_completion(TierHealth(0, usable=True))
    assert core.manager.take_ops() == []
    assert core.lower[0].is_quiet


@pytest.mark.parametrize(("raw", "bound"), [(1, 8192), (4096, 8192), (4097, 12288)])
def test_frame_bound(raw: int, bound: int) -> None:
    """A header page, and the payload in whole pages (decision 3)."""
    assert frame_bytes_bound(raw) == bound


def test_what_has_no_room_beside_its_own_batch_waits_for_it() -> None:
    """Three chunks for a tier of two: the third finds no room that could come about but by the two, which are written
    in the same step. It waits for them; dropped, it would be lost below, though the next step could write it."""
    core = make_core(tiers=[disk(frames=2)])
    core.put(run(0, 3))
    (write,) = core.manager.take_ops()
    assert len(write.keys) == 2
    assert core.counters.cascades_dropped == {}
    core.finish(write)
    written = [key for op in core.finish_all() if op.verb is Verb.WRITE for key in op.keys]
    assert len(written) == 1
    assert core.counters.cascades_dropped == {}


def test_a_chunk_that_waits_twice_is_written_once() -> None:
    """Nothing keeps the queue of a tier that is written through from naming a chunk twice; counted twice, its bytes
    would stay on the tier's account for ever."""
    core = make_core(tiers=[disk(frames=4)])
    (key,) = run(0, 1)
    core.put([key])
    (tier,) = core.manager.tiers
    tier.write_queue.extend([tier.write_queue.front()])
    (write,) = core.manager.take_ops()
    assert write.keys == (key,)
    core.finish(write)
    core.manager.validate()
    assert tier.residency.reserved_bytes == 0


def dropped(core: Core, numbers: tuple[int, ...]) -> None:
    """Drop chunks that wait to be written."""
    slots = core.host.slots.find_all([run(0, 8)[number] for number in numbers])
    core.host.drop([slot for slot in slots if slot is not None])


@pytest.mark.parametrize("gone", [(), (0,), (3, 7), (0, 1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("frames", [None, 5])
def test_chunks_are_written_together_as_one_by_one(
    gone: tuple[int, ...], frames: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue is taken whole if all of it can be written. Otherwise each chunk is judged by itself."""

    def taken() -> tuple[list[Key], int, int]:
        core = make_core(tiers=[disk(frames=frames)])
        core.put(run(0, 8))
        dropped(core, gone)
        writes = [key for op in core.manager.take_ops() for key in op.keys]
        core.manager.validate()
        (tier,) = core.lower
        return writes, len(tier.write_queue), sum(core.counters.cascades_dropped.values())

    together = taken()
    monkeypatch.setattr(Cascades, "_all_of", lambda *_: None)
    assert together == taken()
    assert set(together[0]).isdisjoint(run(0, 8)[number] for number in gone)


def test_chunks_that_are_all_due_are_looked_up_together() -> None:
    """Promise 2: one by one, each chunk of a store took twenty calls on its way to the tier."""

    def calls(chunks: int) -> int:
        core = make_core(slots=64, tiers=[disk(queue=64)])
        core.put(run(0, chunks))
        return calls_of(core.manager._tier_io.cascades.take_writable, core.lower[0], core.now)

    assert calls(32) - calls(16) < 4 * 16


def test_a_promoted_prefix_is_accepted_again() -> None:
    """A tier evicted a tail, and refuses what continues it. Read from another tier, the tail serves a request again."""
    core = make_core(slots=8, tiers=[disk(name="first"), disk(name="second")])
    keys, ranks = run(0, 4), ranks_of("a", range(1, 5))
    first, second = (tier.residency for tier in core.lower)
    first.add(content_of([(key, FRAME_BYTES) for key in keys[:3]]), ranks[:3])
    assert first.evict(1) == [keys[2]]
    assert first.listed.order.is_cut(ranks[3])
    second.add(content_of([(key, FRAME_BYTES) for key in keys]), ranks)
    slots = core.manager._tier_io.promote(keys[3:], core.lower[1])
    assert slots is not None
    assert core.host.slots.ranks[slots[0]] == ranks[3]
    assert not first.listed.order.is_cut(ranks[3])


def test_a_reset_waits_for_the_content_of_a_tier_that_could_not_list_it() -> None:
    """The scan of a disk failed when the stack opened. A reset must not end before the disk's earlier chunks are known
    and deleted: they would stay for ever, and the next process would find them."""
    core = make_core(tiers=[disk()])
    (tier,) = core.lower
    earlier, later = run(0, 3), run(10, 1)
    tier.knows_content = False
    core.manager.on_completion(TierHealth(0, usable=False))
    core.manager.reset_cache("all")
    core.manager.take_events()
    for _ in range(3):
        core.begin()
        assert core.manager.take_ops() == []
        assert tier.phase.emptying
    core.manager.on_completion(TierListing(0, content_of([(key, FRAME_BYTES) for key in earlier[:2]]), is_last=False))
    core.manager.on_completion(TierListing(0, content_of([(earlier[2], FRAME_BYTES)]), is_last=True))
    core.manager.on_completion(TierHealth(0, usable=True))
    assert [core.manager.lookup(key, WHO) for key in earlier] == [LookupResult.MISS] * 3
    core.begin()
    deletion = only(core, Verb.DELETE)
    assert sorted(deletion.keys) == sorted(earlier)
    core.finish(deletion)
    core.begin()
    core.manager.take_ops()
    assert not tier.phase.emptying
    assert core.manager.take_events() == []
    core.put(later)
    core.finish_all()
    assert set(tier.residency) == set(later)
    core.manager.validate()


def test_content_that_is_listed_late_is_found_and_reported() -> None:
    """A disk that was not ready at open serves what it holds as soon as it is: a hit is not lost until a restart."""
    core = make_core(tiers=[disk()])
    (tier,) = core.lower
    tier.knows_content = False
    core.manager.on_completion(TierHealth(0, usable=False))
    keys = run(0, 2)
    core.manager.on_completion(TierListing(0, content_of([(key, FRAME_BYTES) for key in keys]), is_last=True))
    assert core.manager.lookup(keys[0], WHO) is LookupResult.MISS
    core.manager.on_completion(TierHealth(0, usable=True))
    assert [core.manager.lookup(key, WHO) for key in keys] == [LookupResult.HIT] * 2
    assert core.manager.take_events() == [CacheEvent(CacheEventKind.STORED, "disk", tuple(keys))]
    assert tier.residency.used_bytes == 2 * FRAME_BYTES


@pytest.mark.parametrize("kind", [OutcomeKind.FAILED, OutcomeKind.NO_SPACE])
def test_a_full_tier_that_cannot_evict_is_read_as_before(kind: OutcomeKind) -> None:
    """A disk at its capacity turned read-only. Each store evicted further chunks without effect, and they counted as
    absent for five seconds: within a second the tier had no hits, for as long as the disk was read-only."""
    core = make_core(tiers=[disk(frames=20)])
    kept = run(0, 20)
    core.keep_below(kept)
    evicted = []
    for step in range(40):
        core.begin(0.1 * step)
        core.put(run(100 + step, 1))
        for op in ops(core, Verb.DELETE):
            evicted.append(len(op.keys))
            core.finish(op, kind)
        assert all(core.lower[0].presence(key, core.now) is LookupResult.HIT for key in kept)
        core.manager.validate()
    assert evicted[-3:] == [1, 1, 1], "one chunk per second is a trial"
    assert len(evicted) == 5, "and two batches before the first failure was known"
    core.begin(4.0 + EVICTION_PAUSE_S)
    core.put(run(200, 1))
    core.finish(only(core, Verb.DELETE))
    more = core.manager.take_ops()
    assert {op.verb for op in more} == {Verb.WRITE, Verb.DELETE}, "evictions go on as soon as one succeeds"
    assert sum(len(op.keys) for op in more if op.verb is Verb.DELETE) > 1


@pytest.mark.parametrize("kind", [OutcomeKind.FAILED, OutcomeKind.NO_SPACE])
def test_chunks_over_a_quota_are_read_as_before_where_they_cannot_be_deleted(kind: OutcomeKind) -> None:
    """A quota was made smaller, and the storage deletes nothing. Up to 256 chunks were to be deleted in
    each step, and were absent meanwhile: of a tenant far over its quota, nearly all."""
    quotas = Quotas(1 << 20, 5 * FRAME_BYTES)
    core = make_core(tiers=[disk(frames=100)], lower_policy=lambda: TenantPolicy(LruPolicy, quotas, FRAME_BYTES))
    (tier,) = core.lower
    kept = run(0, 40)
    core.keep_below(kept)
    for step in range(40):
        core.begin(0.1 * step)
        deletions = ops(core, Verb.DELETE)
        assert sum(len(op.keys) for op in deletions) in ((35,) if not step else (0, 1)), "one per second is a trial"
        for op in deletions:
            core.finish(op, kind)
        assert all(tier.presence(key, core.now) is LookupResult.HIT for key in kept)
        core.manager.validate()
    core.begin(4.0 + EVICTION_PAUSE_S)
    (trial,) = ops(core, Verb.DELETE)
    core.begin(4.0 + 3 * EVICTION_PAUSE_S)
    assert not core.manager.take_ops(), "a trial that hangs is the only one"
    core.finish(trial)
    core.begin()
    core.finish_all()
    assert len(tier.residency) == 5
