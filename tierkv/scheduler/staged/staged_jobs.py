"""Transfers in flight for an engine that names them by their chunks, and forgets them when the cache is reset.

Before a reset the engine's reports are complete. After a reset it reports none of the transfers in flight, but workers
may still write a store's slots and read a load's. Such a job is *orphaned*: its slots stay taken until the completion
flags of the workers show that it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef, StagedTransfer

NO_FLAG = 0
"""Number of a job without a completion flag."""


class JobFlags(Protocol):
    """Flags by which workers report the jobs that they ended."""

    def allocate(self, *, is_store: bool) -> int:
        """Number for a job; NO_FLAG if none is free for its kind."""

    def has_ended(self, number: int) -> bool:
        """Whether every worker has ended that job, with or without success. Always false for NO_FLAG."""

    def has_succeeded(self, number: int) -> bool:
        """Whether every worker has completed that job. Always false for NO_FLAG."""

    def has_failed(self, number: int) -> bool:
        """Whether any worker ended that job without success. Always false for NO_FLAG."""

    def release(self, number: int) -> None:
        """Free the number of a job."""


class StagedJobs:
    """All transfers in flight. Sans-IO."""

    def __init__(self, flags: JobFlags) -> None:
        self._flags = flags
        self._stores: dict[Key, StagedTransfer] = {}
        self._loads: dict[str, list[StagedTransfer]] = {}
        self._ended: list[tuple[StagedTransfer, bool]] = []
        self._orphans: list[tuple[StagedTransfer, bool]] = []

    @property
    def in_flight(self) -> bool:
        """Whether any transfer is in flight, or the end of a store is not taken in."""
        return bool(self._stores or self._loads or self._orphans or self._ended)

    def begin_store(self, job: StagedTransfer) -> None:
        """Register a store, under the number of its flag."""
        self._stores.update(dict.fromkeys(job.keys, job))

    def begin_load(
        self, request_id: str, keys: tuple[Key, ...], groups: tuple[int, ...], slots: tuple[SlotRef, ...]
    ) -> StagedTransfer:
        """Register and return one job that loads these chunks for a request."""
        job = StagedTransfer(self._flags.allocate(is_store=False), keys, groups, slots)
        self._loads.setdefault(request_id, []).append(job)
        return job

    def end_stores(self, keys: Iterable[Key]) -> list[tuple[StagedTransfer, bool]]:
        """End the jobs that stored these chunks. Unknown keys are ignored.

        Returns:
            Each job, and whether a worker gave it up. A worker that has nothing to store may flag nothing.
        """
        stores = self._stores
        ended = {stores[key].number: stores[key] for key in keys if key in stores}
        results = []
        for job in ended.values():
            for key in job.keys:
                if key in stores:
                    del stores[key]
            results.append((job, self._flags.has_failed(job.number)))
            self._flags.release(job.number)
        return results

    def note_ended(self, keys: Iterable[Key], *, success: bool = True) -> bool:
        """End the jobs that stored these chunks, for :meth:`take_ended`. Returns whether there are any."""
        jobs = self.end_stores(keys)
        self._ended += [(job, success and not is_given_up) for job, is_given_up in jobs]
        return bool(jobs)

    def take_ended(self) -> list[tuple[StagedTransfer, bool]]:
        """Take the ended stores, each with whether its workers have succeeded."""
        ended, self._ended = self._ended, []
        return ended

    def end_load(self, request_id: str, keys: Collection[Key]) -> tuple[StagedTransfer | None, bool]:
        """End the request's job that loaded exactly these chunks.

        Returns:
            The job, or None; and whether every worker completed it. A job without a flag counts as completed.
        """
        jobs, wanted = self._loads.get(request_id, []), frozenset(keys)
        job = next((job for job in jobs if wanted == frozenset(job.keys)), None)
        if job is None:
            return None, True
        jobs.remove(job)
        if not jobs:
            del self._loads[request_id]
        is_complete = job.number == NO_FLAG or self._flags.has_succeeded(job.number)
        self._flags.release(job.number)
        return job, is_complete

    def note_flagged(self) -> None:
        """End stores that every worker has flagged as ended, though the engine has not reported them."""
        jobs = {id(job): job for job in self._stores.values() if self._flags.has_ended(job.number)}
        self.note_ended([job.keys[0] for job in jobs.values()])

    def orphan_all(self) -> None:
        """Orphan all jobs in flight after a reset: the engine will report none of them."""
        stores = {id(job): job for job in self._stores.values()}
        self._orphans += [(job, True) for job in stores.values()]
        self._orphans += [(job, False) for jobs in self._loads.values() for job in jobs]
        self._stores.clear()
        self._loads.clear()

    def take_ended_orphans(self, *, all_of_them: bool = False) -> list[tuple[StagedTransfer, bool]]:
        """End orphans whose flags are set. Returns each with whether it is a store.

        all_of_them: the engine knows that all have ended.
        """
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
