"""Stack for an engine that schedules itself: it looks up chunk by chunk, and a promised load must not fail.

*Staged* (docs/explanation/decisions/0012-engines-that-schedule-themselves.md): chunks are read, verified and pinned in
the host tier before a lookup answers HIT. The engine's own scheduler decides what is stored and loaded, and names
transfers by their chunks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from tierkv.manager.contract import RequestContext, ResetScope
from tierkv.metrics.stack_stats import StackStats
from tierkv.scheduler.requests import rules
from tierkv.scheduler.requests.hint_reader import HintReader
from tierkv.scheduler.staged.key_groups import KeyGroups
from tierkv.scheduler.staged.staged_jobs import NO_FLAG, StagedJobs
from tierkv.scheduler.staged.staged_lookups import StagedLookups
from tierkv.stack.core import StackCore, check_scope
from tierkv.stack.journal import Journals
from tierkv.stack.remote_worker import WorkerSetup, setup_of_rank
from tierkv.stack.views.events import StackEvents
from tierkv.stack.views.introspection import StackIntrospection
from tierkv.stack.views.measurements import StackMetrics
from tierkv.stack.views.tiers import StackTiers
from tierkv.stack.wiring import StackWiring
from tierkv.types.cache_events import HOST
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.namespace import Namespace
from tierkv.types.transfers import SlotRef, StagedStore, StagedTransfer
from tierkv.types.waits import bounded_seconds
from tierkv.worker.completion_flags import CompletionFlags
from tierkv.worker.staged_seals import StagedSeals

DESCRIBED = ("tiers", "blocks_per_chunk", "host_slots", "host_slot_bytes")
"""Names of the facts that :meth:`StagedStack.describe` returns."""


class StagedStack:
    """An open stack. All calls belong to the engine's scheduler thread; workers are opened with ``open_worker``.

    A step begins with its first lookup and ends with :meth:`end_step`. Keys end with the number of their group. A call
    with a foreign value raises EngineProtocolError, which names value and rule; nothing has changed then.
    """

    namespace: Namespace
    """Identity of the engine's KV bytes: equal namespaces have interchangeable chunks."""
    geometry: Geometry
    """Sizes of groups and chunks."""
    tiers: StackTiers
    """Lower tiers: attach, detach, watch."""
    events: StackEvents
    """Cache events."""
    metrics: StackMetrics
    """Counters and histograms."""
    introspection: StackIntrospection
    """State of this stack, for tests and for debugging by hand."""

    def __init__(  # noqa: PLR0913 - the composition root hands everything in
        self,
        wiring: StackWiring,
        *,
        lookups: StagedLookups,
        jobs: StagedJobs,
        flags: CompletionFlags,
        seals: StagedSeals,
        hints: HintReader,
        group_ids: tuple[int, ...],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wire a stack; :func:`tierkv.open_staged_stack` does it.

        Args:
            wiring: the collaborators.
            lookups: answers which chunks can be loaded.
            jobs: transfers in flight.
            flags: shared memory in which workers mark ended transfers.
            seals: seal and verify stored chunks.
            hints: reads the hints of requests.
            group_ids: the number at the end of the keys of each group.
            clock: seconds, monotonic.
            sleep: waits on the engine's thread, in :meth:`flush` only.
        """
        core = StackCore(wiring, self._begin_scheduling, lookups.may_rest, self._check, Journals(), clock, sleep)
        self.namespace = wiring.namespace
        self.geometry = wiring.geometry
        self.tiers = StackTiers(wiring.manager, wiring.dispatcher, wiring.changes, wiring.arena)
        self.events = core.events
        self.metrics = StackMetrics(wiring, StackStats(), lambda: lookups.prefill_tokens_per_s)
        self.introspection = StackIntrospection(wiring.manager, wiring.dispatcher)
        self._core = core
        self._manager = wiring.manager
        self._counters = wiring.counters
        self._lookups = lookups
        self._jobs = jobs
        self._flags = flags
        self._seals = seals
        self._hints = hints
        self._begin_step = core.begin_step
        self._groups = KeyGroups(group_ids)
        self._group_of = self._groups.group_of
        self._sources: dict[str, dict[Key, str]] = {}  # per request: the tiers of its last load's chunks from below

    def worker_setup(self, rank: int) -> WorkerSetup:
        """Everything that the process of a worker needs for ``open_worker``; it pickles.

        Raises:
            EngineProtocolError: there is no such rank.
        """
        return replace(setup_of_rank(self._core.wiring.setup, rank), completion_flags=self._flags.handle)

    # -- requests ----------------------------------------------------------------------------------------------------

    def on_new_request(
        self, request_id: str, params: Mapping[str, Any] | None = None, load_tiers: frozenset[str] | None = None
    ) -> None:
        """Register a request.

        Args:
            request_id: unique among requests that have not finished.
            params: parameters of the engine's user, including hints.
            load_tiers: names of tiers that may serve a hit; None: all. Hints may allow fewer.
        """
        rules.check_id("on_new_request", request_id)
        hints = self._hints.read_hints(request_id, params)
        if load_tiers is not None:
            allowed = load_tiers if hints.load_tiers is None else hints.load_tiers & load_tiers
            hints = replace(hints, load_tiers=allowed)
        self._lookups.add_request(RequestContext(request_id, params or {}, hints))

    def lookup(self, request_id: str, key: Key, end_token: int) -> LookupResult:
        """Look up one chunk.

        Args:
            request_id: a registered request.
            key: the chunk; ends with the number of its group.
            end_token: tokens of the prompt up to the end of the chunk.

        Raises:
            EngineProtocolError: the key has an empty hash, or belongs to no group of the engine; or the id is no text,
                or the token no number.
        """
        if request_id.__class__ is not str or end_token.__class__ is not int:  # usual, and without a call per chunk
            rules.check_question("lookup", request_id, end_token)
        if not self._core.in_step:  # saves a call per chunk
            self._begin_step()
        return self._lookups.lookup(request_id, key, self._group_of(key), end_token)

    def locate(self, request_id: str, key: Key) -> LookupResult:
        """Whether a chunk is in a tier that the request may load from. Reads nothing and holds nothing.

        Args:
            request_id: a registered request. An unknown one has no hints.
            key: the chunk; ends with the number of its group.

        Returns:
            HIT or MISS; PENDING while its host slot is being filled; RETRY while a shared tier is asked.
        """
        rules.check_id("locate", request_id)
        self._group_of(key)
        self._begin_step()
        return self._manager.lookup(key, self._lookups.request_context(request_id))

    def request_finished(self, request_id: str) -> None:
        """End a request, for any reason. Its transfers may continue."""
        rules.check_id("request_finished", request_id)
        self._lookups.finish_request(request_id)
        self._sources.pop(request_id, None)

    def end_step(self, started: Iterable[str] = (), preempted: Iterable[str] = (), prompt_tokens: int = 0) -> None:
        """End the step: no further lookup follows in it.

        Args:
            started: requests that were scheduled for the first time.
            preempted: requests that have lost their blocks.
            prompt_tokens: that were computed since the previous call; measured as the engine's speed.
        """
        core, changed = self._core, rules.checked_step("end_step", prompt_tokens, started, preempted)
        if core.in_step or changed or prompt_tokens or not core.rests.take_step():
            self._begin_step()
        for request_id in changed:
            self._lookups.close_lookup(request_id)
        self._lookups.end_step(prompt_tokens)
        core.end_step(decodes=not changed)

    # -- loads -------------------------------------------------------------------------------------------------------

    def prepare_load(self, request_id: str, keys: Collection[Key]) -> StagedTransfer:
        """Pin the slots of chunks that were HITs until :meth:`complete_load`, and close the lookup.

        Raises:
            EngineProtocolError: one of the chunks was not a HIT; nothing has changed.
        """
        rules.check_id("prepare_load", request_id)
        ordered = rules.checked_keys("prepare_load", keys)
        self._begin_step()
        grant = self._manager.prepare_load(ordered, self._lookups.request_context(request_id))
        self._lookups.close_lookup(request_id)
        groups = tuple(map(self._group_of, ordered))
        self._count_hits(groups, grant.sources)
        below = {key: tier for key, tier in zip(ordered, grant.sources, strict=True) if tier != HOST}
        self._sources[request_id] = below
        return self._jobs.begin_load(request_id, ordered, groups, grant.slots)

    def _count_hits(self, groups: Sequence[int], sources: Sequence[str]) -> None:
        """Count chunks by tier, and tokens by the group that loads most: one with a window loads the end only."""
        tokens = {group: n * self.geometry.groups[group].chunk_tokens for group, n in Counter(groups).items()}
        lead = max(tokens, key=tokens.__getitem__, default=None)
        for (group, source), chunks in Counter(zip(groups, sources, strict=True)).items():
            self._counters.chunks_hit[source] += chunks
            if group == lead:
                self._counters.tokens_loaded[source] += chunks * self.geometry.groups[group].chunk_tokens

    def load_source(self, request_id: str, key: Key) -> str:
        """Return the name of the tier that served a chunk of the request's last load."""
        rules.check_id("load_source", request_id)
        return self._sources[request_id].get(key, HOST) if request_id in self._sources else HOST

    def complete_load(self, request_id: str, keys: Collection[Key]) -> bool:
        """End the request's load after all workers did; whether all completed it. Ignores one from before a reset."""
        rules.check_id("complete_load", request_id)
        job, is_complete = self._jobs.end_load(request_id, rules.checked_keys("complete_load", keys))
        if job is not None:
            self._core.update_time()
            self._manager.complete_load(job.slots)
            self._core.submit_ops()
        return is_complete

    # -- stores ------------------------------------------------------------------------------------------------------

    def prepare_store(self, request_id: str, chunks: Sequence[tuple[Key, int]]) -> StagedStore | None:
        """Allocate slots for those of ``chunks`` (key, end token) that the host tier lacks and hints allow to store.

        If there is no room for a large offer, its front is accepted: an offer larger than the host tier would never be
        granted. An offer of up to half of the host tier's slots is not large: it will find room in a later step.

        Returns:
            The store, perhaps without chunks; None: there is no room now.
        """
        rules.check_id("prepare_store", request_id)
        group_of = self._groups.groups_of("prepare_store", chunks)
        ctx = self._lookups.request_context(request_id)
        most = ctx.hints.max_offload_tokens
        offered = [chunk for chunk in chunks if most is None or chunk[1] <= most] if ctx.hints.stores else []
        if not offered:
            return StagedStore(StagedTransfer(NO_FLAG, (), (), ()), ())
        self._core.update_time()
        if not self._core.rests.left:
            self._take_ended_stores()
        number = self._flags.allocate(is_store=True)
        if number == NO_FLAG:
            self._counters.stores_refused += 1
            return None
        grant, taken = self._manager.prepare_store(offered, ctx), len(offered)
        least = self._manager.store_chunks_max
        while grant is None and len(offered) > 2 * least and taken > least:
            taken = max(taken // 2, least)
            grant = self._manager.prepare_store(offered[:taken], ctx)
        if grant is None or not grant.keys:
            self._flags.release(number)
        if grant is None:
            return None
        self._counters.chunks_not_stored += len(offered) - taken
        job = StagedTransfer(number, grant.keys, tuple([group_of[key] for key in grant.keys]), grant.slots)
        if grant.keys:
            self._seals.open_slots(grant.slots)
            self._jobs.begin_store(job)
        return StagedStore(job, grant.evicted)

    def complete_store(self, keys: Iterable[Key], *, success: bool = True) -> None:
        """End the jobs that stored these chunks, after all workers did.

        The next step or store takes them in, all together. Then chunks that fail verification are dropped and counted.
        Stores from before a reset are ignored.
        """
        self._jobs.note_ended(rules.checked_keys("complete_store", keys), success=success)

    def _take_ended_stores(self) -> None:
        """Make the chunks of ended stores readable."""
        lead = self.geometry.lookup_order[0]
        good: list[SlotRef] = []  # taken in together: a batch of many costs about as much as one job
        for job, success in self._jobs.take_ended():
            failed = self._seals.seal_slots(_chunks(job)) if success else frozenset(job.keys)
            lost = sum(group == lead and key in failed for key, group, _ in _chunks(job)) if failed else 0
            if failed:
                self._manager.complete_store(job.slots, failed)
            else:
                good += job.slots
            self._counters.tokens_stored += (job.groups.count(lead) - lost) * self.geometry.groups[lead].chunk_tokens
        if good:
            self._manager.complete_store(good)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark chunks as recently used in the host tier's policy."""
        self._manager.touch(rules.checked_keys("touch", keys))

    # -- whole cache -------------------------------------------------------------------------------------------------

    def reset_cache(self, scope: ResetScope = "host") -> None:
        """Empty the host tier, or every tier, between steps. No chunk stored before is found from now on.

        Slots of transfers in flight are reused only when every worker has flagged their ends, because the engine no
        longer reports these transfers.

        Raises:
            EngineProtocolError: another scope; "all", where a tier is shared or read-only. Nothing has changed.
        """
        check_scope(scope)
        self._manager.check_reset(scope)
        self._take_ended_stores()
        self._lookups.reset()
        self._manager.reset_cache(scope)
        self._jobs.orphan_all()
        self._core.cache_was_reset(scope)

    def workers_flushed(self) -> None:
        """Release the slots of all transfers in flight at the last reset: the engine states that they ended."""
        self._take_orphans(all_of_them=True)

    def _take_orphans(self, *, all_of_them: bool = False) -> None:
        for job, is_store in self._jobs.take_ended_orphans(all_of_them=all_of_them):
            # The chunks of a store were dropped: the call only frees their slots.
            end = self._manager.complete_store if is_store else self._manager.complete_load
            end(job.slots)

    def describe(self) -> dict[str, str | int]:
        """Return constant facts, by the names in :data:`DESCRIBED`."""
        arena = self._core.wiring.arena
        facts = (",".join((HOST, *self.tiers.names)), self.geometry.blocks_per_chunk, arena.num_slots, arena.slot_bytes)
        return dict(zip(DESCRIBED, facts, strict=True))

    def has_pending_work(self) -> bool:
        """Whether the engine should keep stepping: transfers or changes of tiers are pending."""
        return self._jobs.in_flight or self._core.wiring.changes.pending

    # -- step loop ---------------------------------------------------------------------------------------------------

    def _begin_scheduling(self, now_s: float) -> None:
        self._take_ended_stores()
        self._take_orphans()
        self._lookups.begin_step(now_s)

    def _check(self) -> None:
        self._manager.validate()
        self._lookups.validate()

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Write everything stored so far to the tiers that accept writes. Not for the engine's step path: it waits.

        A tier with ``write = "back"`` gets every host chunk that it lacks; one with ``"on_reuse"`` only reused chunks.
        A reset of all tiers is completed. Stores that every worker has marked are taken in, reported or not.

        Returns:
            Whether all chunks were written in time, and none was dropped or failed meanwhile.
        """
        return self._core.flush(timeout_s, self._collect_reports)

    def _collect_reports(self, _timeout_s: float) -> None:
        self._take_orphans()
        self._jobs.note_flagged()
        self._take_ended_stores()

    def close(self, timeout_s: float = 30.0) -> bool:
        """Flush, then release threads, files and memory. Idempotent, and bounded as :meth:`Stack.close`.

        Returns:
            Whether all that the host tier has, and all that is pending, reached its tiers, as :meth:`Stack.close`.
        """
        timeout_s = bounded_seconds("close", timeout_s)
        try:
            return self._core.close(timeout_s, self._write_back)
        finally:
            self._flags.close()

    def _write_back(self, timeout_s: float) -> bool:
        return self.flush(timeout_s) and not self._jobs.in_flight

    def __enter__(self) -> Self:
        """Return the open stack."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def _chunks(job: StagedTransfer) -> Iterable[tuple[Key, int, SlotRef]]:
    return zip(job.keys, job.groups, job.slots, strict=True)
