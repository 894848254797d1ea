"""Engines that keep a finished request's blocks until the request id is reported (spec, sections 0, 13 and 16)."""

from __future__ import annotations

from functools import partial

import pytest
from calls import calls_of
from core_blocks import blocks
from core_parts import Core, disk, make_core
from core_truth import BedRequest

from tierkv.scheduler.limits import SchedulerLimits
from tierkv.types.engine import LoadReport, StepOutput
from tierkv.types.transfers import TransferJob, WorkerOutput


def holding_core(**limits: object) -> Core:
    """A core whose engine holds the blocks of finished requests."""
    return make_core(limits=SchedulerLimits(delays_free_blocks=True, **limits))  # type: ignore[arg-type]


def two_stores(core: Core) -> tuple[BedRequest, TransferJob, TransferJob]:
    """A request with two stores in flight."""
    request = core.arrive(8)
    (first,) = core.schedule(request, computed=0, scheduled=4, ids=[[1]]).stores
    (second,) = core.schedule(request, computed=4, scheduled=4, ids=[[2]], whole=False).stores
    return request, first, second


def load_of(core: Core) -> tuple[BedRequest, TransferJob]:
    """A request whose load is in flight."""
    request = core.arrive(8)
    core.put(core.truth.keys(request))
    assert core.ask(request) == 8
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 8)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    return request, load


def test_s113_reported_once_after_the_last_store() -> None:
    """S113: two stores, the request ends between their reports: its id is reported once, with the second."""
    core = holding_core()
    request, first, second = two_stores(core)
    assert core.report(first.job_id) == LoadReport()
    assert core.scheduler.request_finished(request, [[1, 2]]) == (True, None)
    assert core.scheduler.request_finished(request, [[1, 2]]) == (False, None), "asked twice, reported once"
    assert core.report(second.job_id).finished_sending == {"a"}
    assert core.report(second.job_id) == LoadReport()
    assert not core.scheduler._records


def test_s113_two_workers_count_before_the_id_is_reported() -> None:
    """S113, S84: a store has ended when all workers reported it."""
    core = holding_core(num_workers=2)
    request, first, second = two_stores(core)
    core.scheduler.request_finished(request, [])
    assert not core.report(first.job_id, second.job_id).finished_sending
    assert not core.report(second.job_id).finished_sending
    assert core.report(first.job_id).finished_sending == {"a"}


def test_s113_the_last_pass_is_waited_for() -> None:
    """S113, S77: a store that starts at the end of the request counts, too."""
    core = holding_core(store_plan="eager")
    request = core.arrive(8)
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    assert core.scheduler.request_finished(request, [[1, 2]]) == (True, None)
    (last,) = core.scheduler.build_connector_meta(StepOutput()).stores
    assert core.report(last.job_id).finished_sending == {"a"}


def test_s113_nothing_pending_is_nothing_to_report() -> None:
    """A request whose stores had ended gives its blocks back at once, and is never reported."""
    core = holding_core()
    request, first, second = two_stores(core)
    assert not core.report(first.job_id, second.job_id).finished_sending
    assert core.scheduler.request_finished(request, [[1, 2]]) == (False, None)
    assert core.scheduler.update_connector_output(WorkerOutput()) == LoadReport()
    assert core.scheduler.request_finished(core.request(8, "stranger"), [[1]]) == (False, None)


def test_s113_preempted_requests_are_not_reported() -> None:
    """Only finished requests are reported; a preempted one's stores are flushed."""
    core = holding_core()
    request, first, second = two_stores(core)
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    assert not core.report(first.job_id, second.job_id).finished_sending
    assert core.scheduler.request_finished(request, []) == (False, None)


def test_s113_loads_are_reported_as_received() -> None:
    """A load is reported in ``finished_recving``, also that of a request aborted during the load.

    It is not reported as sent as well: its blocks would be freed twice.
    """
    core = holding_core()
    request, load = load_of(core)
    assert core.scheduler.request_finished(request, [[1, 2]]) == (True, None)
    report = core.report(load.job_id)
    assert (report.finished_recving, report.finished_sending) == ({"a"}, set())
    assert core.scheduler.update_connector_output(WorkerOutput()) == LoadReport()


@pytest.mark.parametrize("handed_out", [True, False])
def test_s113_a_reset_does_not_swallow_the_report(handed_out: bool) -> None:
    """S113, S90: the id is reported whatever the reset did to the store: it ended late, or was withdrawn.

    Until then the scheduler has pending work.
    """
    core = holding_core(store_plan="eager")
    request = core.arrive(8)
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    assert core.scheduler.request_finished(request, []) == (True, None)
    stores = core.scheduler.build_connector_meta(StepOutput()).stores if handed_out else ()
    core.scheduler.reset_cache()
    assert core.scheduler.has_pending_work
    assert core.report(*(job.job_id for job in stores)).finished_sending == {"a"}
    assert not core.scheduler.has_pending_work


def test_s113_without_the_ability_ids_are_never_reported() -> None:
    """The default: blocks are free at once, fences guard them, and no id is reported."""
    core = make_core()
    request, first, second = two_stores(core)
    assert core.scheduler.request_finished(request, [[1, 2]]) == (False, None)
    assert core.scheduler._fences.jobs_fencing([1]) == {first.job_id}
    assert core.report(first.job_id, second.job_id) == LoadReport()


# -- what is held between answer and allocation ----------------------------------------------------------------------


def offered(core: Core) -> BedRequest:
    """A request that was offered four chunks, which are held for it."""
    request = core.arrive(16)
    core.put(core.truth.keys(request))
    room = core.host.room
    assert core.ask(request) == 16
    assert core.host.room == room - 4
    return request


def test_s116_d8_pinned_between_lookup_and_allocation() -> None:
    """S116, D8: stores fill the host tier several times between answer and allocation; all offered chunks are loaded.

    Nothing is computed a second time at allocation, so nothing can differ.
    """
    core = make_core(slots=8)
    request = offered(core)
    for i in range(5):
        core.put(core.truth.keys(core.request(range(100 * i + 100, 100 * i + 116), "x")))
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4])], 16)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    assert load.keys == tuple(core.truth.keys(request))
    core.report(load.job_id)
    assert core.host.room == 8


@pytest.mark.parametrize(("accepted", "held"), [(0, 0), (4, 1), (8, 2), (16, 4)])
def test_s116_fewer_tokens_than_offered(accepted: int, held: int) -> None:
    """S116: only the chunks that the engine takes stay held, and only until the load ends."""
    core = make_core(slots=8)
    request = offered(core)
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4][:held] or [1])], accepted)
    assert core.host.room == 8 - held
    core.report(*(job.job_id for job in core.scheduler.build_connector_meta(StepOutput()).loads))
    assert core.host.room == 8


def test_s116_abort_between_lookup_and_allocation() -> None:
    """S116: the pins are removed with the request."""
    core = make_core(slots=8)
    request = offered(core)
    assert core.scheduler.request_finished(request, []) == (False, None)
    assert core.host.room == 8
    assert not core.scheduler._records


def test_s116_preempted_between_lookup_and_allocation() -> None:
    """S116: preempting a waiting request changes nothing; asked again, its answer is the same."""
    core = make_core(slots=8)
    request = offered(core)
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    assert core.ask(request) == 16
    assert core.host.room == 4


def test_s46_fewer_hashes_than_tokens() -> None:
    """S46: missing hashes are hashes not known yet (S5), where the lineage reports an error.

    Chunks without a key are neither found nor stored, and nothing fails.
    """
    core = make_core()
    request = core.arrive(16)
    keys = core.truth.keys(request)
    core.put(keys)
    request.hashes_withheld = 2
    assert core.ask(request) == 8
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4])], 0)
    core.manager.reset_cache()
    (store,) = core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]]).stores
    assert store.keys == tuple(keys[:2])


def test_a_large_store_is_taken_in_within_the_budget_of_each_step() -> None:
    """A report of many chunks must not make one step long; the rest follows by itself, the tail of the prefix first."""
    core = make_core(slots=256, limits=SchedulerLimits(delays_free_blocks=True))
    core.manager.budget.keys_max = 8
    request = core.arrive(160)
    (job,) = core.schedule(request, computed=0, scheduled=160, ids=[list(range(1, 41))]).stores
    core.scheduler.request_finished(request, [])
    core.begin()
    report, steps, known = core.report(job.job_id), 1, 0
    keys = core.truth.keys(request)
    while core.scheduler.has_transfers:
        assert report == LoadReport()
        ready = core.ready()
        assert 0 < len(ready) - known <= 8
        assert ready == set(keys[-len(ready) :])
        known, steps = len(ready), steps + 1
        core.scheduler.validate()
        core.begin()
        if len(core.ready()) == len(keys):
            break
    assert steps >= len(keys) // 8
    assert core.report().finished_sending == {"a"}
    assert core.counters.tokens_stored == 160
    assert not core.scheduler.has_transfers


def test_the_end_of_a_store_costs_as_much_as_a_chunk() -> None:
    """A stall of the copies ends with many small stores, each of a request of its own that is forgotten with it."""
    core = make_core(slots=256)
    core.manager.budget.keys_max = 40
    jobs = []
    for number in range(60):
        request = core.arrive(range(4 * number, 4 * number + 4), f"r{number}")
        jobs += core.schedule(request, computed=0, scheduled=4, ids=[[number + 1]]).stores
        core.scheduler.request_finished(request, [])
    core.begin()
    core.report(*[job.job_id for job in jobs])
    left, ended = len(core.scheduler._jobs), []
    while core.scheduler.has_transfers:
        core.begin()
        left, before = len(core.scheduler._jobs), left
        ended.append(before - left)
        assert len(core.scheduler._records) == left
    assert len(jobs) == 60
    assert max(ended) <= 40 // 3
    assert not core.scheduler.has_transfers


def test_an_ended_load_is_not_put_off() -> None:
    """The engine may schedule its request in the next step."""
    core = make_core()
    core.manager.budget.keys_max = 1
    request, load = load_of(core)
    assert core.report(load.job_id).finished == {"a"}
    core.schedule(request, computed=8, scheduled=1, ids=[[1, 2, 3]])


def test_a_reset_while_a_store_is_partly_taken_in() -> None:
    """Nothing of it is readable afterwards, and all slots become free."""
    core = make_core(slots=256)
    core.manager.budget.keys_max = 8
    request = core.arrive(160)
    (job,) = core.schedule(request, computed=0, scheduled=160, ids=[list(range(1, 41))]).stores
    core.begin()
    core.report(job.job_id)
    core.scheduler.reset_cache()
    for _ in range(40):
        core.begin()
        core.scheduler.build_connector_meta(StepOutput())
    core.scheduler.validate()
    assert not core.ready()
    assert not core.scheduler.has_transfers
    assert core.host.free == 256


def test_a_flush_takes_in_everything() -> None:
    """It is no step, and what is not taken in would be lost."""
    core = make_core(slots=256)
    core.manager.budget.keys_max = 8
    request = core.arrive(160)
    (job,) = core.schedule(request, computed=0, scheduled=160, ids=[list(range(1, 41))]).stores
    core.report(job.job_id)
    core.scheduler.end_stores()
    assert core.ready() == set(core.truth.keys(request))


def ended_stores(count: int, core: Core | None = None) -> tuple[Core, list[TransferJob]]:
    """Core with stores of two chunks each that have ended and are not taken in."""
    core = make_core(tiers=[disk()]) if core is None else core
    jobs = []
    for number in range(count):
        request = core.arrive(range(100 * number, 100 * number + 8), f"request {number}")
        ids = [[1 + 2 * number, 2 + 2 * number]]
        jobs += core.schedule(request, computed=0, scheduled=8, ids=ids).stores
    core.scheduler.update_connector_output(WorkerOutput({job.job_id: 1 for job in jobs}), holds_stores=True)
    return core, jobs


def test_stores_that_end_together_are_taken_in_together() -> None:
    """Requests that decode side by side end their stores in one step; a batch costs less than its jobs one by one."""
    counts = []
    for stores in (1, 8):
        core, jobs = ended_stores(stores)
        counts.append(calls_of(core.scheduler.end_stores))
        assert core.ready() == {key for job in jobs for key in job.keys}
        assert not core.scheduler.has_transfers
    assert counts[1] < 4 * counts[0]


def test_the_report_of_an_ended_store_makes_two_calls() -> None:
    """Ten thousand stores may be reported at once. Each is only noted; later steps take its chunks in."""
    counts = []
    for stores in (1, 9):
        core = make_core(slots=64)
        jobs: list[int] = []
        for number in range(stores):
            request = core.arrive(range(100 * number, 100 * number + 8), f"store {number}")
            ids = [[2 * number + 1, 2 * number + 2]]
            jobs += [job.job_id for job in core.schedule(request, computed=0, scheduled=8, ids=ids).stores]
        output = WorkerOutput(dict.fromkeys(jobs, 1))
        counts.append(calls_of(partial(core.scheduler.update_connector_output, output, holds_stores=True)))
    assert len(jobs) == 9
    assert counts[1] - counts[0] <= 2 * 8


def test_a_failed_chunk_takes_no_other_store_with_it() -> None:
    """The stores of a step are taken in together; the failure of one is its own."""
    core, jobs = ended_stores(2)
    third = core.arrive(range(500, 508), "third")
    (failing,) = core.schedule(third, computed=0, scheduled=8, ids=[[11, 12]]).stores
    failed = {failing.job_id: frozenset(failing.keys[1:])}
    core.scheduler.update_connector_output(WorkerOutput({failing.job_id: 1}, failed), holds_stores=True)
    core.scheduler.end_stores()
    assert core.ready() == {key for job in jobs for key in job.keys} | {failing.keys[0]}
    assert core.counters.stores_failed == 1
    core.scheduler.validate()


def test_a_budget_ends_a_batch_in_the_middle_of_a_store() -> None:
    """A later step takes in the rest, and each store ends once."""
    core, jobs = ended_stores(4, make_core(step_keys=8, tiers=[disk()]))
    steps = 0
    while core.scheduler._completions.has_stores:
        core.begin()
        core.manager.take_ops()
        core.scheduler.validate()
        steps += 1
    assert steps > 1
    assert core.ready() == {key for job in jobs for key in job.keys}
    assert not core.scheduler.has_transfers


def loads_of(core: Core, count: int) -> list[TransferJob]:
    """Loads of that many requests, in flight; two requests each load the same chunks."""
    jobs = []
    for number in range(count):
        request = core.arrive([number // 2] * 8, f"load {number}")
        core.put(core.truth.keys(request))
        assert core.ask(request) == 8
        core.scheduler.update_state_after_alloc(request, [blocks([2 * number + 1, 2 * number + 2])], 8)
        jobs += core.scheduler.build_connector_meta(StepOutput()).loads
    return jobs


def test_loads_that_are_reported_together_are_taken_in_together() -> None:
    """In a busy step most loads end together: a batch of them costs about as much as one job."""
    counts = []
    for count in (2, 8):
        core = make_core(slots=64, limits=SchedulerLimits(gpu_prefix_caching=False))
        jobs = loads_of(core, count)
        assert len(jobs) == count
        output = WorkerOutput({job.job_id: 1 for job in jobs})
        counts.append(calls_of(core.scheduler.update_connector_output, output))
        core.scheduler.validate()
        assert core.manager.host_is_idle, "also the slots that two loads held"
        assert not core.scheduler.has_transfers
    assert counts[1] < 2.7 * counts[0]


def test_of_loads_that_are_reported_together_one_may_fail() -> None:
    """The chunks of the others stay, and only those of the failed one are dropped."""
    core = make_core(slots=64, limits=SchedulerLimits(gpu_prefix_caching=False))
    jobs = loads_of(core, 6)
    bad = jobs[2].keys[1]
    report = core.report(*[job.job_id for job in jobs], failed={jobs[2].job_id: frozenset({bad})})
    core.scheduler.validate()
    assert report.finished_recving == {f"load {number}" for number in range(6)}
    assert core.ready() == {key for job in jobs for key in job.keys} - {bad}
    assert core.manager.host_is_idle
