"""Each invariant of the scheduler is broken once on purpose: a check that sees nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_parts import Core, disk, make_core
from core_pool import blocks

from tierkv.errors import InvariantError
from tierkv.scheduler.request_state import RequestState
from tierkv.types.engine import StepOutput


def busy_core() -> Core:
    """One request stores, one loads, one waits, one has finished and still stores."""
    core = make_core(tiers=[disk()])
    running, done = core.arrive(8, "store"), core.arrive(range(100, 108), "done")
    core.schedule(running, computed=0, scheduled=8, ids=[[1, 2]])
    core.schedule(done, computed=0, scheduled=8, ids=[[11, 12]])
    core.scheduler.request_finished(done, [[11, 12]])
    loader = core.arrive(range(300, 308), "load")
    core.put(core.truth.keys(loader))
    core.ask(loader)
    core.scheduler.update_state_after_alloc(loader, [blocks([21, 22])], 8)
    core.scheduler.build_connector_meta(StepOutput())
    waiter = core.arrive(range(400, 408), "wait")
    core.keep_below(core.truth.keys(waiter))
    assert core.ask(waiter) is None
    return core


def _load_beside_stores(core: Core) -> None:
    core.scheduler._records["load"].store_jobs.add(1)


def _load_that_nobody_waits_for(core: Core) -> None:
    core.scheduler._records["load"].state = RequestState.RUNNING


def _waits_for_no_load(core: Core) -> None:
    core.scheduler._records["store"].state = RequestState.LOADING


def _job_that_ended(core: Core) -> None:
    core.scheduler._records["store"].store_jobs.add(999)


def _job_of_nobody(core: Core) -> None:
    core.scheduler._records["store"].store_jobs.clear()


def _finished_and_kept(core: Core) -> None:
    core.scheduler._records["done"].store_jobs.clear()


def _finished_without_fence(core: Core) -> None:
    (job_id,) = core.scheduler._records["done"].store_jobs
    core.scheduler._fences.lift(job_id)


def _fence_of_an_ended_job(core: Core) -> None:
    (job_id,) = core.scheduler._records["done"].store_jobs
    core.scheduler._jobs.take_back(job_id)
    core.scheduler._records["done"].store_jobs.clear()
    del core.scheduler._records["done"]


def _lookup_of_nobody(core: Core) -> None:
    del core.scheduler._records["wait"]


def _lookup_forgotten(core: Core) -> None:
    core.scheduler._lookups._open.clear()


@pytest.mark.parametrize(
    "breakage",
    [
        _load_beside_stores, _load_that_nobody_waits_for, _waits_for_no_load, _job_that_ended, _job_of_nobody,
        _finished_and_kept, _finished_without_fence, _fence_of_an_ended_job, _lookup_of_nobody, _lookup_forgotten,
    ],
)  # fmt: skip
def test_validate_sees_what_is_broken(breakage: Callable[[Core], None]) -> None:
    """The state before is good; one line later it is not, and validate() says so."""
    core = busy_core()
    core.scheduler.validate()
    breakage(core)
    with pytest.raises(InvariantError):
        core.scheduler.validate()
