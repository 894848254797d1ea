"""Breaks of the core: each is one careless line in tierkv, with the invariant that must notice it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from simulation.breaks.registry import Patch, breaks
from simulation.checks.checks import CAPACITY, DURABLE, LEFTOVERS
from simulation.checks.evictions import WAITING
from simulation.checks.exception_guard import FATAL, INSIDE
from simulation.checks.monitor import EVENTS, JOBS, OFFERS, RESET, SLOTS
from simulation.checks.service import PROGRESS
from simulation.engine.kv_memory import WRONG_BYTES
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.frames.sealer import FrameSealer
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk_state import ChunkEvent, ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.host.slot_table import SlotTable
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.residency import Residency
from tierkv.manager.lower.row_table import DELETING, WRITING
from tierkv.manager.manager import OffloadManager
from tierkv.manager.moves.dirty_pins import DirtyPins
from tierkv.manager.moves.in_flight import InFlightOps
from tierkv.manager.passages.passage import Passage
from tierkv.policies.lru import LruPolicy
from tierkv.scheduler.jobs.completions import CompletionHandler
from tierkv.scheduler.jobs.jobs import Fences, JobTable
from tierkv.scheduler.lookup.loads_in_flight import LoadsInFlight
from tierkv.scheduler.lookup.lookups import Lookups
from tierkv.scheduler.lookup.search import SearchGroup, find_hit
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.scheduler.store.stores import Stores
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.namespace import Namespace
from tierkv.types.tier_ops import OutcomeKind, Verb
from tierkv.types.transfers import SlotRef, TransferJob
from tierkv.worker.worker import Worker

__all__: list[str] = []  # the registry has all breaks

# -- fences and slots ------------------------------------------------------------------------------------------------


@breaks("churn", WRONG_BYTES)
def fences_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(Fences, "jobs_fencing", lambda self, block_ids: set())


@breaks("churn", INSIDE)
def preemption_does_not_flush(patch: Patch) -> None:
    patch.setattr(OffloadScheduler, "_job_ids", staticmethod(lambda record: ()))


@breaks("churn", WRONG_BYTES)
def the_worker_does_not_wait_for_flushes(patch: Patch) -> None:
    patch.setattr(Worker, "wait", lambda self, job_ids: None)


@breaks("mixed", WRONG_BYTES)
def stores_run_before_the_forward_pass(patch: Patch) -> None:
    start = Worker.start_step

    def eager(self: Worker, meta: Any) -> None:
        start(self, meta)
        for job in meta.stores:
            if job.job_id not in self._running:
                self._start(job)

    patch.setattr(Worker, "start_step", eager)
    patch.setattr(Worker, "queue_stores", lambda self, meta: None)


@breaks("hung", SLOTS, first=50)  # mostly, the stack's own checks notice it before a byte is written
def a_slot_in_use_is_reused(patch: Patch) -> None:
    drop = HostTier.drop

    def hasty(self: HostTier, slots: Sequence[int]) -> Sequence[Key]:
        visible = [slot for slot in slots if self.slots.state(slot) is not ChunkState.DOOMED]
        keys = drop(self, slots)
        self._free.give_back([slot for slot in visible if self.slots.state(slot) is ChunkState.DOOMED])
        return keys

    patch.setattr(HostTier, "drop", hasty)
    patch.setattr(HostTier, "validate", lambda self: None)


@breaks("hung", SLOTS)
def a_late_read_gives_its_slot_back(patch: Patch) -> None:
    late = InFlightOps._announce_late

    def forgetful(self: InFlightOps, tier: LowerTier, pending: Any) -> None:
        was_late = pending.announced_late
        late(self, tier, pending)
        if pending.op.verb is Verb.READ and not was_late:
            tier.residency.end_read(pending.op.keys)
            self._host.failed(pending.slots)
            self._ops.pop(pending.op.op_id)

    patch.setattr(InFlightOps, "_announce_late", forgetful)


@breaks("hung", INSIDE)
def generations_are_ignored(patch: Patch) -> None:
    def leased(self: SlotTable, refs: Sequence[SlotRef]) -> list[int]:
        return [slot for slot, _ in refs if self.states[slot]]

    def being_stored(self: SlotTable, refs: Sequence[SlotRef]) -> list[int]:
        return self.fills.stored_among([slot for slot, _ in refs])

    patch.setattr(SlotTable, "leased", leased)
    patch.setattr(SlotTable, "being_stored", being_stored)
    drop = HostTier.drop

    def loose(self: HostTier, slots: Sequence[int]) -> None:
        for slot in slots:
            self.slots.pins[slot] = 0
        drop(self, slots)

    patch.setattr(HostTier, "drop", loose)
    patch.setattr(HostTier, "validate", lambda self: None)


@breaks("mixed", INSIDE)
def eviction_takes_what_is_held(patch: Patch) -> None:
    evict = LruPolicy.evict
    patch.setattr(LruPolicy, "evict", lambda self, count, holds: evict(self, count, bytes(len(holds))))
    patch.setattr(HostTier, "validate", lambda self: None)
    patch.setattr(LowerTier, "validate", lambda self: None)


# -- bytes -----------------------------------------------------------------------------------------------------------


@breaks("liars", WRONG_BYTES)
def checksums_are_not_compared(patch: Patch) -> None:
    init = FrameSealer.__init__
    patch.setattr(FrameSealer, "__init__", lambda self, namespace, *, verify=True: init(self, namespace, verify=False))


@breaks("liars", WRONG_BYTES)
def frames_are_not_asked_for_their_key(patch: Patch) -> None:
    check_frame = FrameSealer.check_frame

    def trusting(self: FrameSealer, frame: memoryview, key: bytes, *, payload: bool = True) -> Any:
        size = int.from_bytes(frame[48:50], "little") if len(frame) > 50 else 0
        return check_frame(self, frame, bytes(frame[50 : 50 + size]) or key, payload=payload)

    patch.setattr(FrameSealer, "check_frame", trusting)


@breaks("restarts", WRONG_BYTES)
def all_weights_share_a_namespace(patch: Patch) -> None:
    patch.setattr(Namespace, "fingerprint", lambda self: b"0123456789abcdef")


@breaks("liars", WRONG_BYTES)
def a_failed_read_becomes_readable(patch: Patch) -> None:
    failed = HostTier.failed

    def hopeful(self: HostTier, slots: Sequence[int]) -> None:
        reads = [slot for slot in slots if self.slots.state(slot) is ChunkState.PROMOTING]
        self.filled(reads, ChunkEvent.ARRIVED)
        failed(self, [slot for slot in slots if slot not in reads])

    patch.setattr(HostTier, "failed", hopeful)


@breaks("mixed", WRONG_BYTES)
def failed_loads_are_not_reported(patch: Patch) -> None:
    patch.setattr(CompletionHandler, "_invalid_blocks", lambda self, load, record: set())


@breaks("resets", RESET)
def a_reset_leaves_loads_valid(patch: Patch) -> None:
    patch.setattr(JobTable, "mark_stale", lambda self: None)


# -- completions, deadlines, progress --------------------------------------------------------------------------------


@breaks("flapping", PROGRESS)
def some_completions_are_lost(patch: Patch) -> None:
    finish = Dispatcher._finish
    count = [0]

    def lossy(self: Dispatcher, state: Any, ticket: Any, outcomes: Any, now_s: float) -> None:
        count[0] += 1
        if count[0] % 20:
            finish(self, state, ticket, outcomes, now_s)
        else:
            self._end(state, ticket)

    patch.setattr(Dispatcher, "_finish", lossy)


@breaks("flapping", PROGRESS)
def a_breaker_never_closes(patch: Patch) -> None:
    patch.setattr("tierkv.dispatch.health.breaker.Breaker.trial_is_due", lambda self, now_s: False)


@breaks("flapping", FATAL)
def an_error_of_a_backend_reaches_the_engine(patch: Patch) -> None:
    submit = Dispatcher.submit

    def direct(self: Dispatcher, op: Any) -> None:
        tier = self._tiers[op.tier]
        if op.verb is Verb.PROBE and not tier.is_async:
            tier.backend.contains(op.keys)
        if op.verb is Verb.DELETE and not tier.is_async:
            tier.backend.contains(op.keys)
        submit(self, op)

    patch.setattr(Dispatcher, "submit", direct)


@breaks("mixed", JOBS)
def a_job_is_reported_twice(patch: Patch) -> None:
    report = JobTable.report_job
    patch.setattr(JobTable, "report_job", lambda self, job_id, count, failed: report(self, job_id, 2 * count, failed))


@breaks("churn", PROGRESS)
def an_aborted_lookup_keeps_its_chunks(patch: Patch) -> None:
    patch.setattr(OffloadScheduler, "_close_lookup", lambda self, record: self._lookups.close_lookup(record))


# -- loads -----------------------------------------------------------------------------------------------------------


@breaks("churn", WRONG_BYTES)
def the_blocks_of_an_aborted_load_are_not_fenced(patch: Patch) -> None:
    put = Fences.fence_blocks

    def careless(self: Fences, job: TransferJob, block_ids: Any = None) -> None:
        if job.is_store:
            put(self, job, block_ids)

    patch.setattr(Fences, "fence_blocks", careless)


@breaks("churn", PROGRESS)
def what_is_being_loaded_is_not_held(patch: Patch) -> None:
    prepare = OffloadManager.prepare_load

    def loose(self: OffloadManager, keys: Sequence[Any], ctx: Any) -> Any:
        grant = prepare(self, keys, ctx)
        self._host.unpin([ref.slot for ref in grant.slots])
        return grant

    def complete(self: OffloadManager, slots: Any, damaged: Any = ()) -> None:
        self.step.version += 1

    patch.setattr(OffloadManager, "prepare_load", loose)
    patch.setattr(OffloadManager, "complete_load", complete)


@breaks("returning", OFFERS)
def a_window_is_loaded_one_chunk_short(patch: Patch) -> None:
    """The search asks for one chunk too few of each window."""
    needs = SearchGroup.needs

    def short(self: SearchGroup, computed_tokens: int, end: int) -> range:
        wanted = needs(self, computed_tokens, end)
        return wanted if self.window_chunks is None or len(wanted) < 2 else wanted[1:]

    patch.setattr(SearchGroup, "needs", short)


@breaks("returning", WRONG_BYTES)
def what_is_offered_at_the_deadline_may_still_be_read(patch: Patch) -> None:
    """Every chunk with a slot in the host tier counts as readable after the deadline."""
    longest = Lookups._longest_hit

    def hopeful(self: Lookups, record: Any, ctx: Any, computed: int, tokens_max: int, *, late: bool) -> Any:
        if not late:
            return longest(self, record, ctx, computed, tokens_max, late=False)
        find = self._manager._host.slots.find
        lookup = lambda key: LookupResult.MISS if find(key) is None else LookupResult.HIT  # noqa: E731 - shorter so
        return find_hit(record.search_groups, computed, tokens_max, lookup)

    patch.setattr(Lookups, "_longest_hit", hopeful)
    patch.setattr(Passage, "granted_ready", lambda self: set(self.granted()))


@breaks("returning", PROGRESS)
def ended_loads_are_waited_for(patch: Patch) -> None:
    patch.setattr(LoadsInFlight, "ended", lambda self, owner, keys: None)


@breaks("returning", WRONG_BYTES)
def a_load_that_failed_on_one_worker_counts_as_whole(patch: Patch) -> None:
    report = JobTable.report_job

    def deaf(self: JobTable, job_id: int, count: int, failed: frozenset[Any]) -> Any:
        is_load = job_id in self._live and not self._live[job_id].job.is_store
        return report(self, job_id, count, frozenset() if is_load else failed)

    patch.setattr(JobTable, "report_job", deaf)


# -- accounts and events ---------------------------------------------------------------------------------------------


@breaks("mixed", EVENTS)
def evictions_are_not_reported(patch: Patch) -> None:
    extend = EventLog.extend

    def silent(self: EventLog, kind: CacheEventKind, tier: str, keys: Sequence[Any]) -> None:
        if kind is not CacheEventKind.REMOVED or tier != "host":
            extend(self, kind, tier, keys)

    patch.setattr(EventLog, "extend", silent)


@breaks("mixed", EVENTS)
def deletions_below_are_not_reported(patch: Patch) -> None:
    extend = EventLog.extend

    def silent(self: EventLog, kind: CacheEventKind, tier: str, keys: Sequence[Any]) -> None:
        if kind is not CacheEventKind.REMOVED or tier == "host":
            extend(self, kind, tier, keys)

    patch.setattr(EventLog, "extend", silent)


@breaks("calm", CAPACITY, first=60)
def a_tier_takes_one_frame_too_many(patch: Patch) -> None:
    has_room = Residency.has_room
    patch.setattr(Residency, "has_room", lambda self, size: has_room(self, 0))
    patch.setattr(LowerTier, "validate", lambda self: None)


@breaks("cramped", CAPACITY)
def room_is_free_before_the_deletion_has_ended(patch: Patch) -> None:
    def has_room(self: Residency, size: int) -> bool:
        capacity = self.capacity_bytes
        return capacity is None or self.used_bytes - self._deleting_bytes + self.reserved_bytes + size <= capacity

    patch.setattr(Residency, "has_room", has_room)
    patch.setattr(LowerTier, "validate", lambda self: None)


@breaks("storm", DURABLE, first=47)
def a_write_does_not_wait_for_the_deletion_of_its_key(patch: Patch) -> None:
    def wants(self: LowerTier, key: Any, now: float) -> bool:
        flags = self.residency.rows.flags_of(key)
        if not self.limits.writes or flags & WRITING:
            return False
        return bool(flags & DELETING) or self.presence(key, now) is not LookupResult.HIT

    def missing(self: LowerTier, chunks: Sequence[tuple[int, Any]], now: float) -> list[tuple[int, Any]]:
        return [chunk for chunk in chunks if self.wants(chunk[1], now)]

    patch.setattr(LowerTier, "wants", wants)
    patch.setattr(LowerTier, "missing", missing)
    patch.setattr(Residency, "being_deleted", lambda self, chunks: [])  # nothing waits for the deletion
    patch.setattr(LowerTier, "validate", lambda self: None)


@breaks("flapping", DURABLE)
def a_failed_write_counts_as_stored(patch: Patch) -> None:
    ended = InFlightOps._write_ended

    def hopeful(self: InFlightOps, tier: LowerTier, pending: Any, outcomes: Sequence[Any]) -> None:
        from tierkv.types.tier_ops import Outcome  # noqa: PLC0415

        ended(self, tier, pending, [Outcome(OutcomeKind.OK, 8192) for _ in outcomes])

    patch.setattr(InFlightOps, "_write_ended", hopeful)


@breaks("demotions", INSIDE)
def a_slot_is_free_before_its_chunk_is_written_back(patch: Patch) -> None:
    end_demotions = HostTier.end_demotions

    def hasty(self: HostTier, slots: Sequence[int]) -> Any:
        early = [slot for slot in slots if slot in self.slots.demoting]
        for slot in early:
            self.slots.pins[slot] = 1
        return end_demotions(self, early or [slot for slot in slots if self.slots.pins[slot]])

    patch.setattr(HostTier, "end_demotions", hasty)
    patch.setattr(HostTier, "validate", lambda self: None)


@breaks("demotions", INSIDE)
def a_requested_chunk_is_evicted(patch: Patch) -> None:
    patch.setattr(HostTier, "cancel_demotions", lambda self, slots: None)


@breaks("cramped", WAITING)
def nobody_is_sheltered(patch: Patch) -> None:
    patch.setattr(DirtyPins, "pin", lambda self: None)


@breaks("mixed", LEFTOVERS)
def the_shelter_forgets_who_it_holds(patch: Patch) -> None:
    begin_writes = DirtyPins.begin_writes

    def forgetful(self: DirtyPins, tier: LowerTier, slots: Iterable[int]) -> None:
        taken = list(slots)
        for slot in taken:
            self._waits.pop(slot, None)
        begin_writes(self, tier, taken)

    patch.setattr(DirtyPins, "begin_writes", forgetful)


@breaks("mixed", LEFTOVERS)
def stores_leak_their_hold(patch: Patch) -> None:
    complete = OffloadManager.complete_store

    def leaky(self: OffloadManager, slots: Collection[SlotRef], failed: frozenset[Any] = frozenset()) -> None:
        refs = list(slots)
        complete(self, refs, failed)
        chunk = self._host.slots.owner(refs[0]) if refs else None
        if chunk is not None and len(self._host) % 7 == 0:
            self._host.pin([chunk.slot])

    patch.setattr(OffloadManager, "complete_store", leaky)


@breaks("mixed", WRONG_BYTES)
def more_is_stored_than_was_computed(patch: Patch) -> None:
    storable = Stores.storable_tokens
    patch.setattr(Stores, "storable_tokens", lambda self, record, tokens: storable(self, record, tokens + 4))
