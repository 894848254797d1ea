"""Read-only views of the scheduler: the reason for an answer, and a check of every invariant.

Recorders and tests use them; no other module of the scheduler depends on this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tierkv.errors import require
from tierkv.manager.manager import OffloadManager
from tierkv.scheduler.jobs.jobs import Fences, JobTable
from tierkv.scheduler.requests.record import RequestRecord, Watcher
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.types.geometry import cdiv
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key


@dataclass(frozen=True, slots=True)
class AnswerNote:
    """Reason for the answer to a lookup."""

    reason: str
    """One clause for the log."""
    wanted: tuple[Key, ...] = ()
    """Chunks of a deferred or offered hit; of a hit that will stream, its first segment while that is gathered."""
    ready: int = 0
    """Number of these chunks, from the front, that are readable in the host tier."""
    missing: Key | None = None
    """First chunk that a longer hit needs and no tier has, of any group; None: there is none."""


@dataclass(frozen=True, slots=True)
class PromptNote:
    """Prompt of a request, as a record keeps it."""

    tokens: int
    """Tokens of the prompt."""
    keys: tuple[Key, ...]
    """Its whole chunks from the front, of the first group with full attention."""
    hints: RequestHints
    """Hints of the request."""


class SchedulerView:
    """View of the scheduler for recorders. Belongs to the scheduler thread.

    Attributes:
        watcher: called for each state change of requests that arrive from now on; None: no watcher.
    """

    def __init__(self, manager: OffloadManager, records: Mapping[str, RequestRecord], jobs: JobTable) -> None:
        self.watcher: Watcher | None = None
        self._manager = manager
        self._records = records
        self._jobs = jobs

    def explain_answer(self, request_id: str, tokens: int | None) -> AnswerNote:
        """Reason for answering the latest lookup of a request with ``tokens``."""
        return explain_answer(self._records[request_id], self._manager, tokens)

    def trace_headers(self, request_id: str) -> Mapping[str, str]:
        """Headers of a request that name the trace it is part of; empty if the engine provides none."""
        record = self._records.get(request_id)
        return getattr(record and record.request, "trace_headers", None) or {}

    def prompt_of(self, request_id: str) -> PromptNote:
        """Prompt of a request that is not forgotten. Complete once a lookup was answered with a number."""
        record = self._records[request_id]
        tokens, group = record.request.num_prompt_tokens, record.search_groups[0]
        return PromptNote(tokens, tuple(group.keys[: tokens // group.chunk_tokens]), record.ctx.hints)

    def not_stored(self, request_id: str) -> Sequence[Key]:
        """First chunks that the host tier had not taken when the request ended; empty if it had them all."""
        return self._records[request_id].not_stored

    def has_job(self, job_id: int) -> bool:
        """Whether the transfer is in flight."""
        return job_id in self._jobs.live_ids()


def explain_answer(record: RequestRecord, manager: OffloadManager, tokens: int | None) -> AnswerNote:
    """Reason for the latest answer. O(wanted chunks, and those that the next longer hit needs)."""
    lookup = record.lookup
    if tokens is not None:
        reason, missing = _end_of_hit(record, manager, tokens)
        ready = len(lookup.gathered)
        streams = f"; {ready} of {len(lookup.wanted)} chunks are ready, its load streams" if lookup.will_stream else ""
        return AnswerNote(reason + streams, lookup.wanted, ready, missing)
    if record.has_jobs:
        return AnswerNote("its own transfers are still in flight")
    if record.state is RequestState.ASKING:
        return AnswerNote("a tier was asked whether it has its chunks")
    ready = manager.resident_prefix(lookup.gathered, 0, len(lookup.gathered))
    if ready < len(lookup.gathered):
        return AnswerNote("its chunks are in flight to the host tier", lookup.gathered, ready)
    return AnswerNote("another request is loading some of its chunks, or is older", lookup.gathered, ready)


def _end_of_hit(record: RequestRecord, manager: OffloadManager, tokens: int) -> tuple[str, Key | None]:
    """Reason for which a hit of ``tokens`` is not longer, and the chunk that a longer one lacks, if any.

    Of the next longer hit at which all groups may end, the first absent chunk in lookup order. Asks no tier.
    """
    groups, start = record.search_groups, record.computed_tokens
    largest, hit_end = max([group.chunk_tokens for group in groups]), start + tokens
    end_max = min(record.hit_end_max, *[len(group.keys) * group.chunk_tokens for group in groups])
    while (end := min([group.allowed_end(end_max) for group in groups])) < end_max:
        end_max = end
    if end_max <= hit_end or end_max < start + largest:
        return "all whole chunks of it" if tokens else "it has no whole chunk beyond what the engine has", None
    longer = min(end_max, cdiv(hit_end + (1 if tokens else largest), largest) * largest)
    for group in groups:
        needs = group.needs(start, longer)
        first = max(needs.start, hit_end // group.chunk_tokens)
        absent = first + manager.present_prefix(group.keys, first, needs.stop, record.ctx)
        if absent < needs.stop:
            chunk = "chunk" if group.window_chunks is None else "chunk of a window"
            who = "no tier" if record.ctx.hints.load_tiers is None else "no tier that its hints allow"
            reason = f"the hit ends before the first missing {chunk}" if tokens else f"{who} has its first {chunk}"
            if not tokens and absent > start // group.chunk_tokens:
                reason = f"{who} has a {chunk} that the shortest hit needs"
            return reason, group.keys[absent]
    return "more of it is in tiers: a limit or a late tier ends the hit, or computing is faster", None


_IN_LOOKUP = (RequestState.ASKING, RequestState.GATHERING, RequestState.OFFERED)


def check_scheduler(
    records: Mapping[str, RequestRecord],
    jobs: JobTable,
    fences: Fences,
    in_lookup: Collection[str],
    load_jobs: Callable[[RequestRecord], Collection[int]],
) -> None:
    """Check requests, their jobs and fences, and the open lookups against each other.

    Args:
        records: by request id.
        jobs: all jobs in flight.
        fences: on the blocks of jobs.
        in_lookup: ids of open lookups.
        load_jobs: returns the jobs in flight of a request's load.

    Raises:
        InvariantError: an invariant is broken; names the request.
    """
    live = jobs.live_ids()
    owned: set[int] = set()
    for request_id, record in records.items():
        what = f"request {request_id!r} ({record.state.value})"
        owned |= _check_jobs(what, record, live, load_jobs(record))
        require(
            (request_id in in_lookup) == (record.state in _IN_LOOKUP),
            f"{what}: its state and the open lookups disagree",
        )
        for i, group in enumerate(record.groups):
            require(group.next_stored <= len(group.keys), f"{what}: the cursor of group {i} is behind its last chunk")
        if record.state is RequestState.FINISHED:
            require(record.has_jobs, f"{what} waits for nothing")
            for job_id in record.store_jobs:
                require(fences.covers_job(jobs.job(job_id)), f"{what}: blocks of job {job_id} are not fenced")
    for job_id in jobs.ownerless_ids():
        require(fences.covers_job(jobs.job(job_id)), f"blocks of job {job_id}, which has no owner, are not fenced")
        owned.add(job_id)
    require(owned == live, f"jobs {sorted(live - owned)} belong to no request")
    require(fences.job_ids <= live, f"jobs {sorted(fences.job_ids - live)} have ended and still fence blocks")
    require(set(in_lookup) <= records.keys(), "an open lookup belongs to no request")


def _check_jobs(what: str, record: RequestRecord, live: frozenset[int], load_jobs: Collection[int]) -> set[int]:
    """Check invariant I1, and that the jobs of the request are in flight. Returns their ids."""
    jobs = {*record.store_jobs, *load_jobs}
    require(not record.is_loading or not record.store_jobs, f"{what} has a load and stores in flight")
    loads = record.state in (RequestState.LOADING, RequestState.FINISHED)
    require(not record.is_loading or loads, f"{what} has a load in flight")
    require(record.is_loading or record.state is not RequestState.LOADING, f"{what} has no load in flight")
    require(jobs <= live, f"{what}: jobs {sorted(jobs - live)} have ended")
    return jobs
