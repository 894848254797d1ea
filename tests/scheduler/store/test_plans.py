"""Store plans: chunks offered immediately, a step later, or when their blocks are about to be reused."""

from __future__ import annotations

from typing import get_args

import pytest
from core_blocks import BedBlock, blocks
from core_parts import Core, disk, make_core
from core_truth import BedRequest
from group_parts import full, ssm, window
from hypothesis import given
from hypothesis import strategies as st
from store_parts import FreeQueue, chunk_indices, computed_blocks, lazy_core, only_store

from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.manager.contract import RequestContext
from tierkv.scheduler.limits import SchedulerLimits, StorePlanName, StorePolicy
from tierkv.scheduler.store.lazy import target_free
from tierkv.types.engine import ScheduledRequest, StepOutput
from tierkv.types.transfers import NO_REQUEST, ConnectorMeta, TransferJob

PLANS: tuple[StorePlanName, ...] = get_args(StorePlanName)


def planned_core(plan: StorePlanName, slots: int = 64, **limits: object) -> tuple[Core, FreeQueue]:
    """Core with a plan; the queue of free blocks is registered for every plan."""
    core = make_core(slots=slots, limits=SchedulerLimits(store_plan=plan, **limits))  # type: ignore[arg-type]
    queue = FreeQueue()
    core.scheduler.register_free_queue(queue, 1000)
    return core, queue


def empty_step(core: Core) -> ConnectorMeta:
    """Step in which nothing is computed."""
    return core.scheduler.build_connector_meta(StepOutput())


def live_through(core: Core, queue: FreeQueue, request: BedRequest, new_tokens: int = 0) -> list[TransferJob]:
    """Compute a prompt in one step and some tokens one by one, and end the request; its blocks join the queue.

    Returns all of its store jobs; each is reported in its step.
    """
    jobs: list[TransferJob] = []

    def take(meta: ConnectorMeta) -> None:
        jobs.extend(meta.stores)
        core.report(*(job.job_id for job in meta.stores))

    ids = list(range(1, (request.num_tokens + new_tokens) // 4 + 2))
    take(core.schedule(request, computed=0, scheduled=request.num_tokens, ids=[ids]))
    for token in range(new_tokens):
        request.extend([900 + token])
        if token < new_tokens - 1:
            take(core.schedule(request, computed=request.num_tokens - 1, scheduled=1, ids=[[]], whole=False))
    core.scheduler.request_finished(request, [ids])
    whole = [block for block in zip(ids, request.block_hashes, strict=False) if block[1]]
    queue.free(*(BedBlock(block_id, block_hash) for block_id, block_hash in reversed(whole)))
    take(empty_step(core))
    return jobs


# -- all plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_s65_every_plan_stores_each_chunk_once(plan: StorePlanName) -> None:
    """S65, S77: prompt and generated tokens, up to the last computed one: once each, from their own blocks."""
    core, queue = planned_core(plan)
    request = core.arrive(10)
    jobs = live_through(core, queue, request, new_tokens=7)
    stored = [pair for job in jobs for pair in zip(job.keys, job.block_ids, strict=True)]
    assert sorted(stored, key=lambda pair: pair[1]) == list(zip(core.truth.keys(request), range(1, 5), strict=True))
    assert not core.scheduler._records
    assert not core.scheduler.has_pending_work


@pytest.mark.parametrize("plan", PLANS)
def test_s66_prompt_only_under_every_plan(plan: StorePlanName) -> None:
    """S66: chunks with a generated token are never stored, not at the end of the request either."""
    core, queue = planned_core(plan, prompt_only=True)
    request = core.arrive(10)
    live_through(core, queue, request, new_tokens=12)
    assert core.ready() == set(core.truth.keys(request)[:2])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("cap", "chunks"), [(0, 0), (11, 2), (100, 5)])
def test_s67_max_offload_tokens_under_every_plan(plan: StorePlanName, cap: int, chunks: int) -> None:
    """S67: chunks excluded by the user are not stored, though their blocks are in the queue."""
    core, queue = planned_core(plan)
    request = core.arrive(20, max_offload_tokens=cap)
    live_through(core, queue, request)
    assert core.ready() == set(core.truth.keys(request)[:chunks])


def loaded(core: Core, request: BedRequest, ids: list[int]) -> None:
    """Load the request's whole prefix into these blocks."""
    core.put(core.truth.keys(request))
    tokens = core.ask(request)
    assert tokens
    core.scheduler.update_state_after_alloc(request, [blocks(ids)], tokens)
    (load,) = empty_step(core).loads
    core.report(load.job_id)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("params", "default", "again"),
    [
        pytest.param({}, StorePolicy.BLOCK_LEVEL, False, id="block-level"),
        pytest.param({}, StorePolicy.REQUEST_LEVEL, True, id="request-level"),
        pytest.param({"do_remote_decode": True}, StorePolicy.BLOCK_LEVEL, True, id="remote-decode"),
        pytest.param({"do_remote_decode": "yes"}, StorePolicy.BLOCK_LEVEL, False, id="not-a-bool"),
        pytest.param({"do_remote_decode": False}, StorePolicy.REQUEST_LEVEL, True, id="says-nothing"),
    ],
)
def test_s61_policy(plan: StorePlanName, params: dict[str, object], default: StorePolicy, again: bool) -> None:
    """S61: BLOCK_LEVEL does not store loaded chunks; REQUEST_LEVEL keeps the cursor at 0, and offers them again.

    Chunks that the host tier has lost meanwhile are stored, present ones cost nothing.
    """
    core, queue = planned_core(plan, store_policy=default)
    request = core.arrive(12, **params)
    loaded(core, request, [1, 2, 3])
    record = core.record(request)
    assert record.store_policy is (StorePolicy.REQUEST_LEVEL if again else StorePolicy.BLOCK_LEVEL)
    assert record.groups[0].next_stored == (0 if again else 3)
    core.manager.reset_cache()
    request.extend(range(4))
    meta = core.schedule(request, computed=11, scheduled=5, ids=[[1, 2, 3, 4]])
    core.scheduler.request_finished(request, [])
    queue.free(*computed_blocks(request, [1, 2, 3, 4]))
    jobs = [*meta.stores, *empty_step(core).stores]
    stored = {key for job in jobs for key in job.keys}
    # The last token is not computed when a request ends, so only a running step could store the fourth chunk.
    assert stored - {core.truth.keys(request)[3]} == (set(core.truth.keys(request)[:3]) if again else set())


@pytest.mark.parametrize("plan", PLANS)
def test_s120_two_workers_in_any_order(plan: StorePlanName) -> None:
    """S120: a store ends with the second worker's report, and stores end in any order."""
    core, queue = planned_core(plan, num_workers=2)
    jobs = []
    for i, name in enumerate("ab"):
        request = core.arrive(range(100 * i, 100 * i + 8), name)
        ids = [2 * i + 1, 2 * i + 2]
        jobs += core.schedule(request, computed=0, scheduled=8, ids=[ids]).stores
        core.scheduler.request_finished(request, [])
        queue.free(*computed_blocks(request, ids))
        jobs += empty_step(core).stores
    first, second = jobs
    core.report(second.job_id)
    core.report(first.job_id)
    assert not core.ready()
    core.report(second.job_id)
    assert core.ready() == set(second.keys)
    core.report(first.job_id)
    assert core.ready() == {*first.keys, *second.keys}
    assert not core.scheduler.has_pending_work
    assert not len(core.scheduler._fences)


@pytest.mark.parametrize("plan", PLANS)
def test_s122_reset_with_running_copies(plan: StorePlanName) -> None:
    """S122: slots and fences stay until the report, stale data is not cached, counters never decrease.

    Chunks computed after the reset are stored as if for the first time. (The lineage counts references of blocks; here
    slots are held, and blocks fenced.)
    """
    core, queue = planned_core(plan, slots=8)
    request = core.arrive(8)
    jobs = [*core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]).stores]
    core.scheduler.request_finished(request, [])
    queue.free(*computed_blocks(request, [2, 1][::-1]))
    jobs += empty_step(core).stores
    before = core.counters.as_dict()
    core.scheduler.reset_cache()
    (job,) = jobs
    assert core.host.room == 6
    assert core.scheduler._fences.jobs_fencing([1, 2]) == {job.job_id}
    meta = empty_step(core)
    assert job.job_id in meta.jobs_to_flush
    core.report(job.job_id, *(again.job_id for again in meta.stores))
    assert core.ready() == {key for again in meta.stores for key in again.keys}
    assert bool(meta.stores) == (plan == "lazy"), "its blocks are still in the queue, so they are stored again"
    assert core.host.room == 8
    assert not core.scheduler.has_pending_work
    after = core.counters.as_dict()
    assert all(after[name] >= value for name, value in before.items() if isinstance(value, int))


# -- eager -----------------------------------------------------------------------------------------------------------


def test_eager_waits_until_tokens_are_certain() -> None:
    """Section 17: blocks of the running step wait one step.

    Tokens that an earlier step is still computing wait for its result.
    """
    core, _ = planned_core("eager")
    request = core.arrive(20)
    assert not core.schedule(request, computed=0, scheduled=8, ids=[[1, 2, 3, 4, 5]]).stores
    meta = core.schedule(request, computed=8, scheduled=8, ids=[[]], whole=False)
    assert chunk_indices(core, request, meta) == [0, 1]
    entry = ScheduledRequest("a", 16, 4, ((),), num_placeholder_tokens=1)
    meta = core.scheduler.build_connector_meta(StepOutput((entry,)))
    assert chunk_indices(core, request, meta) == [2]
    core.scheduler.request_finished(request, [])
    assert chunk_indices(core, request, empty_step(core)) == [3, 4]


def test_d5_eager_stores_the_last_chunk_of_a_finished_request() -> None:
    """D5, S77: the step that completes a chunk is the last one of the request: its end offers the chunk."""
    core, _ = planned_core("eager")
    request = core.arrive(8)
    assert not core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]).stores
    request.extend([1])
    core.scheduler.request_finished(request, [[1, 2]])
    other = core.arrive(range(50, 54), "b")
    meta = core.schedule(other, computed=0, scheduled=4, ids=[[2]])
    last = only_store(meta)
    assert (last.keys, last.block_ids) == (tuple(core.truth.keys(request)), (1, 2))
    assert meta.jobs_to_flush == {last.job_id}, "its blocks are fenced at once"


def test_s77_a_token_that_was_sampled_last_is_not_computed() -> None:
    """S77: async scheduling schedules more tokens than exist; at the end the last one has no KV."""
    for plan in ("immediate", "eager"):
        core, _ = planned_core(plan)
        request = core.arrive(6)
        core.schedule(request, computed=0, scheduled=6, ids=[[1, 2]])
        entry = ScheduledRequest("a", 6, 2, ((),), num_placeholder_tokens=1)
        core.scheduler.build_connector_meta(StepOutput((entry,)))
        request.extend([1, 2])
        core.scheduler.request_finished(request, [])
        assert not empty_step(core).stores


def test_eager_forgets_the_table_of_a_preempted_request() -> None:
    """Section 17: chunks computed and not yet offered are lost with the blocks; they are not read later."""
    core, _ = planned_core("eager")
    request = core.arrive(16)
    core.schedule(request, computed=0, scheduled=12, ids=[[1, 2, 3]])
    assert not core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"}))).stores
    core.schedule(request, computed=0, scheduled=8, ids=[[7, 8]])
    assert only_store(core.schedule(request, computed=8, scheduled=4, ids=[[9]], whole=False)).block_ids == (7, 8)


def test_s117_a_block_that_two_requests_share() -> None:
    """S117: offered twice in one step, stored once."""
    core, _ = planned_core("eager")
    first, second = core.arrive(12), core.arrive(12, "b")
    core.schedule(first, computed=0, scheduled=12, ids=[[1, 2, 3]])
    entries = (
        ScheduledRequest("a", 12, 1, ((4,),)),
        ScheduledRequest("b", 8, 4, ((1, 2, 5),), replaces_table=True),
    )
    job = only_store(core.scheduler.build_connector_meta(StepOutput(entries)))
    assert job.block_ids == (1, 2, 3)
    assert core.record(second).groups[0].next_stored == 2
    assert core.record(first).groups[0].next_stored == 3


def test_s117_a_full_host_tier_stops_the_cursor() -> None:
    """S117: chunks that fit are stored, from the front; the others of the step wait, and continue exactly there."""
    core, _ = planned_core("eager", slots=16)
    others = core.request(range(1000, 1052), "others")
    held = core.manager.prepare_store([(key, 0) for key in core.truth.keys(others)], RequestContext("others"))
    assert held is not None
    assert core.host.room == 3
    first, second = core.arrive(16), core.arrive(range(100, 116), "b")
    core.schedule(first, computed=0, scheduled=16, ids=[[1, 2, 3, 4]])
    core.schedule(second, computed=0, scheduled=16, ids=[[5, 6, 7, 8]])
    entries = (ScheduledRequest("a", 16, 0, ((),)), ScheduledRequest("b", 16, 0, ((),)))
    job = only_store(core.scheduler.build_connector_meta(StepOutput(entries)))
    assert job.block_ids == (1, 2, 3)
    assert [core.record(request).groups[0].next_stored for request in (first, second)] == [3, 0]
    assert core.counters.stores_refused == 1, "the four together; two and one of them fit, and the second is not asked"
    core.report(job.job_id)
    core.manager.complete_store(held.slots)
    meta = core.scheduler.build_connector_meta(StepOutput(entries))
    assert [job.block_ids for job in meta.stores] == [(4,), (5, 6, 7, 8)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20))
def test_s117_no_gap_whatever_room_there_is(rooms: list[int]) -> None:
    """S117, I2: however room varies, each group's chunks are stored in order, without gaps, once."""
    core = make_core(block_tokens=(2, 4), hash_block_tokens=2, slots=64, limits=SchedulerLimits(store_plan="eager"))
    request = core.arrive(32)
    core.schedule(request, computed=0, scheduled=32, ids=[range(1, 17), range(21, 29)])
    stored: list[list[int]] = [[], []]
    for i, room in enumerate(rooms):
        taken = 64 - len(core.host) - room
        blocker = None
        if taken > 0:
            keys = core.truth.keys(core.request(range(1000 * (i + 1), 1000 * (i + 1) + 2 * taken), "x"))
            blocker = core.manager.prepare_store([(key, 0) for key in keys], RequestContext("x"))
        meta = core.schedule(request, computed=32, scheduled=0, ids=[[], []], whole=False)
        for group in range(2):
            stored[group] += chunk_indices(core, request, meta, group)
        if blocker is not None:
            core.manager.complete_store(blocker.slots, frozenset(blocker.keys))
    for group in range(2):
        assert stored[group] == list(range(len(stored[group])))
        assert core.record(request).groups[group].next_stored == len(stored[group])


# -- lazy ------------------------------------------------------------------------------------------------------------


def compute(core: Core, tokens: range, first_block: int, request_id: str, **params: object) -> list[BedBlock]:
    """Compute a request and end it. Returns its blocks, in order."""
    request = core.arrive(tokens, request_id, **params)
    ids = list(range(first_block, first_block + len(tokens) // 4))
    assert not core.schedule(request, computed=0, scheduled=len(tokens), ids=[ids]).stores
    core.scheduler.request_finished(request, [])
    return computed_blocks(request, ids)


def test_s118_only_what_is_near_eviction() -> None:
    """S118: at most target_free blocks are visited per step, from the head on; the next step continues there."""
    core, queue = lazy_core(max_batched_tokens=8)
    queue.free(*compute(core, range(40), 1, "a"))
    queue.asked = 0
    assert only_store(empty_step(core)).block_ids == (1, 2, 3, 4)
    assert queue.asked <= 4
    assert only_store(empty_step(core)).block_ids == (5, 6, 7, 8)
    assert only_store(empty_step(core)).block_ids == (9, 10)
    assert not empty_step(core).stores


def test_s118_blocks_without_content_are_visited_and_left() -> None:
    """S118: the null block, blocks without a hash, and content that no request computed are not stored.

    Also if the block was known with other content.
    """
    core, queue = lazy_core()
    good, reused = compute(core, range(8), 1, "a")
    stranger = core.request(range(70, 74), "stranger")
    queue.free(BedBlock(0, b"null", is_null=True), BedBlock(7), *computed_blocks(stranger, [reused.block_id]), good)
    assert only_store(empty_step(core)).block_ids == (1,)


def test_s118_content_that_was_overwritten_is_not_stored() -> None:
    """S118: a reused block has other content, even if the hash is the same (it may belong to another group).

    It is stored only when a request has computed it again.
    """
    core, queue = lazy_core()
    (block,) = compute(core, range(4), 1, "a")
    other = core.arrive(4, "b", max_offload_tokens=0)
    core.schedule(other, computed=0, scheduled=4, ids=[[1]])
    core.scheduler.request_finished(other, [])
    queue.free(block)
    assert not empty_step(core).stores
    queue.take(1)
    queue.free(*compute(core, range(4), 1, "c"))
    assert only_store(empty_step(core)).block_ids == (1,)


def test_s118_a_host_tier_that_is_full() -> None:
    """S118: chunks that fit are stored, and the cursor stops before the first that does not: it is next."""
    core, queue = lazy_core(max_batched_tokens=100, slots=32)
    others = core.request(range(1000, 1116), "others")
    held = core.manager.prepare_store([(key, 0) for key in core.truth.keys(others)], RequestContext("others"))
    assert held is not None
    queue.free(*compute(core, range(32), 1, "a"))
    assert only_store(empty_step(core)).block_ids == (1, 2, 3)
    assert not empty_step(core).stores
    core.manager.complete_store(held.slots)
    assert only_store(empty_step(core)).block_ids == (4, 5, 6, 7, 8)


def test_s118_the_bound_of_one_step_is_kept() -> None:
    """No more chunks in one step than are offered together; the rest follows without a gap."""
    core, queue = lazy_core(max_batched_tokens=100, store_chunks_per_step_max=3)
    queue.free(*compute(core, range(20), 1, "a"))
    assert [only_store(empty_step(core)).block_ids for _ in range(2)] == [(1, 2, 3), (4, 5)]


def test_lazy_keeps_what_the_request_said_about_its_chunks() -> None:
    """A free block belongs to no request any more, but the hints of its chunk still count.

    Tiers, TTL, and that the chunk is one-shot.
    """
    core, queue = lazy_core(max_batched_tokens=100, tiers=[disk(), disk(name="more")])
    said = [{"store": ["host", "disk"]}, {"one_shot": True}, {"ttl_s": 5.0}, None]
    requests, free = [], []
    for i, hints in enumerate(said):
        tokens = range(100 * i, 100 * i + 8)
        free += compute(core, tokens, 1 + 2 * i, f"r{i}", tierkv=hints)
        requests.append(core.request(tokens, f"again{i}"))
    queue.free(*free)
    core.report(only_store(empty_step(core)).job_id)
    written = {(core.lower[op.tier].name, key) for op in core.finish_all() for key in op.keys}
    keys = [core.truth.keys(request) for request in requests]
    kept = {key for _, key in written}
    assert {tier for tier, key in written if key in keys[0]} == {"disk"}
    assert kept.isdisjoint(keys[1])
    assert {tier for tier, key in written if key in keys[3]} == {"disk", "more"}
    core.begin(6.0)
    assert [core.ask(request) for request in requests] == [8, 8, 0, 8]


@pytest.mark.parametrize(
    ("first", "later", "stays"),
    [({"one_shot": True}, {}, True), ({}, {"one_shot": True}, True), ({"one_shot": True}, {"one_shot": True}, False)],
)
def test_lazy_a_chunk_of_two_requests_is_kept_for_the_one_that_wants_it(
    first: dict[str, object], later: dict[str, object], *, stays: bool
) -> None:
    """A use by a request that is not one-shot ends one-shot, also if the block was only shared on the GPU.

    Otherwise the order of two requests would decide the hits of a third one.
    """
    core, queue = lazy_core(max_batched_tokens=100, tiers=[disk()])
    compute(core, range(4), 1, "a", tierkv=first)
    again = core.arrive(range(8), "b", tierkv=later)
    core.schedule(again, computed=4, scheduled=4, ids=[[1, 2]])
    core.scheduler.request_finished(again, [])
    queue.free(*computed_blocks(again, [1, 2]))
    core.report(only_store(empty_step(core)).job_id)
    written = {key for op in core.finish_all() for key in op.keys}
    assert (core.truth.keys(again)[0] in written) == stays


def test_s118_cursor_in_use_again() -> None:
    """S118: the block at the cursor was taken: the walk restarts at the head, and stores only new chunks."""
    core, queue = lazy_core(max_batched_tokens=4)
    queue.free(*compute(core, range(16), 1, "a"))
    assert only_store(empty_step(core)).block_ids == (1, 2)
    queue.take(2)
    assert only_store(empty_step(core)).block_ids == (3,), "block 1 is visited again, which is one visit of two"
    assert only_store(empty_step(core)).block_ids == (4,)


def test_s118_cursor_queued_again() -> None:
    """S118: the block at the cursor was taken and freed: it is at the tail now.

    A walk from there would find nothing. (The lineage misses this.)
    """
    core, queue = lazy_core(max_batched_tokens=4)
    queue.free(*compute(core, range(16), 1, "a"))
    assert only_store(empty_step(core)).block_ids == (1, 2)
    queue.take(2)
    queue.free(*computed_blocks(core.request(8), [9, 2])[1:])
    assert only_store(empty_step(core)).block_ids == (3,)
    assert only_store(empty_step(core)).block_ids == (4,)


def test_s118_an_empty_queue() -> None:
    """S118: no block is free, then all were used, then one is free: no step fails."""
    core, queue = lazy_core()
    assert not empty_step(core).stores
    queue.free(*compute(core, range(4), 1, "a"))
    assert empty_step(core).stores
    queue.take(1)
    assert not empty_step(core).stores
    queue.free(*compute(core, range(50, 54), 1, "b"))
    assert empty_step(core).stores


def test_s118_a_chunk_in_two_blocks() -> None:
    """Two requests computed the same chunk at once: one of the blocks is stored."""
    core, queue = lazy_core()
    queue.free(*compute(core, range(4), 1, "a"), *compute(core, range(4), 2, "b"))
    assert only_store(empty_step(core)).block_ids == (1,)


def test_lazy_jobs_belong_to_no_request() -> None:
    """Their blocks are fenced at once: a request that gets one has its store flushed in the same step.

    Ids can be reused, and a failed job concerns no request.
    """
    core, queue = lazy_core()
    queue.free(*compute(core, range(8), 1, "a"))
    job = only_store(empty_step(core))
    assert (job.request_id, core.scheduler._records) == (NO_REQUEST, {})
    core.scheduler.validate()
    queue.take(2)
    other = core.arrive(range(50, 54), "a")
    assert core.schedule(other, computed=0, scheduled=4, ids=[[2]]).jobs_to_flush == {job.job_id}
    core.report(job.job_id, failed={job.job_id: frozenset({job.keys[0]})})
    assert core.ready() == {job.keys[1]}
    assert not len(core.scheduler._fences)


def test_s101_a_lazy_store_is_described_though_its_request_is_gone() -> None:
    """S101: the request ended long before its block was stored; the event has its tokens all the same."""
    core, queue = lazy_core()
    queue.free(*compute(core, range(8), 1, "a"))
    job = only_store(empty_step(core))
    core.report(job.job_id)
    described = core.block_events.describe(core.manager.take_events())
    assert [getattr(event, "token_ids", None) for event in described] == [(4, 5, 6, 7), (0, 1, 2, 3)]


def test_s81_a_lazy_store_with_no_request_left() -> None:
    """S81: no request is left, so possibly no step follows: chunks found in this step are flushed with it."""
    core, queue = lazy_core()
    queue.free(*compute(core, range(4), 1, "a"))
    meta = empty_step(core)
    assert meta.jobs_to_flush == {only_store(meta).job_id}


def test_s119_target_free() -> None:
    """S119: twice what a step can take: full attention ceil(100 / 16) = 7, window ceil(130 / 16) + 1 = 10, state 2."""
    core = make_core(groups=[full(16), window(130, 16), ssm(16)])
    assert target_free(core.geometry, 100) == 2 * (7 + 10 + 2)
    assert target_free(make_core(groups=[full(16)]).geometry, 96) == 2 * 6


def test_lazy_stores_windows_and_leaves_out_what_no_hit_ends_in() -> None:
    """S68 under the lazy plan: the filter applies there, too, and groups keep their order in the job."""
    core = make_core(groups=[full(16), window(4)], hash_block_tokens=4, limits=SchedulerLimits(store_plan="lazy"))
    queue = FreeQueue()
    core.scheduler.register_free_queue(queue, 64)
    request = core.arrive(32)
    ids = [[1, 2], list(range(11, 19))]
    core.schedule(request, computed=0, scheduled=32, ids=ids)
    core.scheduler.request_finished(request, [])
    queue.free(*(BedBlock(11 + i, request.block_hashes[i]) for i in range(8)))
    queue.free(*(BedBlock(1 + i, request.block_hashes[4 * i + 3]) for i in range(2)))
    job = only_store(empty_step(core))
    assert (job.block_ids, job.group_sizes) == ((1, 2, 14, 18), (2, 2))
    assert job.keys == (*core.truth.keys(request, 0), *core.truth.keys(request, 1)[3::4])


def test_lazy_needs_chunks_of_one_block() -> None:
    """Blocks of a larger chunk reach the head one by one; the message names key, reason and fix."""
    with pytest.raises(ConfigError, match=r'store.plan = "lazy" .* has 2 of them: set chunk.blocks = 1'):
        make_core(factor=2, limits=SchedulerLimits(store_plan="lazy"))


def test_lazy_needs_the_queue() -> None:
    """Without the queue nothing would ever be stored, for no visible reason."""
    core = make_core(limits=SchedulerLimits(store_plan="lazy"))
    with pytest.raises(EngineProtocolError, match="register_free_queue once"):
        empty_step(core)
