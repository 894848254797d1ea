"""What must always hold between requests, jobs, fences and open lookups. Called under test and on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tierkv.errors import require
from tierkv.scheduler.jobs import Fences, JobTable
from tierkv.scheduler.records import RequestRecord
from tierkv.scheduler.request_state import RequestState

_IN_LOOKUP = (RequestState.ASKING, RequestState.GATHERING, RequestState.OFFERED)


def check_scheduler(
    records: Mapping[str, RequestRecord],
    jobs: JobTable,
    fences: Fences,
    in_lookup: Collection[str],
    load_jobs: Callable[[RequestRecord], Collection[int]],
) -> None:
    """Look at requests by id, their jobs and fences, and the ids in the book of open lookups.

    load_jobs: the jobs in flight of a request's load.

    Raises:
        InvariantError: something does not hold; names the request.
    """
    live = jobs.live_ids()
    owned: set[int] = set()
    for request_id, record in records.items():
        what = f"request {request_id!r} ({record.state.value})"
        owned |= _check_jobs(what, record, live, load_jobs(record))
        require((request_id in in_lookup) == (record.state in _IN_LOOKUP), f"{what}: its lookup is out of step")
        for i, group in enumerate(record.groups):
            require(group.next_stored <= len(group.keys), f"{what}: the cursor of group {i} is behind its last chunk")
        if record.state is RequestState.FINISHED:
            require(record.has_jobs, f"{what} waits for nothing")
            for job_id in record.store_jobs:
                require(fences.covers(jobs.job(job_id)), f"{what}: blocks of job {job_id} are not fenced")
    for job_id in jobs.ownerless_ids():
        require(fences.covers(jobs.job(job_id)), f"blocks of job {job_id}, which is no request's, are not fenced")
        owned.add(job_id)
    require(owned == live, f"jobs {sorted(live - owned)} belong to no request")
    require(fences.job_ids <= live, f"jobs {sorted(fences.job_ids - live)} have ended and still fence blocks")
    require(set(in_lookup) <= records.keys(), "an open lookup belongs to no request")


def _check_jobs(what: str, record: RequestRecord, live: frozenset[int], load_jobs: Collection[int]) -> set[int]:
    """Invariant I1, and that its jobs are in flight. Returns their ids."""
    jobs = {*record.store_jobs, *load_jobs}
    require(not record.is_loading or not record.store_jobs, f"{what} has a load and stores in flight")
    loads = record.state in (RequestState.LOADING, RequestState.FINISHED)
    require(not record.is_loading or loads, f"{what} has a load in flight")
    require(record.is_loading or record.state is not RequestState.LOADING, f"{what} has no load in flight")
    require(jobs <= live, f"{what}: jobs {sorted(jobs - live)} have ended")
    return jobs
