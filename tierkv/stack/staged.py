"""A stack for an engine that schedules itself: it asks chunk by chunk, and no load that it was promised may fail.

*Staged* (docs/explanation/decisions/0012-engines-that-schedule-themselves.md): chunks are gathered, checked and held in
the host tier before the engine hears HIT. The engine's own scheduler decides what is stored and loaded, and names
transfers by their chunks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.manager.contract import HOST, RequestContext, ResetScope
from tierkv.scheduler.staged.staged_jobs import NO_FLAG, StagedJob
from tierkv.stack.core import StackBase, StagedParts
from tierkv.stack.remote_worker import WorkerSetup
from tierkv.types.keys import GROUP_BYTES, Key
from tierkv.types.lookup import LookupResult
from tierkv.types.transfers import SlotRef

DESCRIBED = ("tiers", "blocks_per_chunk", "host_slots", "host_slot_bytes")
"""What :meth:`StagedStack.describe` tells."""


@dataclass(frozen=True, slots=True)
class StagedTransfer:
    """What the workers must know of one job, beside their own blocks: plain data that pickles.

    number: each worker calls ``mark_ended`` with it when it has ended the job. keys, groups, slots: the chunks, in
    order.
    """

    number: int
    keys: tuple[Key, ...]
    groups: tuple[int, ...]
    slots: tuple[SlotRef, ...]


@dataclass(frozen=True, slots=True)
class StagedStore:
    """An accepted store: what the workers must know, and what was evicted for it. Without keys: nothing to copy."""

    transfer: StagedTransfer
    evicted: tuple[Key, ...]


class StagedStack(StackBase):
    """An open stack. All calls belong to the engine's scheduler thread; workers are opened with ``open_worker``.

    A step begins with its first question and ends with :meth:`end_step`. Keys end with the number of their group.
    """

    def __init__(
        self,
        parts: StagedParts,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(parts, clock, sleep)
        self._parts = parts
        self._lookups = parts.lookups
        self._jobs = parts.jobs
        self._groups = {number.to_bytes(GROUP_BYTES, "big"): i for i, number in enumerate(parts.group_ids)}
        self._sources: dict[str, dict[Key, str]] = {}  # of each request's last load, the chunks from below

    def worker_setup(self, rank: int) -> WorkerSetup:
        """What the process of that worker must know; it pickles. See :func:`tierkv.stack.remote_worker.open_worker`.

        Raises:
            EngineProtocolError: there is no such rank.
        """
        return replace(super().worker_setup(rank), completion_flags=self._parts.completion_flags.handle)

    # -- requests ----------------------------------------------------------------------------------------------------

    def on_new_request(
        self, request_id: str, params: Mapping[str, Any] | None = None, load_tiers: frozenset[str] | None = None
    ) -> None:
        """A request has arrived.

        Args:
            request_id: unique among requests that are alive.
            params: what the engine's user attached, hints among it.
            load_tiers: names of tiers that a hit may come from; None: all. Hints may allow fewer.
        """
        hints = self._parts.hints.read(request_id, params)
        if load_tiers is not None:
            allowed = load_tiers if hints.load_tiers is None else hints.load_tiers & load_tiers
            hints = replace(hints, load_tiers=allowed)
        self._lookups.add_request(RequestContext(request_id, params or {}, hints))

    def lookup(self, request_id: str, key: Key, end_token: int) -> LookupResult:
        """Whether a chunk can be loaded; see :meth:`StagedLookups.lookup`."""
        if not self._in_step:
            self._begin_step()
        return self._lookups.lookup(request_id, key, self._group_of(key), end_token)

    def request_finished(self, request_id: str) -> None:
        """The request ended, in whatever way. Its transfers may go on."""
        self._lookups.finish_request(request_id)
        self._sources.pop(request_id, None)

    def end_step(self, started: Iterable[str] = (), preempted: Iterable[str] = ()) -> None:
        """The engine has asked all it wanted in this step.

        Args:
            started: requests that were scheduled for the first time.
            preempted: requests that have lost their blocks.
        """
        self._begin_step()
        for request_id in (*started, *preempted):
            self._lookups.close_lookup(request_id)
        self._lookups.end_step()
        self._in_step = False
        self._hand_out()

    def _group_of(self, key: Key) -> int:
        group = self._groups.get(key[-GROUP_BYTES:])
        if group is None:
            raise EngineProtocolError(f"chunk {key.hex()} is of no group of this engine's", key=key)
        return group

    # -- loads -------------------------------------------------------------------------------------------------------

    def prepare_load(self, request_id: str, keys: Collection[Key]) -> StagedTransfer:
        """Hold the slots of chunks that were HITs until :meth:`complete_load`; the lookup is over.

        Raises:
            EngineProtocolError: one of them was none; nothing has changed.
        """
        self._begin_step()
        ordered = tuple(keys)
        grant = self._manager.prepare_load(ordered, self._lookups.request_context(request_id))
        self._lookups.close_lookup(request_id)
        groups = tuple(map(self._group_of, ordered))
        self._count_hits(groups, grant.sources)
        below = {key: tier for key, tier in zip(ordered, grant.sources, strict=True) if tier != HOST}
        self._sources[request_id] = below
        number = self._jobs.begin_load(request_id, ordered, groups, grant.slots)
        return StagedTransfer(number, ordered, groups, grant.slots)

    def _count_hits(self, groups: Sequence[int], sources: Sequence[str]) -> None:
        """Chunks by tier, and the tokens of one group's: the first in lookup order of which anything is loaded."""
        lead = next((index for index in self.geometry.lookup_order if index in groups), None)
        for (group, source), chunks in Counter(zip(groups, sources, strict=True)).items():
            self.counters.chunks_hit[source] += chunks
            if group == lead:
                self.counters.tokens_loaded[source] += chunks * self.geometry.groups[group].chunk_tokens

    def load_source(self, request_id: str, key: Key) -> str:
        """The tier that a chunk of the request's last load came from."""
        return self._sources.get(request_id, {}).get(key, HOST)

    def complete_load(self, request_id: str, keys: Collection[Key]) -> None:
        """All workers ended the request's load of these chunks. What a reset has overtaken is passed over."""
        job = self._jobs.end_load(request_id, keys)
        if job is not None:
            self._tell_time()
            self._manager.complete_load(job.slots)
            self._hand_out()

    # -- stores ------------------------------------------------------------------------------------------------------

    def prepare_store(self, request_id: str, chunks: Sequence[tuple[Key, int]]) -> StagedStore | None:
        """Slots for those of ``chunks`` (key, end token) that the host tier lacks, and that shall be stored.

        Of a large offer the front is taken, if there is no room for all of it: whoever waits for room for more than
        there is waits in vain. Half of the host tier's slots is not large: that will find room in a later step.

        Returns:
            The store, perhaps without chunks; None: there is no room now.
        """
        ctx = self._lookups.request_context(request_id)
        hints = ctx.hints
        tokens_max = hints.max_offload_tokens
        wanted = [key for key, end in chunks if tokens_max is None or end <= tokens_max] if hints.stores else []
        if not wanted:
            return StagedStore(StagedTransfer(NO_FLAG, (), (), ()), ())
        self._tell_time()
        number = self._parts.completion_flags.allocate(is_store=True)
        if number == NO_FLAG:
            self.counters.stores_refused += 1
            return None
        offered = [(key, self._group_of(key)) for key in wanted]
        grant, taken = self._manager.prepare_store(offered, ctx), len(offered)
        least = self._manager.store_chunks_max
        while grant is None and len(offered) > 2 * least and taken > least:
            taken = max(taken // 2, least)
            grant = self._manager.prepare_store(offered[:taken], ctx)
        if grant is not None:
            self.counters.chunks_not_stored += len(offered) - taken
        if grant is None or not grant.keys:
            self._parts.completion_flags.release(number)
        if grant is None:
            return None
        group_of = dict(offered)
        groups = tuple([group_of[key] for key in grant.keys])
        if grant.keys:
            self._parts.staged_seals.open_slots(grant.slots)
            self._jobs.begin_store(grant.keys, groups, grant.slots, number)
        return StagedStore(StagedTransfer(number, grant.keys, groups, grant.slots), grant.evicted)

    def complete_store(self, keys: Iterable[Key], *, success: bool = True) -> None:
        """All workers ended the jobs that stored these chunks. What is not whole in its slot is dropped, and counted.

        What a reset has overtaken is passed over.
        """
        jobs = self._jobs.end_stores(keys)
        if jobs:
            self._tell_time()
        for job in jobs:
            self._end_store(job, self._parts.staged_seals.seal_slots(_chunks(job)) if success else frozenset(job.keys))
        if jobs:
            self._hand_out()

    def _end_store(self, job: StagedJob, failed: frozenset[Key]) -> None:
        self._manager.complete_store(job.slots, failed)
        lead = self.geometry.lookup_order[0]
        good = job.groups.count(lead)
        if failed:
            good -= sum(group == lead and key in failed for key, group, _ in _chunks(job))
        self.counters.tokens_stored += good * self.geometry.groups[lead].chunk_tokens

    def touch(self, keys: Sequence[Key]) -> None:
        """Recency only."""
        self._manager.touch(keys)

    # -- whole cache -------------------------------------------------------------------------------------------------

    def reset_cache(self, scope: ResetScope = "host") -> None:
        """Empty the host tier, or every tier, between steps. Nothing of before is answered from now on.

        The slots of transfers in flight are used again only when every worker has marked their ends: the engine reports
        these to nobody.

        Raises:
            EngineProtocolError: "all", where a tier is shared or read-only: nothing has changed.
        """
        self._manager.check_reset(scope)
        self._lookups.reset()
        self._manager.reset_cache(scope)
        self._jobs.orphan_all()
        self._hand_out()

    def workers_flushed(self) -> None:
        """The engine says itself that all that was in flight at the last reset has ended."""
        self._take_orphans(all_of_them=True)

    def _take_orphans(self, *, all_of_them: bool = False) -> None:
        for job, is_store in self._jobs.take_ended_orphans(all_of_them=all_of_them):
            if is_store:
                self._manager.complete_store(job.slots)  # its chunks were dropped: this only frees their slots
            else:
                self._manager.complete_load(job.slots)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Never known: nobody tells this kind of stack what is computed."""
        return None

    def describe(self) -> dict[str, str | int]:
        """Facts that do not change, by the names in :data:`DESCRIBED`."""
        arena = self._base.arena
        facts = (",".join((HOST, *self.tier_names)), self.geometry.blocks_per_chunk, arena.num_slots, arena.slot_bytes)
        return dict(zip(DESCRIBED, facts, strict=True))

    def has_pending_work(self) -> bool:
        """Whether a transfer is in flight, or tiers come or go: the engine should go on stepping."""
        return self._jobs.any or self._base.changes.pending

    def _tell_time(self) -> None:
        """Between steps too, things begin that have a deadline: a step may take long, and the engine may have slept."""
        self._manager.tell_time(self._clock())

    # -- for the step loop -------------------------------------------------------------------------------------------

    def _step_began(self, now_s: float) -> None:
        self._take_orphans()
        self._lookups.begin_step(now_s)

    def _check(self) -> None:
        self._manager.validate()
        self._lookups.validate()

    def _take_in_reports(self) -> None:
        """The engine's to do, its workers are never ours; but what they have marked has ended, reported or not."""
        self._take_orphans()
        for job in self._jobs.take_flagged_stores():
            self._end_store(job, self._parts.staged_seals.seal_slots(_chunks(job)))

    def _take_last_step(self) -> None:
        """Nothing is ever kept back here."""

    def _at_rest(self) -> bool:
        return not self._jobs.any

    def close(self, timeout_s: float = 30.0) -> bool:
        """Flush, then release threads, files and memory. Idempotent; see :meth:`StackBase.close`."""
        try:
            return super().close(timeout_s)
        finally:
            self._parts.completion_flags.close()


def _chunks(job: StagedJob) -> Iterable[tuple[Key, int, SlotRef]]:
    return zip(job.keys, job.groups, job.slots, strict=True)
