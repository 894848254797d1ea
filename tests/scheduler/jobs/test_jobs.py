"""Jobs from their start to the last worker's report, and the fences that outlive requests (spec, sections 9 to 13)."""

from __future__ import annotations

import pytest
from core_blocks import blocks
from core_parts import Core, make_core
from group_parts import full, window
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.errors import EngineProtocolError
from tierkv.scheduler.jobs.jobs import Fences, JobTable
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.types.engine import LoadReport, StepOutput
from tierkv.types.keys import Key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput


def preempt(core: Core, *request_ids: str) -> ConnectorMeta:
    """Step in which these requests are preempted."""
    return core.scheduler.build_connector_meta(StepOutput(preempted=frozenset(request_ids)))


def stored(core: Core, tokens: int = 8, request_id: str = "a", first_block: int = 1) -> TransferJob:
    """A request computes all its tokens in one step; its store job."""
    request = core.arrive(range(1000 * first_block, 1000 * first_block + tokens), request_id)
    ids = [range(first_block, first_block + tokens // 4)]
    (job,) = core.schedule(request, computed=0, scheduled=tokens, ids=ids).stores
    return job


def finish(core: Core, request_id: str) -> None:
    """A request ends."""
    core.scheduler.request_finished(core.scheduler._records[request_id].request, [])


def test_s79_preempted_with_two_stores() -> None:
    """S79: its blocks are about to be reused, so both stores are flushed in this step."""
    core = make_core()
    request = core.arrive(8)
    (first,) = core.schedule(request, computed=0, scheduled=4, ids=[[1]]).stores
    (second,) = core.schedule(request, computed=4, scheduled=4, ids=[[2]], whole=False).stores
    assert preempt(core, "a").jobs_to_flush == {first.job_id, second.job_id}


def test_s80_preempted_and_unknown() -> None:
    """S80: an engine may name a request that it never registered."""
    core = make_core()
    assert preempt(core, "unknown") == ConnectorMeta()


def test_s81_all_requests_finished() -> None:
    """S81: possibly no step follows, so jobs in flight are flushed, loads too, each once."""
    core = make_core()
    store = stored(core)
    loader = core.arrive(8, "b")
    core.put(core.truth.keys(loader))
    assert core.ask(loader) == 8
    core.scheduler.update_state_after_alloc(loader, [blocks([5, 6])], 8)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    finish(core, "a")
    assert not core.scheduler.build_connector_meta(StepOutput()).jobs_to_flush
    finish(core, "b")
    assert core.scheduler.build_connector_meta(StepOutput()).jobs_to_flush == {store.job_id, load.job_id}


def test_s81_many_copies_are_flushed_over_several_steps() -> None:
    """S81: the engine waits for some milliseconds in each step, where it waited for 700 in one."""
    chunk_bytes = make_core().geometry.payload_bytes_max
    core = make_core(limits=SchedulerLimits(job_bytes_max=3 * chunk_bytes))
    jobs = [stored(core, request_id=name, first_block=block) for name, block in (("a", 1), ("b", 3), ("c", 5))]
    assert [len(job.keys) for job in jobs] == [2, 2, 2]
    for name in ("a", "b", "c"):
        finish(core, name)
    for job in jobs:
        assert core.scheduler.has_pending_work
        assert core.scheduler.build_connector_meta(StepOutput()).jobs_to_flush == {job.job_id}
        core.scheduler.update_connector_output(WorkerOutput({job.job_id: 1}))
        core.scheduler.end_stores()
    assert not core.scheduler.has_pending_work
    assert core.scheduler.build_connector_meta(StepOutput()) == ConnectorMeta()


def test_s82_an_empty_step() -> None:
    """S82: a step without work has empty instructions."""
    core = make_core()
    assert core.scheduler.build_connector_meta(StepOutput()) == ConnectorMeta()


def test_s83_steps_do_not_leak_into_each_other() -> None:
    """S83: a job is handed out once, as a snapshot that later scheduling does not change."""
    core = make_core()
    request = core.arrive(8)
    core.put(core.truth.keys(request))
    core.ask(request)
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 8)
    first = core.scheduler.build_connector_meta(StepOutput())
    copy = ConnectorMeta(first.loads, first.stores, first.jobs_to_flush)
    second = stored(core, request_id="b", first_block=5)
    assert first == copy
    assert [job.job_id for job in first.loads] != [second.job_id]
    assert core.scheduler.build_connector_meta(StepOutput()) == ConnectorMeta()


def test_s84_several_workers() -> None:
    """S84: four workers report 1 + 2 + 1 over three steps: one completion; a fifth report is an error."""
    core = make_core(limits=SchedulerLimits(num_workers=4))
    job = stored(core)
    for count in (1, 2):
        core.scheduler.update_connector_output(WorkerOutput({job.job_id: count}))
        assert not core.ready()
    core.scheduler.update_connector_output(WorkerOutput({job.job_id: 1}))
    assert core.ready() == set(job.keys)
    core.report(job.job_id)  # a job that is done is unknown, and unknown ids are ignored
    other = stored(core, request_id="b", first_block=5)
    with pytest.raises(EngineProtocolError, match=f"job {other.job_id} was reported by more workers"):
        core.scheduler.update_connector_output(WorkerOutput({other.job_id: 5}))


def test_s84_one_failing_worker_fails_the_chunk() -> None:
    """S84, S114: a chunk is whole only if every worker's part is: one failed part makes it a miss."""
    core = make_core(limits=SchedulerLimits(num_workers=2))
    job = stored(core)
    core.report(job.job_id, failed={job.job_id: frozenset({job.keys[1]})})
    core.report(job.job_id)
    assert core.ready() == {job.keys[0]}
    assert core.host.room == core.host.num_slots


@pytest.mark.parametrize("count", [0, -1])
def test_s84_empty_counts(count: int) -> None:
    """S84: a report of no workers completes nothing."""
    core = make_core()
    job = stored(core)
    core.scheduler.update_connector_output(WorkerOutput({job.job_id: count}))
    assert not core.ready()


def test_s85_completion_after_the_end_of_the_request() -> None:
    """S85: the last report of a finished request empties every map: nothing leaks."""
    core = make_core()
    job = stored(core)
    finish(core, "a")
    scheduler = core.scheduler
    assert scheduler._records
    assert len(scheduler._fences) == 2
    core.report(job.job_id)
    assert not scheduler._records
    assert not len(scheduler._jobs)
    assert not len(scheduler._fences)
    assert not scheduler._lookups._open


def test_s86_completion_before_the_end_of_the_request() -> None:
    """S86: a request whose stores have ended continues."""
    core = make_core()
    core.report(stored(core).job_id)
    assert list(core.scheduler._records) == ["a"]
    finish(core, "a")
    assert not core.scheduler._records


def test_s87_stale_and_live_ids_in_one_report() -> None:
    """S87: jobs started before a reset make no chunk readable, jobs started after it do.

    The lineage ignores stale ids; here their reports also free the slots of those jobs, and change nothing else.
    """
    core = make_core(slots=8)
    stale = stored(core)
    core.scheduler.reset_cache()
    live = stored(core, request_id="b", first_block=5)
    core.report(stale.job_id, live.job_id, 77)
    assert core.ready() == set(live.keys)
    assert core.host.room == core.host.num_slots


def test_s88_d2_a_block_under_two_fences() -> None:
    """S88, D2: a block that two jobs read stays fenced until both have ended, also if a job lists it twice."""
    core = make_core()
    fences = Fences()
    job = stored(core)
    twice = TransferJob(2, "b", True, job.keys, job.slots, (0, 0), (1, 1), (2,), (0,))
    fences.fence_blocks(job)
    fences.fence_blocks(twice)
    fences.fence_blocks(twice)
    fences.lift_fences(job.job_id)
    assert fences.jobs_fencing([1, 2]) == {2}
    fences.lift_fences(2)
    fences.lift_fences(2)
    fences.lift_fences(3)
    assert not len(fences)


def test_s60_a_load_into_a_block_that_is_still_read() -> None:
    """S60: the block of a finished request is given to a load: its store is flushed in the same metadata."""
    core = make_core()
    store = stored(core)
    finish(core, "a")
    request = core.arrive(8, "b")
    core.put(core.truth.keys(request))
    assert core.ask(request) == 8
    core.scheduler.update_state_after_alloc(request, [blocks([9, 2])], 8)
    meta = core.scheduler.build_connector_meta(StepOutput())
    assert meta.jobs_to_flush == {store.job_id}
    assert meta.loads


def test_s60_compute_into_a_block_that_is_still_read() -> None:
    """S60, for a request that computes into the block."""
    core = make_core()
    store = stored(core)
    finish(core, "a")
    other = core.arrive(range(50, 58), "b")
    assert core.schedule(other, computed=0, scheduled=4, ids=[[9]]).jobs_to_flush == set()
    assert core.schedule(other, computed=4, scheduled=4, ids=[[2]], whole=False).jobs_to_flush == {store.job_id}


def test_s60_a_block_that_an_abandoned_load_still_fills() -> None:
    """S60 in reverse: after an abort during a load its blocks are fenced, and writers wait for the load."""
    core = make_core()
    request = core.arrive(8)
    core.put(core.truth.keys(request))
    core.ask(request)
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 8)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    finish(core, "a")
    other = core.arrive(range(50, 58), "b")
    assert core.schedule(other, computed=0, scheduled=8, ids=[[2, 3]]).jobs_to_flush == {load.job_id}
    assert core.report(load.job_id).finished == {"a"}, "the engine keeps the blocks until it gets this report"


def test_a_null_block_is_never_fenced() -> None:
    """Block 0 is in every table and is never written: writing it flushes nothing."""
    fences = Fences()
    fences.fence_blocks(TransferJob(1, "a", True, (), (), (), (0, 5), (2,), (0,)))
    assert fences.jobs_fencing([0]) == set()


def test_d7_asked_again_while_own_stores_are_in_flight() -> None:
    """D7, S48: a preempted request is asked about before its stores have ended: deferred, without an error."""
    core = make_core()
    job = stored(core)
    preempt(core, "a")
    request = core.scheduler._records["a"].request
    assert core.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    core.report(job.job_id)
    assert core.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)


def test_d4_failed_load_names_the_blocks() -> None:
    """D4: a chunk failed on its way to the GPU: its blocks are invalid, the others valid.

    Both chunks are offered for storing again when they have been recomputed.
    """
    core = make_core(factor=2)
    request = core.arrive(16)
    keys = core.truth.keys(request)
    core.put(keys)
    core.ask(request)
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4])], 16)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    report = core.report(load.job_id, failed={load.job_id: frozenset({keys[1]})})
    assert report == LoadReport(frozenset({"a"}), frozenset({3, 4}))
    assert core.ready() == {keys[0]}
    (store,) = core.schedule(request, computed=8, scheduled=8, ids=[[1, 2, 3, 4]]).stores
    assert store.keys == (keys[1],)


def test_an_id_that_still_loads_is_refused() -> None:
    """The end of the earlier load is not reported yet under this id: its report would be ambiguous."""
    core = make_core()
    request = core.arrive(8)
    core.put(core.truth.keys(request))
    core.ask(request)
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 8)
    (job,) = core.scheduler.build_connector_meta(StepOutput()).loads
    finish(core, "a")
    with pytest.raises(EngineProtocolError, match="use another id"):
        core.arrive(4, "a")
    assert core.report(job.job_id).finished == {"a"}
    core.arrive(4, "a")


def test_an_id_whose_blocks_are_held_is_refused() -> None:
    """The engine still keeps blocks under this id: the report that they are free would be ambiguous."""
    core = make_core(limits=SchedulerLimits(delays_free_blocks=True))
    job = stored(core)
    finish(core, "a")
    with pytest.raises(EngineProtocolError, match="use another id"):
        core.arrive(4, "a")
    assert core.report(job.job_id).finished_sending == {"a"}
    core.arrive(4, "a")


def test_an_id_is_free_while_the_last_store_of_its_request_runs() -> None:
    """Users reuse an id as soon as they have their answer: remaining stores then belong to no request.

    Their blocks stay fenced, and their end does not concern the new request.
    """
    core = make_core()
    job = stored(core)
    finish(core, "a")
    again = core.arrive(8, "a")
    core.scheduler.validate()
    meta = core.schedule(again, computed=0, scheduled=8, ids=[[1, 2]])
    assert job.job_id in meta.jobs_to_flush
    core.report(job.job_id)
    core.scheduler.validate()
    assert set(job.keys) <= core.ready()
    account = core.scheduler.request_account("a")
    assert account is not None
    assert account.stored_tokens == 0
    finish(core, "a")
    core.report(*(store.job_id for store in meta.stores))
    assert not core.scheduler._records
    assert not core.scheduler.has_pending_work


def test_an_empty_id_is_refused() -> None:
    """The empty id marks jobs of no request, so no request may have it."""
    with pytest.raises(EngineProtocolError, match="empty id"):
        make_core().arrive(4, "")


def test_only_new_blocks_of_a_request_that_was_asked_about_again() -> None:
    """Asking about a running request makes tierkv forget its table: new blocks alone are refused.

    They would be at the front of the table, and chunks stored under wrong keys. Nothing has changed after the error.
    """
    core = make_core()
    request = core.arrive(16)
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    core.ask(request, 8)
    with pytest.raises(EngineProtocolError, match="'a' was scheduled with 8 computed tokens and only its new blocks"):
        core.schedule(request, computed=8, scheduled=8, ids=[[3, 4]], whole=False)
    (job,) = core.schedule(request, computed=8, scheduled=8, ids=[[1, 2, 3, 4]]).stores
    assert job.keys == tuple(core.truth.keys(request)[2:])
    assert job.block_ids == (3, 4)


def test_a_request_that_begins_again_with_a_second_table() -> None:
    """Of an engine that named no preemption, chunks were once stored from blocks of another request."""
    core = make_core()
    request = core.arrive(16)
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    with pytest.raises(EngineProtocolError, match=r"'a' had 8 tokens, .* with blocks for all of them and without repl"):
        core.schedule(request, computed=0, scheduled=16, ids=[[3, 4, 5, 6]], whole=False)
    (job,) = core.schedule(request, computed=0, scheduled=16, ids=[[3, 4, 5, 6]]).stores
    assert job.block_ids == (5, 6)


def test_a_request_that_begins_again_in_its_own_blocks() -> None:
    """An engine does so after a failed load of another connector: it gets only the blocks that it lacks."""
    core = make_core()
    request = core.arrive(16)
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    core.schedule(request, computed=0, scheduled=8, ids=[[]], whole=False)
    (job,) = core.schedule(request, computed=0, scheduled=16, ids=[[3, 4]], whole=False).stores
    assert job.block_ids == (3, 4)


def test_only_new_blocks_of_a_request_that_was_loaded() -> None:
    """The table of a loaded request is known from its first step only.

    That holds also if no group needs a table as long as the tokens.
    """
    core = make_core(groups=[window(4)])
    request = core.arrive(17)
    core.put(core.truth.keys(request)[3:])
    assert core.ask(request) == 16
    core.scheduler.update_state_after_alloc(request, [blocks([0, 0, 0, 4, 5])], 16)
    (job,) = core.scheduler.build_connector_meta(StepOutput()).loads
    core.report(job.job_id)
    with pytest.raises(EngineProtocolError, match="only its new blocks"):
        core.schedule(request, computed=16, scheduled=1, ids=[[5]], whole=False)
    core.schedule(request, computed=16, scheduled=1, ids=[[0, 0, 0, 4, 5]])


@pytest.mark.parametrize("whole", [True, False])
def test_a_table_that_is_too_short(whole: bool) -> None:
    """Blocks missing in the middle of a table shift all that follow: wrong bytes would be stored."""
    core = make_core(groups=[full(), window(4)])
    request = core.arrive(16)
    core.schedule(request, computed=0, scheduled=4, ids=[[1], [11]])
    ids = [[1, 3, 4], [0, 0, 13, 14]] if whole else [[3, 4], [12, 13, 14]]
    with pytest.raises(EngineProtocolError, match="'a', group 0: 3 blocks for 16 tokens, 4 are needed"):
        core.schedule(request, computed=4, scheduled=12, ids=ids, whole=whole)


def test_a_failed_load_of_a_windowed_model_is_reported_whole() -> None:
    """An engine computes from the first invalid block on.

    Of a window only the end was loaded, so with one failed chunk of full attention it would use unfilled blocks.
    """
    core = make_core(groups=[full(), window(8)])
    request = core.arrive(17)
    keys = [core.truth.keys(request, 0), core.truth.keys(request, 1)]
    core.put([*keys[0], *keys[1][2:]])
    assert core.ask(request) == 16
    tables = [blocks([1, 2, 3, 4, 5]), blocks([0, 0, 13, 14, 15])]
    core.scheduler.update_state_after_alloc(request, tables, 16)
    (job,) = core.scheduler.build_connector_meta(StepOutput()).loads
    report = core.report(job.job_id, failed={job.job_id: frozenset({keys[0][2]})})
    assert report.finished == {"a"}
    assert report.invalid_block_ids == {1, 2, 3, 4, 13, 14}
    assert core.counters.loads_failed == 1


def test_scheduled_before_its_load_ended() -> None:
    """The engine must wait for the load: computing from half-loaded blocks would give wrong bytes."""
    core = make_core()
    request = core.arrive(8)
    core.put(core.truth.keys(request))
    core.ask(request)
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 8)
    with pytest.raises(EngineProtocolError, match="before its load had ended"):
        core.schedule(request, computed=7, scheduled=1, ids=[[1, 2]])


def test_unknown_requests_do_no_harm() -> None:
    """An engine may finish or schedule an unregistered request, and finish a request twice."""
    core = make_core()
    stranger = core.request(8, "stranger")
    assert core.scheduler.request_finished(stranger, [[1, 2]]) == (False, None)
    assert not core.schedule(stranger, computed=0, scheduled=8, ids=[[1, 2]]).stores
    job = stored(core)
    finish(core, "a")
    finish(core, "a")
    core.report(job.job_id)


class FenceMachine(RuleBasedStateMachine):
    """Fences against a dict of sets: with a lost fence, a block under a running copy is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.fences = Fences()
        self.jobs: dict[int, tuple[int, ...]] = {}

    @rule(job_id=st.integers(1, 6), ids=st.lists(st.integers(0, 8), max_size=5))
    def put(self, job_id: int, ids: list[int]) -> None:
        known = self.jobs.setdefault(job_id, tuple(ids))
        self.fences.fence_blocks(TransferJob(job_id, "r", True, (), (), (), known, (len(known),), (0,)))

    @rule(job_id=st.integers(1, 7))
    def lift(self, job_id: int) -> None:
        self.jobs.pop(job_id, None)
        self.fences.lift_fences(job_id)

    @invariant()
    def crossed(self) -> None:
        for block in range(9):
            assert self.fences.jobs_fencing([block]) == {
                job for job, ids in self.jobs.items() if block and block in ids
            }

    def teardown(self) -> None:
        for job_id in list(self.jobs):
            self.fences.lift_fences(job_id)
        assert not len(self.fences)


TestFences = FenceMachine.TestCase


def test_ids_are_never_used_twice() -> None:
    """A late report of an old job must not complete a new one."""
    table = JobTable(1)
    ids = []
    for _ in range(3):
        ids.append(table.new_id())
        table.start_job(TransferJob(ids[-1], "r", True, (Key(b"k"),), (), (0,), (1,), (1,), (0,)))
        assert table.report_job(ids[-1], 1, frozenset()) is not None
        assert table.report_job(ids[-1], 1, frozenset()) is None
    assert ids == sorted(set(ids))
