"""Engines that keep a finished request's blocks until they are told by request id (spec, sections 0, 13 and 16)."""

from __future__ import annotations

import pytest
from core_blocks import blocks
from core_parts import Core, make_core
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


def test_s113_told_once_after_the_last_store() -> None:
    """S113: two stores, the request ends between their reports: its id is told once, with the second."""
    core = holding_core()
    request, first, second = two_stores(core)
    assert core.report(first.job_id) == LoadReport()
    assert core.scheduler.request_finished(request, [[1, 2]]) == (True, None)
    assert core.scheduler.request_finished(request, [[1, 2]]) == (False, None), "asked twice, it is told once"
    assert core.report(second.job_id).finished_sending == {"a"}
    assert core.report(second.job_id) == LoadReport()
    assert not core.scheduler._records


def test_s113_two_workers_count_before_the_id_is_told() -> None:
    """S113, S84: worker counts decide when a store has ended, whatever the engine counts by."""
    core = holding_core(num_workers=2)
    request, first, second = two_stores(core)
    core.scheduler.request_finished(request, [])
    assert not core.report(first.job_id, second.job_id).finished_sending
    assert not core.report(second.job_id).finished_sending
    assert core.report(first.job_id).finished_sending == {"a"}


def test_s113_the_last_pass_is_waited_for() -> None:
    """S113, S77: the store that the end of the request itself starts counts too."""
    core = holding_core(store_plan="eager")
    request = core.arrive(8)
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    assert core.scheduler.request_finished(request, [[1, 2]]) == (True, None)
    (last,) = core.scheduler.build_connector_meta(StepOutput()).stores
    assert core.report(last.job_id).finished_sending == {"a"}


def test_s113_nothing_pending_is_nothing_to_tell() -> None:
    """A request whose stores were over when it ended gives its blocks back at once, and is never told of."""
    core = holding_core()
    request, first, second = two_stores(core)
    assert not core.report(first.job_id, second.job_id).finished_sending
    assert core.scheduler.request_finished(request, [[1, 2]]) == (False, None)
    assert core.scheduler.update_connector_output(WorkerOutput()) == LoadReport()
    assert core.scheduler.request_finished(core.request(8, "stranger"), [[1]]) == (False, None)


def test_s113_preempted_requests_are_not_told_of() -> None:
    """Only the end of a request is told; a preempted one's stores are flushed and come to nothing else."""
    core = holding_core()
    request, first, second = two_stores(core)
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    assert not core.report(first.job_id, second.job_id).finished_sending
    assert core.scheduler.request_finished(request, []) == (False, None)


def test_s113_loads_are_told_as_received() -> None:
    """finished_recving is what ``finished`` is: also of a request that was aborted while it loaded, which is then not
    told as sent: its blocks would be freed twice."""
    core = holding_core()
    request, load = load_of(core)
    assert core.scheduler.request_finished(request, [[1, 2]]) == (True, None)
    report = core.report(load.job_id)
    assert (report.finished_recving, report.finished_sending) == ({"a"}, set())
    assert core.scheduler.update_connector_output(WorkerOutput()) == LoadReport()


@pytest.mark.parametrize("handed_out", [True, False])
def test_s113_a_reset_does_not_swallow_the_word(handed_out: bool) -> None:
    """S113, S90: the engine waits for the id, whatever became of the store: it ended late, or was never handed out.
    Until then there is work to step for."""
    core = holding_core(store_plan="eager")
    request = core.arrive(8)
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    assert core.scheduler.request_finished(request, []) == (True, None)
    stores = core.scheduler.build_connector_meta(StepOutput()).stores if handed_out else ()
    core.scheduler.reset_cache()
    assert core.scheduler.has_pending_work
    assert core.report(*(job.job_id for job in stores)).finished_sending == {"a"}
    assert not core.scheduler.has_pending_work


def test_s113_without_the_ability_ids_are_never_told() -> None:
    """The default: blocks are free at once, fences guard them, and nobody waits for an id."""
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
    """S116, D8: stores fill the host tier several times over between answer and allocation; all that was offered is
    loaded. Nothing is computed a second time at allocation, so nothing can differ."""
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
    """S116: of what was offered only what the engine takes stays held, and only until its load ends."""
    core = make_core(slots=8)
    request = offered(core)
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2, 3, 4][:held] or [1])], accepted)
    assert core.host.room == 8 - held
    core.report(*(job.job_id for job in core.scheduler.build_connector_meta(StepOutput()).loads))
    assert core.host.room == 8


def test_s116_abort_between_lookup_and_allocation() -> None:
    """S116: the pin goes with the request."""
    core = make_core(slots=8)
    request = offered(core)
    assert core.scheduler.request_finished(request, []) == (False, None)
    assert core.host.room == 8
    assert not core.scheduler._records


def test_s116_preempted_between_lookup_and_allocation() -> None:
    """S116: an engine that says so of a request that waits takes nothing from it; asked again, it answers the same."""
    core = make_core(slots=8)
    request = offered(core)
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    assert core.ask(request) == 16
    assert core.host.room == 4


def test_s46_fewer_hashes_than_tokens() -> None:
    """S46: the lineage calls it an error of the caller. Ours takes it as hashes that are not known yet (S5): what has
    no key is neither found nor stored, and nothing fails."""
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
