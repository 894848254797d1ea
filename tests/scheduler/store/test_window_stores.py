"""Storing chunks of groups that need only the end of a prefix (spec, sections 2 and 10)."""

from __future__ import annotations

import pytest
from calls import calls_of
from core_blocks import blocks
from core_parts import Core, make_core
from core_truth import BedRequest
from group_parts import full, local, ssm, window
from store_parts import chunk_indices, only_store

from tierkv.manager.contract import RequestContext, StoreGrant
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.types.engine import GroupSpec, ScheduledRequest, StepOutput
from tierkv.types.transfers import ConnectorMeta, chunk_blocks


class Gate:
    """Wrapper of a manager that grants no room while it is shut."""

    def __init__(self, core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shut = True
        self._prepare = core.manager.prepare_store
        monkeypatch.setattr(core.manager, "prepare_store", self)

    def __call__(self, keys: list[tuple[bytes, int]], ctx: RequestContext) -> StoreGrant | None:
        return None if self.shut else self._prepare(keys, ctx)  # type: ignore[arg-type]  # keys are Keys


def step(core: Core, *entries: tuple[BedRequest, int, int, list[list[int]], bool]) -> ConnectorMeta:
    """One step: request, computed, scheduled, ids per group, whether they are the whole table."""
    scheduled = tuple(
        ScheduledRequest(request.request_id, computed, count, tuple(map(tuple, ids)), whole)
        for request, computed, count, ids, whole in entries
    )
    return core.scheduler.build_connector_meta(StepOutput(scheduled))


def test_s68_only_chunks_in_which_a_hit_can_end() -> None:
    """S68: full attention has chunks of 16 tokens, the window has chunks of 4 and needs one.

    Only its chunks 3, 7 and 11 are before a place where a hit can end.
    """
    core = make_core(groups=[full(16), window(4)], hash_block_tokens=4)
    assert core.geometry.groups[1].aligned_chunks == 4
    request = core.arrive(48)
    meta = core.schedule(request, computed=0, scheduled=48, ids=[[1, 2, 3], list(range(11, 23))])
    assert chunk_indices(core, request, meta, 0) == [0, 1, 2]
    assert chunk_indices(core, request, meta, 1) == [3, 7, 11]


def test_s68_what_is_filtered_is_not_offered_later() -> None:
    """S68: token by token, and at the end of the request, the same chunks are offered, each once."""
    core = make_core(groups=[full(16), window(8)], hash_block_tokens=4)
    request = core.arrive(1)
    offered: list[int] = []
    for computed in range(40):
        ids = [[1 + computed // 16] if computed % 16 == 0 else [], [11 + computed // 4] if computed % 4 == 0 else []]
        meta = core.schedule(request, computed=computed, scheduled=1, ids=ids, whole=computed == 0)
        offered += chunk_indices(core, request, meta, 1)
        request.extend([computed + 1])
    core.scheduler.request_finished(request, [])
    offered += chunk_indices(core, request, core.scheduler.build_connector_meta(StepOutput()), 1)
    assert offered == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("groups", "offered"),
    [
        pytest.param([window(4)], True, id="window-of-one-block"),
        pytest.param([window(5)], False, id="window-of-two-blocks"),
        pytest.param([local(4)], True, id="local"),
        pytest.param([ssm()], True, id="state"),
        pytest.param([full()], False, id="full"),
        pytest.param([window(4), full(8)], True, id="beside-coarser-chunks"),
        pytest.param([window(4), full(2)], True, id="beside-finer-chunks"),
    ],
)
def test_s70_a_chunk_with_missing_blocks_must_still_serve_every_hit(groups: list[GroupSpec], offered: bool) -> None:
    """S70: F=3, [0 0 6]. The lineage always stores such a chunk.

    But a chunk found later is read wherever a hit ends with it: without a block of that hit's window it would give
    zeros. So it is stored only if no hit can need the missing blocks. Smaller chunks beside it change nothing: no hit
    ends inside a window's chunk.
    """
    core = make_core(groups=groups, factor=3, hash_block_tokens=2)
    request = core.arrive(24)
    ids = [[0, 0, 0, 0, 0, 6], list(range(21, 33))][: len(groups)]
    meta = core.schedule(request, computed=20, scheduled=4, ids=ids)
    assert chunk_indices(core, request, meta) == ([1] if offered else [])
    if offered:
        job = meta.stores[0]
        assert (job.group_sizes[0], job.block_indices[0], job.block_ids[0]) == (1, 5, 6)


def test_s70_placeholders_in_a_later_chunk_begin_another_job() -> None:
    """S70: a job can leave out blocks only at its front. State groups have null blocks in every chunk.

    Each chunk is stored from its own block, at its own place.
    """
    core = make_core(groups=[full(), ssm()], factor=2)
    request = core.arrive(24)
    ids = [[1, 2, 3, 4, 5, 6], [0, 11, 0, 12, 13, 14]]
    first, second = core.schedule(request, computed=0, scheduled=24, ids=ids).stores
    found = {key: part for job in (first, second) for key, part in zip(job.keys, chunk_blocks(job, 2), strict=True)}
    keys = [*core.truth.keys(request, 0), *core.truth.keys(request, 1)]
    parts = [(0, (1, 2)), (0, (3, 4)), (0, (5, 6)), (1, (11,)), (1, (12,)), (0, (13, 14))]
    assert found == dict(zip(keys, parts, strict=True))
    assert core.record(request).store_jobs == {first.job_id, second.job_id}


def test_s74_sizes_of_a_windowed_group_count_what_is_there() -> None:
    """S74, S75: the window of a request that found a prefix on the GPU begins behind null blocks.

    Sizes, indices and chunks of each group are its own.
    """
    core = make_core(groups=[full(), window(8)], factor=2)
    request = core.arrive(32)
    job = only_store(core.schedule(request, computed=24, scheduled=8, ids=[range(1, 9), [0, 0, 0, 0, 15, 16, 17, 18]]))
    assert (job.group_sizes, job.block_indices, job.chunk_groups) == ((8, 4), (0, 4), (0, 0, 0, 0, 1, 1))
    assert job.block_ids[8:] == (15, 16, 17, 18)


def test_a_long_run_of_placeholders_does_not_hide_what_follows() -> None:
    """More null blocks than chunks are offered in one step: the cursor passes them at once."""
    core = make_core(groups=[window(4)], limits=SchedulerLimits(store_chunks_per_step_max=2))
    request = core.arrive(48)
    meta = core.schedule(request, computed=40, scheduled=8, ids=[[0] * 10 + [1, 2]])
    assert chunk_indices(core, request, meta) == [10, 11]
    assert core.record(request).groups[0].next_stored == 12


def test_placeholders_are_passed_over_also_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused offer is repeated step by step; chunks that can never be stored are not checked each time."""
    core = make_core(groups=[window(4)])
    Gate(core, monkeypatch)
    request = core.arrive(48)
    core.schedule(request, computed=40, scheduled=8, ids=[[0] * 10 + [1, 2]])
    assert core.record(request).groups[0].next_stored == 10


# -- blocks that change hands ----------------------------------------------------------------------------------------


def test_s78_d6_a_block_that_another_request_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """S78, D6: the host tier was full, the window moved on, and the engine gave an unstored block to another request.

    That happened in this very step: the chunk is given up, whichever of the two is scheduled first.
    """
    for other_first in (True, False):
        core = make_core(groups=[window(8)])
        gate = Gate(core, monkeypatch)
        request, other = core.arrive(16), core.arrive(range(50, 58), "b")
        assert not core.schedule(request, computed=0, scheduled=12, ids=[[1, 2, 3]]).stores
        gate.shut = False
        entries = [(request, 12, 4, [[4]], False), (other, 0, 4, [[1]], True)]
        meta = step(core, *(reversed(entries) if other_first else entries))
        assert chunk_indices(core, request, meta) == [1, 2, 3]
        assert chunk_indices(core, other, meta) == [0]
        core.scheduler.validate()


def test_s78_d6_a_block_that_the_request_itself_got_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """S78: the request gets its own window block again as its newest: only the new position counts."""
    core = make_core(groups=[window(8)])
    gate = Gate(core, monkeypatch)
    request = core.arrive(16)
    core.schedule(request, computed=0, scheduled=12, ids=[[1, 2, 3]])
    gate.shut = False
    meta = core.schedule(request, computed=12, scheduled=4, ids=[[1]], whole=False)
    assert chunk_indices(core, request, meta) == [1, 2, 3]
    assert only_store(meta).block_ids == (2, 3, 1)


def test_s78_d6_a_block_that_a_load_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """S78: a load overwrites blocks just as computing does."""
    core = make_core(groups=[full(), window(8)])
    loader = core.arrive(range(50, 58), "l")
    core.put([*core.truth.keys(loader, 0), *core.truth.keys(loader, 1)])
    assert core.ask(loader)
    gate = Gate(core, monkeypatch)
    request = core.arrive(16)
    core.schedule(request, computed=0, scheduled=12, ids=[[1, 2, 3], [11, 12, 13]])
    gate.shut = False
    tokens = core.ask(loader)
    assert tokens is not None
    core.scheduler.update_state_after_alloc(loader, [blocks([21, 22]), blocks([11, 12])], tokens)
    meta = core.schedule(request, computed=12, scheduled=4, ids=[[4], [14]], whole=False)
    (load,) = meta.loads
    struck = {11, 12} & set(load.block_ids)
    assert struck
    assert chunk_indices(core, request, meta, 0) == [0, 1, 2, 3]
    assert chunk_indices(core, request, meta, 1) == [i for i in range(4) if 11 + i not in struck]


def test_s78_d6_a_block_that_an_unknown_request_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """S78: an unregistered request writes to the GPU as well: its blocks are removed from other tables.

    Jobs that read them are flushed.
    """
    core = make_core(groups=[window(8)])
    request = core.arrive(16)
    stored = only_store(core.schedule(request, computed=0, scheduled=4, ids=[[1]]))
    gate = Gate(core, monkeypatch)
    core.schedule(request, computed=4, scheduled=8, ids=[[2, 3]], whole=False)
    gate.shut = False
    stranger = core.request(range(90, 98), "stranger")
    meta = step(core, (stranger, 0, 8, [[1, 2]], True), (request, 12, 4, [[4]], False))
    assert chunk_indices(core, request, meta) == [2, 3]
    assert meta.jobs_to_flush == {stored.job_id}


def test_s78_a_shared_block_stays_in_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """S78: a request that finds a block on the GPU only reads it, so it stays in both tables.

    When it is reused for writing, it is removed from both.
    """
    core = make_core(groups=[window(8)])
    gate = Gate(core, monkeypatch)
    first, second = core.arrive(16), core.arrive(16, "b")
    core.schedule(first, computed=0, scheduled=12, ids=[[1, 2, 3]])
    core.schedule(second, computed=8, scheduled=4, ids=[[1, 2, 7]])
    assert core.record(first).groups[0].block_ids == [1, 2, 3]
    core.schedule(core.arrive(range(90, 94), "c"), computed=0, scheduled=4, ids=[[1]])
    assert core.record(first).groups[0].block_ids == [0, 2, 3]
    assert core.record(second).groups[0].block_ids == [0, 2, 7]
    gate.shut = False
    assert chunk_indices(core, first, core.schedule(first, computed=12, scheduled=0, ids=[[]], whole=False)) == [1, 2]


def test_window_positions_are_forgotten_with_their_requests() -> None:
    """Many requests share a system prompt's blocks: their positions must be removed with the requests."""
    core = make_core(groups=[window(8)])
    for i in range(5):
        request = core.arrive(8, f"r{i}")
        meta = core.schedule(request, computed=0 if i == 0 else 4, scheduled=4, ids=[[1, 2 + i]])
        core.report(*(job.job_id for job in meta.stores))
        if i % 2:
            core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({request.request_id})))
        core.scheduler.request_finished(request, [])
        assert not len(core.scheduler._tables._windows)
        noted = core.scheduler._tables._windows._positions.values()
        assert sum(map(len, noted)) <= 2, "those of this request; the next one that gets blocks forgets them"


def test_the_end_of_a_request_costs_the_same_however_many_blocks_its_windows_had() -> None:
    """A long answer leaves thousands of blocks behind its windows, and the engine may not have given them to others."""
    calls = []
    for chunks in (16, 256):
        core = make_core(groups=[window(8)], tiers=[])
        request = core.arrive(4 * chunks + 4)
        meta = core.schedule(request, computed=0, scheduled=4 * chunks, ids=[[*range(1, chunks + 1)]])
        core.report(*(job.job_id for job in meta.stores))
        record = core.record(request)
        calls.append(calls_of(core.scheduler._tables.clear_table, record))
        assert record.groups[0].block_ids == []
        core.scheduler.validate()
    assert calls[0] == calls[1]


# -- fences ----------------------------------------------------------------------------------------------------------


def test_i3_window_blocks_are_fenced_at_once() -> None:
    """I3: a window passes blocks while the request runs: a writer of one waits for the store that reads it.

    Blocks of other groups belong to the request until it ends.
    """
    core = make_core(groups=[full(), window(4)])
    request, other = core.arrive(16), core.arrive(range(50, 66), "b")
    job = only_store(core.schedule(request, computed=0, scheduled=8, ids=[[1, 2], [11, 12]]))
    assert core.scheduler._fences.jobs_fencing([1, 2]) == set()
    meta = core.schedule(other, computed=0, scheduled=8, ids=[[3, 4], [11, 13]])
    assert meta.jobs_to_flush == {job.job_id}
    core.scheduler.request_finished(request, [])
    assert core.scheduler._fences.jobs_fencing([1]) == core.scheduler._fences.jobs_fencing([12]) == {job.job_id}
    core.report(job.job_id)
    assert core.scheduler._fences.jobs_fencing([1, 2, 11, 12]) == {meta.stores[0].job_id}, "11 is the other one's now"
    core.report(meta.stores[0].job_id)
    assert not len(core.scheduler._fences)


def test_i3_reading_a_shared_block_crosses_no_fence() -> None:
    """Fences delay writers. The front of a table that was found on the GPU is only read: nothing is flushed."""
    core = make_core()
    request = core.arrive(8)
    job = only_store(core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]))
    core.scheduler.request_finished(request, [])
    sharer = core.arrive(12, "b")
    assert core.schedule(sharer, computed=8, scheduled=4, ids=[[1, 2, 3]]).jobs_to_flush == set()
    writer = core.arrive(range(90, 98), "c")
    assert core.schedule(writer, computed=0, scheduled=8, ids=[[2, 4]]).jobs_to_flush == {job.job_id}
