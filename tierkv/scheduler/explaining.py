"""What a record wants to know of the scheduler, above all why a lookup was answered so. Nothing depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierkv.manager.manager import OffloadManager
from tierkv.scheduler.jobs import JobTable
from tierkv.scheduler.records import RequestRecord, Watcher
from tierkv.scheduler.request_state import RequestState
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
