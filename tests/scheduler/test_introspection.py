"""Each invariant of the scheduler is broken once on purpose, so that the check is seen to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from core_blocks import blocks
from core_parts import Core, disk, make_core

from tierkv.errors import InvariantError
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.types.engine import StepOutput
from tierkv.types.transfers import NO_REQUEST


def busy_core() -> Core:
    """Core where one request stores, one loads, one waits, and one has finished and still stores."""
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


def _load_that_no_request_waits_for(core: Core) -> None:
    core.scheduler._records["load"].state = RequestState.RUNNING


def _waits_for_no_load(core: Core) -> None:
    core.scheduler._records["store"].state = RequestState.LOADING


def _job_that_ended(core: Core) -> None:
    core.scheduler._records["store"].store_jobs.add(999)


def _job_without_owner(core: Core) -> None:
    core.scheduler._records["store"].store_jobs.clear()


def _finished_and_kept(core: Core) -> None:
    core.scheduler._records["done"].store_jobs.clear()


def _finished_without_fence(core: Core) -> None:
    (job_id,) = core.scheduler._records["done"].store_jobs
    core.scheduler._fences.lift_fences(job_id)


def _fence_of_an_ended_job(core: Core) -> None:
    (job_id,) = core.scheduler._records["done"].store_jobs
    core.scheduler._jobs.remove(job_id)
    core.scheduler._records["done"].store_jobs.clear()
    del core.scheduler._records["done"]


def _lookup_of_nobody(core: Core) -> None:
    del core.scheduler._records["wait"]


def _lookup_forgotten(core: Core) -> None:
    core.scheduler._lookups._open.clear()


def _cursor_behind_the_last_chunk(core: Core) -> None:
    core.scheduler._records["store"].groups[0].next_stored = 9


def _fence_without_its_job(core: Core) -> None:
    core.scheduler._fences._jobs_by_block.pop(11)


def _job_of_no_request_without_fence(core: Core) -> None:
    (job_id,) = core.scheduler._records["done"].store_jobs
    status = core.scheduler._jobs._live[job_id]
    status.job = replace(status.job, request_id=NO_REQUEST)
    core.scheduler._fences.lift_fences(job_id)
    del core.scheduler._records["done"]


def _window_block_in_no_table(core: Core) -> None:
    core.scheduler._tables._windows.add_table(core.scheduler._records["store"].groups[0], 0)
    core.scheduler._records["store"].groups[0].block_ids[1] = 77


@pytest.mark.parametrize(
    "breakage",
    [
        _load_beside_stores, _load_that_no_request_waits_for, _waits_for_no_load, _job_that_ended, _job_without_owner,
        _finished_and_kept, _finished_without_fence, _fence_of_an_ended_job, _lookup_of_nobody, _lookup_forgotten,
        _cursor_behind_the_last_chunk, _fence_without_its_job, _job_of_no_request_without_fence,
        _window_block_in_no_table,
    ],
)  # fmt: skip
def test_validate_sees_what_is_broken(breakage: Callable[[Core], None]) -> None:
    """The state is valid before; after one line it is not, and validate() raises."""
    core = busy_core()
    core.scheduler.validate()
    breakage(core)
    with pytest.raises(InvariantError):
        core.scheduler.validate()
