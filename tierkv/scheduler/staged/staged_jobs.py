"""Transfers in flight for an engine that names them by their chunks, and forgets them when the cache is reset.

Its reports are trusted as long as they come. After a reset none come for what was in flight, yet workers may still
write a store's slots and read a load's: such a job is *orphaned*, and its slots stay taken until the workers' own
marks say that it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

NO_FLAG = 0
"""The number of a job whose end no mark will tell."""


class JobFlags(Protocol):
    """Where workers mark the jobs that they ended."""

    def allocate(self, *, is_store: bool) -> int:
        """A number for a job; NO_FLAG if there is none left for its kind."""

    def has_ended(self, number: int) -> bool:
        """Whether every worker has ended that job. Never so for NO_FLAG."""

    def release(self, number: int) -> None:
        """Nobody will ask about that job again."""


@dataclass(frozen=True, slots=True)
class StagedJob:
    """One transfer. number: under which workers mark its end. keys, groups, slots: its chunks, in order."""

    number: int
    keys: tuple[Key, ...]
    groups: tuple[int, ...]
    slots: tuple[SlotRef, ...]


class StagedJobs:
    """All transfers in flight. Sans-IO."""

    def __init__(self, flags: JobFlags) -> None:
        self._flags = flags
        self._stores: dict[Key, StagedJob] = {}
        self._loads: dict[str, list[StagedJob]] = {}
        self._orphans: list[tuple[StagedJob, bool]] = []

    @property
    def any(self) -> bool:
        """Whether something is in flight."""
        return bool(self._stores or self._loads or self._orphans)

    @property
    def num_orphans(self) -> int:
        """Jobs that a reset has orphaned, and that have not ended."""
        return len(self._orphans)

    def begin_store(self, keys: Sequence[Key], groups: Sequence[int], slots: Sequence[SlotRef], number: int) -> None:
        """These chunks will be stored, in one job, under that number."""
        job = StagedJob(number, tuple(keys), tuple(groups), tuple(slots))
        self._stores.update(dict.fromkeys(job.keys, job))

    def begin_load(self, request_id: str, keys: Sequence[Key], groups: Sequence[int], slots: Sequence[SlotRef]) -> int:
        """These chunks will be loaded for a request, in one job. Returns its number."""
        number = self._flags.allocate(is_store=False)
        self._loads.setdefault(request_id, []).append(StagedJob(number, tuple(keys), tuple(groups), tuple(slots)))
        return number

    def end_stores(self, keys: Iterable[Key]) -> list[StagedJob]:
        """The jobs that stored these chunks have ended. Unknown keys are passed over."""
        ended = {id(job): job for job in map(self._stores.get, keys) if job is not None}
        for job in ended.values():
            for key in job.keys:
                self._stores.pop(key, None)
            self._flags.release(job.number)
        return list(ended.values())

    def end_load(self, request_id: str, keys: Collection[Key]) -> StagedJob | None:
        """The request's job that loaded exactly these chunks has ended; None: there is no such job."""
        jobs, wanted = self._loads.get(request_id, []), frozenset(keys)
        job = next((job for job in jobs if wanted == frozenset(job.keys)), None)
        if job is not None:
            jobs.remove(job)
            if not jobs:
                del self._loads[request_id]
            self._flags.release(job.number)
        return job

    def take_flagged_stores(self) -> list[StagedJob]:
        """Stores that every worker has marked as ended, though the engine has not reported them."""
        jobs = {id(job): job for job in self._stores.values() if self._flags.has_ended(job.number)}
        return self.end_stores([job.keys[0] for job in jobs.values()])

    def orphan_all(self) -> None:
        """The cache was reset: of what is in flight the engine will report nothing."""
        stores = {id(job): job for job in self._stores.values()}
        self._orphans += [(job, True) for job in stores.values()]
        self._orphans += [(job, False) for jobs in self._loads.values() for job in jobs]
        self._stores.clear()
        self._loads.clear()

    def take_ended_orphans(self, *, all_of_them: bool = False) -> list[tuple[StagedJob, bool]]:
        """Orphans that have ended since, each with whether it is a store. all_of_them: the engine says so itself."""
        if not self._orphans:
            return []
        ended, left = [], []
        for job, is_store in self._orphans:
            if all_of_them or self._flags.has_ended(job.number):
                self._flags.release(job.number)
                ended.append((job, is_store))
            else:
                left.append((job, is_store))
        self._orphans = left
        return ended
