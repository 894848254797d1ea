"""What a record wants to know of the scheduler, above all why a lookup was answered so. Nothing depends on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tierkv.errors import require
from tierkv.manager.manager import OffloadManager
from tierkv.scheduler.jobs.jobs import Fences, JobTable
from tierkv.scheduler.requests.record import RequestRecord, Watcher
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.types.keys import Key


@dataclass(frozen=True, slots=True)
class AnswerNote:
    """The reason for an answer.

    wanted: the chunks that a deferred or offered hit is made of; of one that is gathered in part, because its load will
    stream, that part while it is gathered. ready: how many of them, from the front, are readable in the host tier.
    missing: the first chunk behind the hit, if the request has one.
    """

    reason: str
    wanted: tuple[Key, ...] = ()
    ready: int = 0
    missing: Key | None = None


class SchedulerView:
    """Looks at the scheduler's books, on its thread.

    Attributes:
        watcher: is told of each change of a request that arrives from now on; None: nobody is.
    """

    def __init__(self, manager: OffloadManager, records: Mapping[str, RequestRecord], jobs: JobTable) -> None:
        self.watcher: Watcher | None = None
        self._manager = manager
        self._records = records
        self._jobs = jobs

    def explain_answer(self, request_id: str, tokens: int | None) -> AnswerNote:
        """Why a lookup was just answered with ``tokens``."""
        return explain_answer(self._records[request_id], self._manager, tokens)

    def has_job(self, job_id: int) -> bool:
        """Whether a transfer is in flight."""
        return job_id in self._jobs.live_ids()


def explain_answer(record: RequestRecord, manager: OffloadManager, tokens: int | None) -> AnswerNote:
    """The reason for the answer that was just given. O(wanted chunks)."""
    if tokens is not None:
        group = record.groups[0]
        behind = (record.computed_tokens + tokens) // group.chunk_tokens
        ready = len(record.gathered)
        streams = f"; {ready} of {len(record.wanted)} chunks are ready, its load streams" if record.will_stream else ""
        if behind >= len(group.keys):
            reason = "all whole chunks of it" if tokens else "it has no whole chunk beyond what the engine has"
            return AnswerNote(reason + streams, record.wanted, ready)
        reason = "the hit ends before the first missing chunk" if tokens else "its first chunk is not to be had"
        return AnswerNote(reason + streams, record.wanted, ready, group.keys[behind])
    if record.has_jobs:
        return AnswerNote("its own transfers are still in flight")
    if record.state is RequestState.ASKING:
        return AnswerNote("a tier was asked whether it has its chunks")
    ready = manager.resident_prefix(record.gathered, 0, len(record.gathered))
    if ready < len(record.gathered):
        return AnswerNote("its chunks are on their way into the host tier", record.gathered, ready)
    return AnswerNote("another request is loading some of its chunks, or is older", record.gathered, ready)


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
                require(fences.covers_job(jobs.job(job_id)), f"{what}: blocks of job {job_id} are not fenced")
    for job_id in jobs.ownerless_ids():
        require(fences.covers_job(jobs.job(job_id)), f"blocks of job {job_id}, which is no request's, are not fenced")
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
