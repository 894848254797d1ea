"""Stores: chunks offered, their source blocks, and repeated offers (spec, section 10)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from core_blocks import blocks
from core_parts import Core, disk, make_core
from group_parts import window
from hypothesis import given
from hypothesis import strategies as st
from store_parts import chunk_indices, only_store

from tierkv.manager.contract import RequestContext, StoreGrant
from tierkv.scheduler.limits import FINAL_PASSES_MAX, SchedulerLimits, StorePlanName
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store import stores
from tierkv.scheduler.store.candidates import Candidate, candidates, source_blocks
from tierkv.structures.ranks import ranks_of
from tierkv.types.engine import ScheduledRequest, StepOutput
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, Verb


def record_of(core: Core, *tables: list[int], tokens: int) -> RequestRecord:
    """Record with these block ids."""
    record = core.record(core.request(tokens))
    record.replace_blocks(tuple(map(tuple, tables)), whole_table=True)
    return record


def test_s14_no_chunk_is_offered_twice() -> None:
    """S14: each group's cursor counts whole chunks of its own size and never goes back.

    Also when the engine computes again from an earlier token, after a failed load elsewhere or a preemption.
    """
    core = make_core(block_tokens=(2, 4), hash_block_tokens=2)
    request = core.arrive(16)
    ids = [range(1, 9), range(11, 15)]
    core.schedule(request, computed=0, scheduled=10, ids=ids)
    assert [group.next_stored for group in core.record(request).groups] == [5, 2]
    assert not core.schedule(request, computed=0, scheduled=4, ids=ids).stores
    assert [group.next_stored for group in core.record(request).groups] == [5, 2]


def test_s64_decode_crosses_a_boundary() -> None:
    """S64: token by token nothing is offered, until one completes a chunk: then exactly that chunk."""
    core = make_core()
    request = core.arrive(6)
    assert chunk_indices(core, request, core.schedule(request, computed=0, scheduled=6, ids=[[1, 2]])) == [0]
    offered = []
    for computed in range(6, 12):
        request.extend([computed])
        new = [[3]] if computed == 8 else [[]]
        meta = core.schedule(request, computed=computed, scheduled=1, ids=new, whole=False)
        offered.append(chunk_indices(core, request, meta))
    assert offered == [[], [1], [], [], [], [2]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_s65_chunked_prefill(parts: list[int]) -> None:
    """S65: however a prompt is cut into steps, each chunk is offered once, in order, without gaps."""
    core = make_core(block_tokens=(2,), factor=2)
    total = sum(parts)
    request = core.arrive(total)
    offered, computed, known = [], 0, 0
    for part in parts:
        needed = -(-(computed + part) // 2)
        ids = list(range(known + 1, needed + 1))
        meta = core.schedule(request, computed=computed, scheduled=part, ids=[ids], whole=known == 0)
        offered += chunk_indices(core, request, meta)
        computed, known = computed + part, needed
    assert offered == list(range(total // 4))


def test_s66_prompt_only() -> None:
    """S66: a chunk with one generated token in it is never offered, not even much later."""
    core = make_core(limits=SchedulerLimits(prompt_only=True))
    request = core.arrive(10)
    assert chunk_indices(core, request, core.schedule(request, computed=0, scheduled=10, ids=[[1, 2, 3]])) == [0, 1]
    request.extend(range(30))
    meta = core.schedule(request, computed=10, scheduled=30, ids=[list(range(4, 11))], whole=False)
    assert not meta.stores


def test_s67_max_offload_tokens() -> None:
    """S67: 100 tokens allowed, chunks of 16: six."""
    core = make_core(block_tokens=(16,))
    request = core.arrive(160, max_offload_tokens=100)
    meta = core.schedule(request, computed=0, scheduled=160, ids=[range(1, 11)])
    assert chunk_indices(core, request, meta) == list(range(6))


def test_s67_zero_stores_nothing() -> None:
    """S67, S12: a request that must not be cached stores no chunk."""
    core = make_core()
    request = core.arrive(16, max_offload_tokens=0)
    assert not core.schedule(request, computed=0, scheduled=16, ids=[range(1, 5)]).stores


def test_s69_a_chunk_is_judged_by_its_last_block() -> None:
    """S69: F=3: the representatives of [1 5 6 | 7 2 4 | 9 3 8] are 6, 4 and 8; a null one drops its chunk alone."""
    core = make_core(factor=3)
    ids = [1, 5, 6, 7, 2, 4, 9, 3, 8]
    assert [c.number for c in candidates(record_of(core, ids, tokens=36), core.geometry, 36, 99)] == [0, 1, 2]
    for chunk, place in enumerate((2, 5, 8)):
        holed = [0 if i == place else block_id for i, block_id in enumerate(ids)]
        found = candidates(record_of(core, holed, tokens=36), core.geometry, 36, 99)
        assert [c.number for c in found] == [i for i in range(3) if i != chunk]


def test_s70_null_blocks_before_the_first_real_one() -> None:
    """S70: F=3, [0 0 6], a window of one block: the chunk is offered with its one block, and the index points at it."""
    core = make_core(groups=[window(4)], factor=3)
    record = record_of(core, [0, 0, 6], tokens=12)
    found = candidates(record, core.geometry, 12, 99)
    assert len(found) == 1
    (sources,) = source_blocks(record, core.geometry, found)
    assert (sources.block_ids, sources.group_sizes, sources.block_indices) == ((6,), (1,), (2,))


def test_s71_no_room_twice_then_room() -> None:
    """S71: a store that found no room is offered again, whole; nothing is lost."""
    core = make_core(slots=8)
    others = core.request(range(100, 132), "others")
    (blocker,) = [core.manager.prepare_store([(k, 0) for k in core.truth.keys(others)], RequestContext("others"))]
    assert blocker is not None
    request = core.arrive(12)
    assert not core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]).stores
    assert not core.schedule(request, computed=8, scheduled=4, ids=[[3]], whole=False).stores
    assert core.counters.stores_refused == 2
    core.manager.complete_store(blocker.slots)
    offered = []
    for _ in range(2):  # at most a quarter of the host tier in one step
        meta = core.schedule(request, computed=12, scheduled=0, ids=[[]], whole=False)
        offered += chunk_indices(core, request, meta)
    assert offered == [0, 1, 2]


def test_s72_a_chunk_in_the_middle_is_there_already() -> None:
    """S72: chunks in the host tier are left out of ids and sizes; their neighbours have their own blocks."""
    core = make_core(factor=2)
    request = core.arrive(24)
    keys = core.truth.keys(request)
    core.put([keys[1]])
    job = only_store(core.schedule(request, computed=0, scheduled=24, ids=[[1, 2, 3, 4, 5, 6]]))
    assert (job.keys, job.block_ids, job.group_sizes) == ((keys[0], keys[2]), (1, 2, 5, 6), (4,))


@pytest.mark.parametrize("plan", ["immediate", "eager"])
def test_a_chunk_that_is_in_a_request_twice_is_stored_once(plan: StorePlanName) -> None:
    """Two chunks with one key have one slot, so one job fills it once, with the blocks of the first."""
    core = make_core(slots=16, limits=SchedulerLimits(store_plan=plan))
    request = core.arrive(16)
    keys = core.record(request).groups[0].keys
    keys[2] = keys[1]
    meta = core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]])
    if plan == "eager":
        core.scheduler.request_finished(request, [])
        meta = core.scheduler.build_connector_meta(StepOutput())
    job = only_store(meta)
    assert (job.keys, job.block_ids) == ((keys[0], keys[1], keys[3]), (1, 2, 4))
    assert len({ref.slot for ref in job.slots}) == 3
    core.scheduler.validate()
    core.report(job.job_id)
    core.scheduler.request_finished(request, [])
    core.scheduler.validate()
    assert core.host.room == core.host.num_slots


def test_two_requests_that_complete_the_same_chunk_in_one_step() -> None:
    """The second one finds the chunk in the host tier, where the first one is storing it: one job copies it."""
    core = make_core(slots=8)
    first, second = core.arrive(8, "first"), core.arrive(8, "second")
    entries = tuple(
        ScheduledRequest(request.request_id, 0, 8, (ids,), True) for request, ids in ((first, (1, 2)), (second, (3, 4)))
    )
    job = only_store(core.scheduler.build_connector_meta(StepOutput(entries)))
    assert (job.request_id, job.block_ids) == ("first", (1, 2))
    core.scheduler.validate()


def test_s73_preempted_and_resumed() -> None:
    """S73: the new table replaces the old one, offered chunks stay offered, and none is stored from an old block."""
    core = make_core()
    request = core.arrive(16)
    store = only_store(core.schedule(request, computed=0, scheduled=8, ids=[[1, 2, 3]]))
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    core.report(store.job_id)
    assert core.ask(request) == 8
    core.scheduler.update_state_after_alloc(request, [blocks([7, 8, 9, 10], filled=2)], 0)
    job = only_store(core.schedule(request, computed=8, scheduled=8, ids=[[7, 8, 9, 10]]))
    assert (job.keys, job.block_ids) == (tuple(core.truth.keys(request)[2:]), (9, 10))


def owners(core: Core, keys: list[Key]) -> set[str]:
    """Requests, of "a" and "b", that the host tier's order of prefixes knows ``keys``, in order, by."""
    found = [core.host.slots.ranks[slot] for slot in core.host.slots.find_all(keys) if slot is not None]
    ends = range(4, 4 * len(keys) + 1, 4)
    return {name for name in "ab" for number in (1, 2) if found == ranks_of(name, ends, number)}


def test_a_preempted_request_takes_its_prefix_over_again() -> None:
    """Another request continued the same prompt meanwhile. What a request stores after it was preempted must not take
    the place of the chunks before it: they are known by the request that stores now."""
    core = make_core()
    first = core.arrive(12, "a")
    core.report(*[job.job_id for job in core.schedule(first, computed=0, scheduled=12, ids=[[1, 2, 3]]).stores])
    keys = list(core.record(first).groups[0].keys)
    assert owners(core, keys) == {"a"}
    second = core.arrive([*range(12), 50, 51, 52, 53], "b")
    core.report(*[job.job_id for job in core.schedule(second, computed=12, scheduled=4, ids=[[1, 2, 3, 4]]).stores])
    assert owners(core, keys) == {"b"}
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    core.ask(first, computed=8)
    first.extend(range(60, 65))
    core.schedule(first, computed=8, scheduled=9, ids=[[1, 2, 5, 6, 7]])
    assert owners(core, keys) == {"a"}


def test_an_id_that_is_used_again_begins_another_prompt() -> None:
    """Engines use an id again once its request has finished. The new prompt does not continue the old one."""
    core = make_core()
    found: list[list[int]] = []
    for first in (0, 100):
        request = core.arrive(range(first, first + 12), "a")
        core.report(*[job.job_id for job in core.schedule(request, computed=0, scheduled=12, ids=[[1, 2, 3]]).stores])
        slots = core.host.slots.find_all(core.record(request).groups[0].keys)
        found.append([core.host.slots.ranks[slot] for slot in slots if slot is not None])
        core.scheduler.request_finished(request, [[1, 2, 3]])
    one, other = found
    assert len(one) == len(other) == 3
    assert set(one).isdisjoint(other)


def test_s73_asked_again_without_notice_of_preemption() -> None:
    """S73: a running request that is asked about has lost its blocks, even without a preemption call.

    Its stores are flushed before these blocks are filled, and an abort stores nothing from them.
    """
    core = make_core()
    request = core.arrive(16)
    store = only_store(core.schedule(request, computed=0, scheduled=12, ids=[[1, 2, 3]]))
    core.ask(request)
    meta = core.scheduler.build_connector_meta(StepOutput())
    assert meta.jobs_to_flush == {store.job_id}
    core.report(store.job_id)
    core.manager.reset_cache()
    assert core.ask(request) == 0
    core.scheduler.update_state_after_alloc(request, [blocks([7, 8, 9, 10])], 0)
    core.scheduler.request_finished(request, [[7, 8, 9, 10]])
    assert not core.scheduler.build_connector_meta(StepOutput()).stores


def test_s73_aborted_before_it_ran_again() -> None:
    """S73: preempted, given new blocks, aborted before a step was scheduled.

    A store would read blocks that belong to another request now.
    """
    core = make_core()
    request = core.arrive(16)
    request.hashes_withheld = 4
    core.schedule(request, computed=0, scheduled=12, ids=[[1, 2, 3]])
    request.hashes_withheld = 0
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    assert core.ask(request, computed=8) == 0
    core.scheduler.update_state_after_alloc(request, [blocks([7, 8, 9, 10], filled=2)], 0)
    core.scheduler.request_finished(request, [[7, 8, 9, 10]])
    assert not core.scheduler.build_connector_meta(StepOutput()).stores


def test_the_end_of_a_request_is_its_last_use() -> None:
    """Recency is updated once, when a request ends (spec, section 8, as of 0.33).

    The chunks of one that decoded for long outlive those stored after them, and its head outlives its tail (S54).
    """
    core = make_core(slots=8)
    request = core.arrive(8)
    core.report(only_store(core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])).job_id)
    core.put(core.truth.keys(core.request(range(100, 124), "others")))
    core.scheduler.request_finished(request, [[1, 2]])
    core.put(core.truth.keys(core.request(range(200, 224), "newer")))
    assert set(core.truth.keys(request)) < core.ready()
    core.put(core.truth.keys(core.request(range(300, 304), "newest")))
    assert core.truth.keys(request)[0] in core.ready()
    assert core.truth.keys(request)[1] not in core.ready()


def test_s74_a_group_whose_blocks_are_placeholders() -> None:
    """S74: the group takes part with size 0."""
    core = make_core(block_tokens=(4, 4))
    request = core.arrive(8)
    job = only_store(core.schedule(request, computed=0, scheduled=8, ids=[[0, 0], [5, 6]]))
    assert (job.group_sizes, job.block_indices, job.chunk_groups) == ((0, 2), (0, 0), (1, 1))


def test_s75_groups_advance_by_themselves() -> None:
    """S75: groups with different chunks have cursors of their own."""
    core = make_core(block_tokens=(2, 6), hash_block_tokens=2)
    request = core.arrive(12)
    first = core.schedule(request, computed=0, scheduled=5, ids=[[1, 2, 3], [11]])
    assert (chunk_indices(core, request, first, 0), chunk_indices(core, request, first, 1)) == ([0, 1], [])
    second = core.schedule(request, computed=5, scheduled=7, ids=[[4, 5, 6], [12]], whole=False)
    assert (chunk_indices(core, request, second, 0), chunk_indices(core, request, second, 1)) == ([2, 3, 4, 5], [0, 1])


def test_s76_two_stores_of_one_request() -> None:
    """S76: a store does not wait for the previous one."""
    core = make_core()
    request = core.arrive(8)
    first = only_store(core.schedule(request, computed=0, scheduled=4, ids=[[1]]))
    second = only_store(core.schedule(request, computed=4, scheduled=4, ids=[[2]], whole=False))
    core.report(second.job_id)
    core.report(first.job_id)
    assert core.ready() == set(core.truth.keys(request))


def test_s77_d5_the_last_chunk_of_a_finished_request() -> None:
    """S77, D5: the chunk that the last step completes is stored although the request ends with that step.

    The token that was sampled last is not computed, so its chunk is not offered.
    """
    core = make_core()
    request = core.arrive(7)
    core.report(only_store(core.schedule(request, computed=0, scheduled=7, ids=[[1, 2]])).job_id)
    request.extend([7])
    last = only_store(core.schedule(request, computed=7, scheduled=1, ids=[[3]], whole=False))
    request.extend([8, 9, 10, 11])
    core.scheduler.request_finished(request, [[1, 2, 3]])
    assert not core.scheduler.build_connector_meta(StepOutput()).stores
    core.report(last.job_id)
    assert core.ready() == set(core.truth.keys(request)[:2])


def test_s77_hashes_that_come_late() -> None:
    """S77: hashes unknown in the last step are known at its end: those chunks are stored then.

    Their blocks are fenced at once.
    """
    core = make_core()
    request = core.arrive(8)
    request.hashes_withheld = 1
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    request.hashes_withheld = 0
    core.scheduler.request_finished(request, [[1, 2]])
    other = core.arrive([9] * 8, "b")
    meta = core.schedule(other, computed=0, scheduled=4, ids=[[2]])
    last = next(job for job in meta.stores if job.request_id == "a")
    assert (last.block_ids, last.job_id in meta.jobs_to_flush) == ((2,), True)


def test_s77_an_aborted_request_stores_what_is_computed() -> None:
    """S77: an abort in the middle of a prompt stores the computed chunks, and offers no others."""
    core = make_core()
    request = core.arrive(16)
    meta = core.schedule(request, computed=0, scheduled=9, ids=[[1, 2, 3]])
    core.scheduler.request_finished(request, [[1, 2, 3]])
    assert chunk_indices(core, request, meta) == [0, 1]
    assert not core.scheduler.build_connector_meta(StepOutput()).stores


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_chunk_whose_read_failed_is_stored_when_the_request_ends(is_lost: bool) -> None:
    """While a tier is read for a chunk, a request that computes it stores the others. It may be the last to do so.

    Without it, what is stored behind it serves no request.
    """
    core = make_core(tiers=[disk()])
    request = core.arrive(16)
    key = core.truth.keys(request)[1]
    core.keep_below([key])
    assert core.manager.read_ahead([key], 1, RequestContext("other"))
    (read,) = core.manager.take_ops()
    first = core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]])
    assert chunk_indices(core, request, first) == [0, 2, 3]
    core.finish(read, OutcomeKind.CORRUPT if is_lost else OutcomeKind.OK)
    core.scheduler.request_finished(request, [[1, 2, 3, 4]])
    last = core.scheduler.build_connector_meta(StepOutput())
    assert chunk_indices(core, request, last) == ([1] if is_lost else [])


def test_the_end_of_a_request_looks_for_a_bounded_number_of_chunks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked up in one call of the engine, whatever the prompt."""
    monkeypatch.setattr(stores, "AWAITED_MAX", 2)
    core = make_core(tiers=[disk()])
    request = core.arrive(32)
    keys = core.truth.keys(request)[::2]
    core.keep_below(keys)
    assert core.manager.read_ahead(keys, 4, RequestContext("other"))
    (read,) = core.manager.take_ops()
    for end in (8, 16, 24, 32):
        core.schedule(request, computed=end - 8, scheduled=8, ids=[[*range(1, 1 + end // 4)]])
    assert len(core.scheduler._records[request.request_id].awaited) == 2
    core.finish(read, OutcomeKind.CORRUPT)
    core.scheduler.request_finished(request, [[*range(1, 9)]])
    last = core.scheduler.build_connector_meta(StepOutput())
    assert chunk_indices(core, request, last) == [0, 2, 4, 6], "those behind the first lost one are offered too"


def test_s77_a_long_prompt_that_ends_at_once() -> None:
    """S77: the rest of a local prefix beyond the bound of a step is stored at the end, in a bounded number of jobs.

    Chunks lost all the same are counted, once.
    """
    core = make_core(slots=40, limits=SchedulerLimits(store_chunks_per_step_max=3))
    request = core.arrive(4 * 20)
    meta = core.schedule(request, computed=76, scheduled=4, ids=[list(range(1, 21))])
    assert chunk_indices(core, request, meta) == [0, 1, 2]
    core.scheduler.request_finished(request, [list(range(1, 21))])
    last = core.scheduler.build_connector_meta(StepOutput())
    assert len(last.stores) == FINAL_PASSES_MAX
    assert [len(job.keys) for job in last.stores] == [3] * FINAL_PASSES_MAX
    assert {job.job_id for job in last.stores} <= last.jobs_to_flush
    assert core.counters.chunks_not_stored == 20 - 3 * (1 + FINAL_PASSES_MAX)


def core_of_short_jobs(chunks: int, **parts: object) -> Core:
    """Core whose jobs copy a few chunks each."""
    job_bytes = chunks * make_core().geometry.payload_bytes_max
    return make_core(limits=SchedulerLimits(job_bytes_max=job_bytes), **parts)  # type: ignore[arg-type]


def test_a_tier_gets_the_front_of_a_prompt_while_its_rest_is_copied() -> None:
    """A disk writes as fast as chunks are copied: it must not wait for the last copy of a long prompt."""
    core = core_of_short_jobs(3, tiers=[disk()])
    request = core.arrive(4 * 12)
    first, *others = core.schedule(request, computed=0, scheduled=48, ids=[range(1, 13)]).stores
    core.report(first.job_id)
    (write,) = core.manager.take_ops()
    keys = core.truth.keys(request)
    assert (write.verb, set(write.keys)) == (Verb.WRITE, set(keys[:3]))
    core.report(*[job.job_id for job in others])
    assert {key for op in core.manager.take_ops() for key in op.keys} == set(keys[3:])
    assert core.ready() == set(keys)


@pytest.mark.parametrize(("chunks", "lengths"), [(9, [3, 3, 3]), (10, [3, 3, 3, 1]), (3, [3]), (4, [2, 2])])
def test_jobs_of_a_prompt_have_nearly_one_length(chunks: int, lengths: list[int]) -> None:
    """The jobs of a prompt copy its chunks in order, each from its blocks, in batches as equal as those of a tier."""
    core = core_of_short_jobs(3)
    request = core.arrive(4 * chunks)
    jobs = core.schedule(request, computed=0, scheduled=4 * chunks, ids=[range(1, chunks + 1)]).stores
    assert [len(job.keys) for job in jobs] == lengths
    assert [key for job in jobs for key in job.keys] == core.truth.keys(request)
    assert [block for job in jobs for block in job.block_ids] == list(range(1, chunks + 1))
    assert [job.block_indices for job in jobs] == [(sum(lengths[:i]),) for i in range(len(lengths))]


def test_jobs_of_several_groups_end_in_one_of_them_or_go_on_with_the_next() -> None:
    """A job may hold the end of one group's chunks and the front of the next one's."""
    core = core_of_short_jobs(3, block_tokens=(4, 4), hash_block_tokens=4)
    request = core.arrive(16)
    jobs = core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4], [5, 6, 7, 8]]).stores
    assert [job.chunk_groups for job in jobs] == [(0, 0, 0), (0, 1, 1), (1, 1)]
    assert [job.block_ids for job in jobs] == [(1, 2, 3), (4, 5, 6), (7, 8)]
    assert [job.group_sizes for job in jobs] == [(3, 0), (1, 2), (0, 2)]
    assert [job.block_indices for job in jobs] == [(0, 0), (3, 0), (0, 2)]
    core.report(*[job.job_id for job in jobs])
    assert core.ready() == {key for group in (0, 1) for key in core.truth.keys(request, group)}


def test_a_long_chunk_is_a_job_of_its_own() -> None:
    """A chunk longer than a job's bound is stored all the same."""
    core = make_core(limits=SchedulerLimits(job_bytes_max=1))
    jobs = core.schedule(core.arrive(8), computed=0, scheduled=8, ids=[[1, 2]]).stores
    assert [len(job.keys) for job in jobs] == [1, 1]


@pytest.mark.parametrize("plan", ["immediate", "eager"])
def test_what_a_step_completes_is_stored_however_much_it_is(plan: StorePlanName) -> None:
    """A long prompt is computed in few large steps: a bound below one step's chunks would lose its end silently."""
    core = make_core(slots=200, limits=SchedulerLimits(store_chunks_per_step_max=3, store_plan=plan))
    request = core.arrive(4 * 100)
    stored: list[int] = []
    for step in range(5):
        ids = list(range(1 + 20 * step, 21 + 20 * step))
        meta = core.schedule(request, computed=80 * step, scheduled=80, ids=[ids], whole=not step)
        stored.append(sum(len(job.keys) for job in meta.stores))
    assert stored == ([20] * 5 if plan == "immediate" else [0] + [20] * 4)
    core.scheduler.request_finished(request, [])
    last = core.scheduler.build_connector_meta(StepOutput())
    assert sum(len(job.keys) for job in last.stores) == 100 - sum(stored)
    assert core.counters.chunks_not_stored == 0


def test_chunks_that_a_full_host_tier_never_took_are_counted() -> None:
    """A request that ends while the host tier has no room loses its chunks: a counter shows it."""
    core = make_core(slots=8)
    others = core.request(range(1000, 1028), "others")
    assert core.manager.prepare_store([(key, 0) for key in core.truth.keys(others)], RequestContext("others"))
    request = core.arrive(16)
    assert not core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]]).stores
    core.scheduler.request_finished(request, [])
    assert core.counters.chunks_not_stored == 3


def test_d3_a_request_that_never_ran() -> None:
    """D3: queued, asked about, aborted: no table, no error, nothing kept."""
    core = make_core()
    request = core.arrive(16)
    core.put(core.truth.keys(request))
    assert core.ask(request) == 16
    assert core.scheduler.request_finished(request, []) == (False, None)
    assert not core.scheduler._records
    assert core.host.room == core.host.num_slots


def test_d3_fewer_blocks_than_tokens() -> None:
    """D3: an aborted request has more keys than blocks, or no block: only chunks with blocks are offered."""
    core = make_core()
    request, queued = core.arrive(16), core.arrive(16, "queued")
    meta = core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    assert chunk_indices(core, request, meta) == [0, 1]
    for one in (request, queued):
        core.scheduler.request_finished(one, [])
    assert not core.scheduler.build_connector_meta(StepOutput()).stores


def test_a_large_prompt_takes_several_steps() -> None:
    """One request must not replace the whole host tier at once: a part per step, front first over all groups."""
    core = make_core(block_tokens=(2, 4), hash_block_tokens=2, slots=16)
    request = core.arrive(16)
    ids = [range(1, 9), range(11, 15)]
    first = core.schedule(request, computed=0, scheduled=16, ids=ids)
    assert (chunk_indices(core, request, first, 0), chunk_indices(core, request, first, 1)) == ([0, 1, 2], [0])
    later: list[list[int]] = [[], []]
    for _ in range(2):
        meta = core.schedule(request, computed=16, scheduled=0, ids=[[], []], whole=False)
        for group in range(2):
            later[group] += chunk_indices(core, request, meta, group)
    assert later == [[3, 4, 5, 6, 7], [1, 2, 3]]


class NoisyGrant:
    """Wrapper of a manager that refuses every second request for room."""

    def __init__(self, core: Core) -> None:
        self.offered: list[list[Key]] = []
        self._prepare = core.manager.prepare_store

    def __call__(self, keys: Iterable[tuple[Key, int]], ctx: RequestContext) -> StoreGrant | None:
        pairs = list(keys)
        self.offered.append([key for key, _ in pairs])
        return None if len(self.offered) % 2 else self._prepare(pairs, ctx)


def test_s71_refusals_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S71, I2: with every other offer refused each chunk is stored once, from its own block."""
    core = make_core()
    request = core.arrive(32)
    gate = NoisyGrant(core)
    monkeypatch.setattr(core.manager, "prepare_store", gate)
    stored = []
    for step in range(10):
        scheduled = 4 if step < 8 else 0
        ids = [[step + 1]] if step < 8 else [[]]
        meta = core.schedule(request, computed=min(4 * step, 32), scheduled=scheduled, ids=ids, whole=step == 0)
        for job in meta.stores:
            stored += list(zip(job.keys, job.block_ids, strict=True))
    assert stored == list(zip(core.truth.keys(request), range(1, 9), strict=True))


def test_candidates_are_sorted_by_group_and_cut_by_token() -> None:
    """The limit keeps the chunks nearest to the start in every group, so that each group's cursor has no gaps."""
    core = make_core(block_tokens=(2, 3), hash_block_tokens=1)
    record = record_of(core, [1, 2, 3], [4, 5], tokens=6)
    found = candidates(record, core.geometry, 6, 3)
    assert [(c.group, c.number, c.end_token) for c in found] == [(0, 0, 2), (0, 1, 4), (1, 0, 3)]
    assert all(isinstance(c, Candidate) for c in found)


def test_what_fits_of_many_chunks_is_found_in_a_few_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 200 chunks ends while 77 slots are free: as many are stored, without an offer for each."""
    core = make_core(slots=128, limits=SchedulerLimits(store_chunks_per_step_max=1000))
    monkeypatch.setattr(core.manager, "store_chunks_max", 1000)
    busy = core.arrive(range(10_000, 10_000 + 4 * 51), "busy")
    core.schedule(busy, computed=0, scheduled=4 * 51, ids=[range(300, 351)])
    request = core.arrive(800)
    monkeypatch.setattr(core.manager, "prepare_store", lambda *_: None)
    core.schedule(request, computed=0, scheduled=800, ids=[range(1, 201)])
    monkeypatch.undo()
    monkeypatch.setattr(core.manager, "store_chunks_max", 1000)
    offers: list[int] = []
    prepare = core.manager.prepare_store

    def count(keys: Iterable[tuple[Key, int]], ctx: RequestContext) -> StoreGrant | None:
        some = [*keys]
        offers.append(len(some))
        return prepare(some, ctx)

    monkeypatch.setattr(core.manager, "prepare_store", count)
    core.scheduler.request_finished(request, [])
    stored = core.scheduler.build_connector_meta(StepOutput()).stores
    assert sum(len(job.keys) for job in stored if job.request_id == "a") == 77
    assert len(offers) < 20
    core.scheduler.validate()
