"""Source and destination of loaded chunks, once the engine has allocated blocks (spec, section 9)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from calls import calls_of
from core_blocks import BedBlock, blocks
from core_parts import Core, disk, make_core
from core_truth import BedRequest
from group_parts import attended, first_block, full, local, ssm, window
from hypothesis import assume, given
from hypothesis import strategies as st

from tierkv.errors import EngineProtocolError
from tierkv.scheduler.load.load_plan import ChunksOfPlan, LoadPlan, plan_load
from tierkv.scheduler.lookup.search import wanted_keys
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.types.engine import GroupSpec, ScheduledRequest, StepOutput
from tierkv.types.geometry import cdiv
from tierkv.types.keys import make_key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput, chunk_blocks


def offered(core: Core, request: BedRequest, computed: int = 0) -> int:
    """Make all chunks of a request readable in the host tier, and ask for its hit."""
    for group in core.geometry.groups:
        core.put(core.truth.keys(request, group.index))
    answer = core.ask(request, computed)
    assert answer is not None
    return answer


def load(core: Core, request: BedRequest, tables: Sequence[list[BedBlock]], tokens: int) -> TransferJob:
    """Allocate, and return this step's only load."""
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
    """S56: the GPU has all blocks of one group: it is not loaded, and the other group's indices are its own."""
    core = make_core(block_tokens=(4, 4))
    request = core.request(8)
    assert offered(core, request) == 8
    job = load(core, request, [blocks([1, 2], filled=2), blocks([3, 4])], 8)
    assert (job.group_sizes, job.block_ids, job.chunk_groups) == ((0, 2), (3, 4), (1, 1))
    assert job.keys == tuple(core.truth.keys(request, 1))


def test_s57_a_chunk_is_loaded_from_its_middle() -> None:
    """S57: F=4 and six blocks on the GPU: the load begins in the second chunk, at its third block."""
    core = make_core(factor=4)
    request = core.request(48)
    assert offered(core, request, computed=24) == 24
    job = load(core, request, [blocks(range(1, 13), filled=6)], 24)
    assert job.keys == tuple(core.truth.keys(request)[1:])
    assert (job.block_ids, job.group_sizes, job.block_indices) == (tuple(range(7, 13)), (6,), (6,))
    assert chunk_blocks(job, 4) == [(2, (7, 8)), (0, (9, 10, 11, 12))]


def test_s37_windowed_model_all_chunks_are_loaded() -> None:
    """S37: 16 of 16 tokens are present, 15 are answered, all four chunks are loaded; of the window the last two."""
    core = make_core(groups=[full(), window(8)])
    request = core.request(16)
    assert offered(core, request) == 15
    job = load(core, request, [blocks([1, 2, 3, 4]), blocks([0, 0, 7, 8])], 15)
    assert job.keys == (*core.truth.keys(request, 0), *core.truth.keys(request, 1)[2:])
    assert (job.block_ids, job.group_sizes, job.block_indices) == ((1, 2, 3, 4, 7, 8), (4, 2), (0, 2))


def test_s58_leading_placeholders_are_skipped() -> None:
    """S58: a window's table begins with null blocks: they get no data, and their chunks are not loaded."""
    core = make_core(groups=[window(8)])
    request = core.request(17)
    assert offered(core, request) == 16
    job = load(core, request, [blocks([0, 0, 5, 6, 0])], 16)
    assert (job.block_ids, job.block_indices) == ((5, 6), (2,))
    assert job.keys == tuple(core.truth.keys(request)[2:4])


def test_s58_a_window_is_entered_in_the_middle_of_a_chunk() -> None:
    """S58: F=4 and a window of two blocks: of its last chunk only the second half is loaded."""
    core = make_core(factor=4, groups=[window(8)])
    request = core.request(33)
    assert offered(core, request) == 32
    job = load(core, request, [blocks([0, 0, 0, 0, 0, 0, 5, 6, 0])], 32)
    assert job.keys == (core.truth.keys(request)[1],)
    assert (job.block_ids, job.block_indices) == ((5, 6), (6,))
    assert chunk_blocks(job, 4) == [(2, (5, 6))]


def test_a_window_with_too_many_blocks_is_refused() -> None:
    """A window of two chunks of two blocks that begins inside a block has five.

    With six, engine and tierkv disagree about the window, and unwanted chunks would be loaded.
    """
    core = make_core(factor=2, groups=[full(), window(16)])
    request = core.request(33)
    assert offered(core, request) == 32
    rest = blocks(range(1, 10))
    with pytest.raises(EngineProtocolError, match=r"'a', group 1: 6 blocks are to be loaded.* needs 5 at most"):
        core.scheduler.update_state_after_alloc(request, [rest, blocks([0, 0, 13, 14, 15, 16, 17, 18, 0])], 32)
    job = load(core, request, [rest, blocks([0, 0, 0, 0, 15, 16, 17, 18, 0])], 32)
    assert job.group_sizes == (8, 4)


def test_a_hole_in_a_window_is_refused() -> None:
    """A null block behind a real block: a load would write into the shared null block."""
    core = make_core(groups=[window(12)])
    request = core.request(17)
    assert offered(core, request) == 16
    with pytest.raises(EngineProtocolError, match="block 2 is the null block, but block 1 before it") as error:
        core.scheduler.update_state_after_alloc(request, [blocks([0, 5, 0, 6, 7])], 16)
    assert error.value.request_id == request.request_id
    assert load(core, request, [blocks([0, 4, 5, 6, 7])], 16).block_ids == (4, 5, 6)


def test_a_block_that_would_be_loaded_twice_is_refused() -> None:
    """The second chunk would overwrite the first one, and the engine would compute behind other tokens' KV."""
    core = make_core()
    request = core.request(12)
    assert offered(core, request) == 12
    with pytest.raises(EngineProtocolError, match="'a', group 0: two blocks to load have the id 3") as error:
        core.scheduler.update_state_after_alloc(request, [blocks([3, 4, 3])], 12)
    assert error.value.request_id == request.request_id
    assert load(core, request, [blocks([3, 4, 5])], 12).block_ids == (3, 4, 5)


@pytest.mark.parametrize("group", [full(), window(8), ssm()], ids=["full", "window", "state"])
def test_a_null_block_at_the_end_of_a_hit_is_refused(group: GroupSpec) -> None:
    """With nothing but null blocks, the load would end at once, and the engine would compute behind no data."""
    core = make_core(groups=[group])
    request = core.request(17)
    assert offered(core, request) == 16
    for ids in ([0, 0, 0, 0, 5], [0, 0, 0, 0, 0]):
        with pytest.raises(EngineProtocolError, match=r"'a', group 0: block 3 is the null block, .* needs it"):
            core.scheduler.update_state_after_alloc(request, [blocks(ids)], 16)
    core.manager.validate()
    table = [1, 2, 3, 4, 5] if group == full() else [0, 0, 3, 4, 5]
    assert load(core, request, [blocks(table)], 16).block_ids


def test_a_section_that_begins_where_a_hit_ends_needs_no_block() -> None:
    """Chunked local attention: the tokens behind the hit attend to none before it."""
    core = make_core(groups=[local(8)])
    request = core.request(17)
    assert offered(core, request) == 16
    assert not load(core, request, [blocks([0, 0, 0, 0, 5])], 16).keys


@pytest.mark.parametrize(("group", "taken"), [(window(4), 8), (window(4), 14), (ssm(), 8), (ssm(), 15)])
def test_a_part_of_a_windowed_offer_is_refused(group: GroupSpec, taken: int) -> None:
    """A shorter hit needs an earlier window, or another state, which may be absent.

    The engine takes the whole offer or nothing, also if the part ends in the last chunk and all its blocks could be
    filled. The error says so, and nothing has changed.
    """
    core = make_core(groups=[full(), group], tiers=[disk()])
    request = core.request(17)
    core.put([*core.truth.keys(request, 0), core.truth.keys(request, 1)[3]])
    assert core.ask(request) == 16
    with pytest.raises(EngineProtocolError, match=f"'a': {taken} of 16 offered tokens .* take all of them or none"):
        core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4]), blocks([0, 5, 6, 7])], taken)
    assert len(load(core, request, [blocks([1, 2, 3, 4, 9]), blocks([0, 0, 0, 7, 8])], 16).keys) == 5


@st.composite
def allocations(draw: st.DrawFn) -> tuple[list[GroupSpec], int, int, int]:
    """Any groups, blocks per chunk, C in whole largest blocks, and the end of a hit."""
    sizes, windows = st.sampled_from([2, 4, 6]), st.integers(1, 30)
    kinds = st.builds(full, sizes) | st.builds(ssm, sizes) | st.builds(window, windows, sizes)
    groups = draw(st.lists(kinds | st.builds(local, windows, sizes), min_size=1, max_size=3))
    return groups, draw(st.integers(1, 3)), 12 * draw(st.integers(0, 4)), draw(st.integers(1, 100))


def planned(allocation: tuple[list[GroupSpec], int, int, int]) -> tuple[Core, RequestRecord, LoadPlan]:
    """Plan of the load into the tables that an engine would allocate."""
    groups, factor, computed, end = allocation
    core = make_core(groups=groups, factor=factor, hash_block_tokens=2)
    record = core.record(core.request(101))
    assume(end > computed)
    assume(all(group.window_chunks is None or group.allowed_end(end) == end for group in record.search_groups))
    assume(all(end <= len(group.keys) * group.chunk_tokens for group in record.search_groups))
    tables = []
    for group in groups:
        kept = range(first_block(group, end), cdiv(end + 1, group.block_tokens))
        ids = [i + 1 if i in kept else 0 for i in range(kept.stop)]
        tables.append(blocks(ids, filled=computed // group.block_tokens))
    return core, record, plan_load(record, core.geometry, tables, computed, end - computed)


@given(allocations())
def test_s58_what_is_wanted_is_what_the_blocks_need(allocation: tuple[list[GroupSpec], int, int, int]) -> None:
    """Search and engine both know the window: for every hit, the chunks for the engine's blocks were gathered.

    They hold all tokens that the next one attends to.
    """
    _, record, plan = planned(allocation)
    groups, factor, computed, end = allocation
    assert set(plan.keys) <= set(wanted_keys(record.search_groups, computed, end - computed))
    for index, group in enumerate(groups):
        keys = record.groups[index].keys
        for token in attended(group, end):
            assert token < computed or keys[token // (group.block_tokens * factor)] in plan.keys


@given(allocations(), st.data())
def test_a_part_of_a_plan_names_the_blocks_of_its_chunks(
    allocation: tuple[list[GroupSpec], int, int, int], data: st.DataObject
) -> None:
    """A stream sends a plan in parts: each chunk keeps its blocks, its skipped front and its tokens."""
    core, _, plan = planned(allocation)
    per_chunk, chunks = core.geometry.blocks_per_chunk, ChunksOfPlan(plan, core.geometry)
    number = range(len(plan.keys))
    assert chunks.part(number) == plan
    positions = [i for i in number if data.draw(st.booleans())]
    for i, alone in zip(number, chunk_blocks(plan, per_chunk), strict=True):
        assert chunk_blocks(chunks.part([i]), per_chunk) == [alone]
        size = core.geometry.groups[plan.chunk_groups[i]].chunk_tokens
        assert chunks.ends[i] - chunks.starts[i] == size
        assert chunks.starts[i] == chunks.part([i]).block_indices[plan.chunk_groups[i]] // per_chunk * size
    part = chunks.part(positions)
    assert part.keys == tuple(plan.keys[i] for i in positions)
    assert part.block_ids == tuple(block for i in positions for block in chunks.part([i]).block_ids)
    in_order = chunks.in_order()
    assert sorted(in_order) == list(number)
    assert [chunks.ends[i] for i in in_order] == sorted(chunks.ends)


def test_a_part_of_adjacent_chunks_costs_no_call_per_chunk() -> None:
    """The first segment of a long load is one part, made in one call of the engine."""
    calls = set()
    for count in (100, 1000):
        plan = LoadPlan(
            tuple([make_key(b"%d" % i, 0) for i in range(count)]),
            (0,) * count,
            tuple(range(1, count + 1)),
            (count,),
            (0,),
        )
        chunks = ChunksOfPlan(plan, make_core().geometry)
        assert chunks.part(range(count)) == plan
        calls.add(calls_of(chunks.part, list(range(1, count))))
    assert len(calls) == 1


def test_s59_a_placeholder_behind_computed_blocks() -> None:
    """S59: computed, computed, null, then the first block to fill."""
    core = make_core()
    record = core.record(core.request(16))
    plan = plan_load(record, core.geometry, [blocks([3, 4, 0, 6], filled=2)], 8, 8)
    assert (plan.block_ids, plan.block_indices, plan.keys) == ((6,), (3,), (record.groups[0].keys[3],))


def test_s59_what_is_local_is_not_loaded() -> None:
    """S59: blocks before C are computed, also if an engine without a prefix cache gives them no hash."""
    core = make_core()
    record = core.record(core.request(16))
    plan = plan_load(record, core.geometry, [blocks([3, 4, 5, 6])], 8, 8)
    assert (plan.block_ids, plan.block_indices, plan.keys) == ((5, 6), (2,), tuple(record.groups[0].keys[2:]))


def test_s63_groups_keep_their_order() -> None:
    """S63: keys, blocks and sizes of all groups are in group order, so that each byte reaches its group."""
    core = make_core(block_tokens=(2, 4), factor=2)
    request = core.request(16)
    assert offered(core, request) == 16
    job = load(core, request, [blocks(range(1, 9)), blocks(range(11, 15))], 16)
    assert job.chunk_groups == (0, 0, 0, 0, 1, 1)
    assert job.keys == (*core.truth.keys(request, 0), *core.truth.keys(request, 1))
    assert job.block_ids == (*range(1, 9), *range(11, 15))
    assert job.group_sizes == (8, 4)


def test_fewer_tokens_than_offered() -> None:
    """The engine may take a shorter part; the rest is released, not loaded."""
    core = make_core()
    request = core.request(16)
    assert offered(core, request) == 16
    job = load(core, request, [blocks([1, 2])], 8)
    assert job.keys == tuple(core.truth.keys(request)[:2])
    core.report(job.job_id)
    assert core.host.room == core.host.num_slots


def test_blocks_computed_since_the_question() -> None:
    """The GPU has more of the prefix at allocation than at the question: only the rest is loaded."""
    core = make_core()
    request = core.request(16)
    assert offered(core, request) == 16
    job = load(core, request, [blocks([1, 2, 3, 4], filled=3)], 16)
    assert (job.keys, job.block_ids, job.block_indices) == ((core.truth.keys(request)[3],), (4,), (3,))


def test_all_computed_since_the_question() -> None:
    """No chunk is left to load, but the engine waits for the load: an empty job ends it."""
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
        pytest.param([blocks([1, 2, 3, 4])], -1, "-1 external tokens: give 0 or more", id="fewer than none"),
    ],
)
def test_an_engine_that_errs_gets_an_error(tables: list[list[BedBlock]], tokens: int, complaint: str) -> None:
    """A wrong call is refused with its numbers, before anything has changed: the right call still works."""
    core = make_core()
    request = core.request(16)
    assert offered(core, request) == 16
    with pytest.raises(EngineProtocolError, match=complaint) as error:
        core.scheduler.update_state_after_alloc(request, tables, tokens)
    assert error.value.request_id == request.request_id
    assert len(load(core, request, [blocks([1, 2, 3, 4])], 16).keys) == 4


def test_computed_tokens_in_an_unfilled_block() -> None:
    """C <= b0 * block must hold: loading over half a computed block would leave its other half stale."""
    core = make_core()
    request = core.request(16)
    offered(core, request, computed=6)
    with pytest.raises(EngineProtocolError, match="block 1 is unfilled, but 6 tokens are reported as computed"):
        core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4], filled=1)], 10)


def test_nothing_external_loads_nothing() -> None:
    """0 external tokens: no job, and the offer is released."""
    core = make_core()
    request = core.request(8)
    offered(core, request)
    assert core.host.room < core.host.num_slots
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 0)
    assert core.host.room == core.host.num_slots
    assert not core.scheduler.build_connector_meta(StepOutput()).loads


def test_s62_a_load_beside_own_stores_is_refused() -> None:
    """S62: invariant I1: a request never has a load and a store in flight; the error names it."""
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
    """S62: while an answer is deferred nothing is offered, so nothing can be loaded."""
    core = make_core(tiers=[disk()])
    request = core.request(16)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    with pytest.raises(EngineProtocolError, match="0 were offered"):
        core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4])], 16)
    core.finish_all()
    assert core.ask(request) == 16


def test_tokens_are_accounted_to_the_tier_they_came_from() -> None:
    """Demo and metrics show the tokens per tier: two chunks from the host tier, two from below."""
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


@pytest.mark.parametrize(
    ("groups", "served"),
    [
        pytest.param([window(4), full()], {"host": 4, "disk": 12}, id="by-full-attention"),
        pytest.param([window(4), window(8)], {"host": 12, "disk": 4}, id="by-the-widest-window"),
    ],
)
def test_tokens_of_windowed_models_are_accounted(groups: list[GroupSpec], served: dict[str, int]) -> None:
    """Each token counts once, for its tier; tokens before all windows count for the first loaded chunk."""
    core = make_core(groups=groups, tiers=[disk()])
    request = core.request(17)
    keys = core.truth.keys(request, 1)
    core.put([keys[2]])
    core.keep_below([*core.truth.keys(request, 0), *keys[:2], keys[3]])
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 16
    tables = [blocks([i + 1 if i >= first_block(group, 16) else 0 for i in range(5)]) for group in groups]
    load(core, request, tables, 16)
    assert core.counters.tokens_loaded == served


def test_prefix_hits_are_not_stored_again() -> None:
    """Loaded chunks are in a tier: the first chunk offered is the first computed one."""
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
