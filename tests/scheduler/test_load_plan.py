"""What is loaded where, once the engine has allocated blocks (spec, section 9)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_parts import Core, disk, make_core
from core_pool import BedBlock, blocks
from core_truth import BedRequest

from tierkv.errors import EngineProtocolError
from tierkv.scheduler.load_plan import plan_load
from tierkv.types.engine import ScheduledRequest, StepOutput
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput, chunk_blocks


def offered(core: Core, request: BedRequest, computed: int = 0) -> int:
    """Make all chunks of a request readable in the host tier, and ask."""
    for group in core.geometry.groups:
        core.put(core.truth.keys(request, group.index))
    answer = core.ask(request, computed)
    assert answer is not None
    return answer


def load(core: Core, request: BedRequest, tables: Sequence[list[BedBlock]], tokens: int) -> TransferJob:
    """Allocate, and take this step's only load."""
    core.scheduler.update_state_after_alloc(request, tables, tokens)
    return only_load(core.scheduler.build_connector_meta(StepOutput()))


def only_load(meta: ConnectorMeta) -> TransferJob:
    """The one load of a step."""
    (job,) = meta.loads
    return job


def test_a_plain_load() -> None:
    """From nothing: each chunk once, in order, to the first blocks of the table."""
    core = make_core()
    request = core.request(12)
    assert offered(core, request) == 12
    job = load(core, request, [blocks([7, 8, 9])], 12)
    assert job.keys == tuple(core.truth.keys(request))
    assert (job.block_ids, job.group_sizes, job.block_indices) == ((7, 8, 9), (3,), (0,))


def test_s56_a_group_that_has_everything() -> None:
    """S56: the GPU has all blocks of one group: it takes no part, and the other's blocks are told from its own."""
    core = make_core(block_tokens=(4, 4))
    request = core.request(8)
    assert offered(core, request) == 8
    job = load(core, request, [blocks([1, 2], filled=2), blocks([3, 4])], 8)
    assert (job.group_sizes, job.block_ids, job.chunk_groups) == ((0, 2), (3, 4), (1, 1))
    assert job.keys == tuple(core.truth.keys(request, 1))


def test_s57_a_chunk_is_loaded_from_its_middle() -> None:
    """S57: F=4 and six blocks on the GPU: from the second chunk on, and that one is entered at its third block."""
    core = make_core(factor=4)
    request = core.request(48)
    assert offered(core, request, computed=24) == 24
    job = load(core, request, [blocks(range(1, 13), filled=6)], 24)
    assert job.keys == tuple(core.truth.keys(request)[1:])
    assert (job.block_ids, job.group_sizes, job.block_indices) == (tuple(range(7, 13)), (6,), (6,))
    assert chunk_blocks(job, 4) == [(2, (7, 8)), (0, (9, 10, 11, 12))]


def test_s58_leading_placeholders_are_skipped() -> None:
    """S58: null blocks before the first real one get nothing."""
    core = make_core()
    record = core.record(core.request(16))
    plan = plan_load(record, core.geometry, [blocks([0, 0, 5, 6])], 0, 16)
    assert (plan.block_ids, plan.block_indices) == ((5, 6), (2,))
    assert plan.keys == tuple(record.groups[0].keys[2:])


def test_s59_a_placeholder_behind_computed_blocks() -> None:
    """S59: computed, computed, null, then the first block to fill."""
    core = make_core()
    record = core.record(core.request(16))
    plan = plan_load(record, core.geometry, [blocks([3, 4, 0, 6], filled=2)], 8, 8)
    assert (plan.block_ids, plan.block_indices, plan.keys) == ((6,), (3,), (record.groups[0].keys[3],))


def test_s63_groups_keep_their_order() -> None:
    """S63: keys, blocks and sizes of all groups come in group order, so that each byte lands in its group."""
    core = make_core(block_tokens=(2, 4), factor=2)
    request = core.request(16)
    assert offered(core, request) == 16
    job = load(core, request, [blocks(range(1, 9)), blocks(range(11, 15))], 16)
    assert job.chunk_groups == (0, 0, 0, 0, 1, 1)
    assert job.keys == (*core.truth.keys(request, 0), *core.truth.keys(request, 1))
    assert job.block_ids == (*range(1, 9), *range(11, 15))
    assert job.group_sizes == (8, 4)


def test_fewer_tokens_than_offered() -> None:
    """The engine may take a shorter part; what it does not take is let go, not loaded."""
    core = make_core()
    request = core.request(16)
    assert offered(core, request) == 16
    job = load(core, request, [blocks([1, 2])], 8)
    assert job.keys == tuple(core.truth.keys(request)[:2])
    core.report(job.job_id)
    assert core.host.room == core.host.num_slots


def test_blocks_computed_since_the_question() -> None:
    """More of the prefix turned up on the GPU between question and allocation: only the rest is loaded."""
    core = make_core()
    request = core.request(16)
    assert offered(core, request) == 16
    job = load(core, request, [blocks([1, 2, 3, 4], filled=3)], 16)
    assert (job.keys, job.block_ids, job.block_indices) == ((core.truth.keys(request)[3],), (4,), (3,))


def test_all_computed_since_the_question() -> None:
    """Nothing is left to load: the engine waits for the load all the same, so there is an empty one."""
    core = make_core()
    request = core.request(8)
    assert offered(core, request) == 8
    job = load(core, request, [blocks([1, 2], filled=2)], 8)
    assert (job.keys, job.block_ids, job.group_sizes) == ((), (), (0,))
    assert core.scheduler.update_connector_output(WorkerOutput({job.job_id: 1})).finished == {"a"}


@pytest.mark.parametrize(
    ("tables", "tokens", "complaint"),
    [
        pytest.param([blocks([1, 2])], 16, "2 blocks for 16 tokens, 4 are needed", id="short table"),
        pytest.param([blocks([1, 2, 3, 4, 5, 6])], 20, "20 external tokens, but 16 were offered", id="too many"),
    ],
)
def test_an_engine_that_errs_is_told(tables: list[list[BedBlock]], tokens: int, complaint: str) -> None:
    """A wrong call is refused with its numbers, before anything has changed: the right call still works."""
    core = make_core()
    request = core.request(16)
    assert offered(core, request) == 16
    with pytest.raises(EngineProtocolError, match=complaint):
        core.scheduler.update_state_after_alloc(request, tables, tokens)
    assert len(load(core, request, [blocks([1, 2, 3, 4])], 16).keys) == 4


def test_computed_tokens_in_an_unfilled_block() -> None:
    """C <= b0 * block must hold: loading over half a computed block would leave its other half stale."""
    core = make_core()
    request = core.request(16)
    offered(core, request, computed=6)
    with pytest.raises(EngineProtocolError, match="block 1 is unfilled, but 6 tokens are said to be computed"):
        core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4], filled=1)], 10)


def test_nothing_external_loads_nothing() -> None:
    """0 external tokens: no job, and what was offered is let go."""
    core = make_core()
    request = core.request(8)
    offered(core, request)
    assert core.host.room < core.host.num_slots
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 0)
    assert core.host.room == core.host.num_slots
    assert not core.scheduler.build_connector_meta(StepOutput()).loads


def test_s62_a_load_beside_own_stores_is_refused() -> None:
    """S62: invariant I1: a request never has a load and a store in flight; the error is named, nothing is corrupted."""
    core = make_core()
    request = core.request(16)
    core.scheduler.on_new_request(request)
    (store,) = core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]).stores
    assert core.ask(request) is None
    with pytest.raises(EngineProtocolError, match="'a'"):
        core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4])], 16)
    core.report(store.job_id)
    assert core.ask(request) == 8


def test_s62_deferred_tokens_cannot_be_loaded() -> None:
    """S62's twin: while an answer is deferred nothing was offered, so nothing can be loaded."""
    core = make_core(tiers=[disk()])
    request = core.request(16)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    with pytest.raises(EngineProtocolError, match="0 were offered"):
        core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4])], 16)
    core.finish_all()
    assert core.ask(request) == 16


def test_tokens_are_accounted_to_the_tier_they_came_from() -> None:
    """The demo and the metrics say which tier served what: two chunks were here, two came from below."""
    core = make_core(tiers=[disk()])
    request = core.request(16)
    keys = core.truth.keys(request)
    core.put(keys[:2])
    core.keep_below(keys[2:])
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 16
    load(core, request, [blocks([1, 2, 3, 4])], 16)
    assert core.counters.tokens_loaded == {"host": 8, "disk": 8}


def test_prefix_hits_are_not_stored_again() -> None:
    """What was just loaded is in the tiers: the first chunk offered is the first computed one."""
    core = make_core()
    request = core.request(16)
    core.put(core.truth.keys(request)[:2])
    assert core.ask(request) == 8
    job = load(core, request, [blocks([1, 2])], 8)
    core.report(job.job_id)
    core.manager.reset_cache()  # also where the host tier has lost them since
    entry = ScheduledRequest("a", 8, 8, ((1, 2, 3, 4),), replaces_table=True)
    (store,) = core.scheduler.build_connector_meta(StepOutput((entry,))).stores
    assert store.keys == tuple(core.truth.keys(request)[2:])
