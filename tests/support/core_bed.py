"""The whole core on a bench: engine, worker and tiers are scripted, the clock is manual, and every byte is real.

Tests advance single things (one I/O, one transfer, one step, some seconds) in any order. :meth:`Bed.check` then checks
all invariants (spec, section 18).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from at_rest import content_of
from core_memory import BedMemory
from core_mirror import BlockMirror
from core_parts import Core, TierSpec, make_core
from core_tiers import GARBAGE, ScriptedTiers, TierStore
from core_truth import Audit, BedRequest
from core_worker import REPORTS_MAX, ScriptedWorker
from group_parts import full
from simulation.engine.engine import BatchingEngine, EngineBehaviour
from simulation.engine.sequences import EngineSequence

from tierkv.manager.host.chunk import Chunk
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.step_budget import STEP_KEYS_MAX
from tierkv.scheduler.limits import SchedulerLimits, StorePlanName, StorePolicy
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupSpec, LoadReport
from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key
from tierkv.types.tier_ops import TierHealth


@dataclass(frozen=True, slots=True)
class BedSpec:
    """Parts of a bed, as in :func:`core_parts.make_core`."""

    block_tokens: tuple[int, ...] = (4,)
    factor: int = 1
    hash_block_tokens: int = 4
    slots: int = 8
    reserved: int = 6
    gpu_blocks: int = 24
    tiers: tuple[TierSpec, ...] = ()
    num_workers: int = 1
    deadline_s: float = 5.0
    gpu_caching: bool = True
    prompt_only: bool = False
    groups: tuple[GroupSpec, ...] = ()
    store_plan: StorePlanName = "immediate"
    store_policy: StorePolicy = StorePolicy.BLOCK_LEVEL
    holds_finished: bool = False
    prefill_tokens_per_s: float | None = 1000.0
    step_keys: int = STEP_KEYS_MAX
    limits: SchedulerLimits = field(init=False)

    def __post_init__(self) -> None:
        """Derive the scheduler's limits and the groups; full attention by default."""
        if not self.groups:
            object.__setattr__(self, "groups", tuple(full(size) for size in self.block_tokens))
        limits = SchedulerLimits(
            lookup_deadline_s=self.deadline_s,
            prompt_only=self.prompt_only,
            num_workers=self.num_workers,
            store_plan=self.store_plan,
            store_policy=self.store_policy,
            delays_free_blocks=self.holds_finished,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )
        object.__setattr__(self, "limits", limits)


class BedEngineSetup:
    """Fixed properties of a bed's engine."""

    token_budget = 16
    running_max = 1_000_000
    frees_early = False

    def __init__(self, spec: BedSpec) -> None:
        capabilities = EngineCapabilities(delays_free_blocks=spec.holds_finished)
        self.engine = EngineSpec("model", "float32", spec.groups, spec.hash_block_tokens, capabilities=capabilities)
        self.gpu_blocks = spec.gpu_blocks + 1
        self.caching = spec.gpu_caching


class Bed:
    """Scripted engine, worker and tiers around a real core."""

    def __init__(self, spec: BedSpec) -> None:
        self.spec = spec
        self.core: Core = make_core(
            groups=spec.groups,
            factor=spec.factor,
            hash_block_tokens=spec.hash_block_tokens,
            slots=spec.slots,
            reserved=spec.reserved,
            tiers=spec.tiers,
            limits=spec.limits,
            step_keys=spec.step_keys,
        )
        core = self.core
        self.audit = Audit()
        self.memory = [GARBAGE] * spec.slots
        self.tiers = ScriptedTiers(spec.tiers, core.host, self.memory, core.truth, self.audit)
        gpu = BedMemory(spec.groups, spec.gpu_blocks, core.truth, self.audit)
        self.worker = ScriptedWorker(core.geometry, core.truth, self.memory, gpu.blocks, self.audit, spec.num_workers)
        self.engine = BatchingEngine(BedEngineSetup(spec), core.scheduler, [self.worker], gpu, self)
        core.scheduler.register_free_queue(self.engine.tables.pool.free_queue, max_batched_tokens=16)
        self._offered: dict[str, tuple[Key, ...]] = {}
        self.residents: dict[str, set[Key]] = {"host": set(), **{tier.name: set() for tier in spec.tiers}}
        self.mirror = BlockMirror(core.geometry, core.block_events)
        self._indexed = {"host", *(tier.name for tier in spec.tiers if tier.capabilities.authoritative_index)}
        self.offers = 0
        self._state: tuple[object, ...] = ()
        self._progressed_s = 0.0  # time of the latest change of anything that a request may wait for
        self._ids = 0

    # -- pushing things forward --------------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int], new_tokens: int = 1, params: dict[str, object] | None = None) -> BedRequest:
        """Register a request."""
        self._ids += 1
        request = BedRequest(f"r{self._ids}", tokens, self.core.geometry.hash_block_tokens, params)
        self.engine.add(request, max(1, new_tokens))
        return request

    def step(
        self,
        behaviour: EngineBehaviour | None = None,
        *,
        seconds: float = 0.01,
        reports_max: int = REPORTS_MAX,
        rests: bool = False,
    ) -> None:
        """Run one engine step, as the stack's step loop does it. rests: chunks of requests that decode may wait."""
        core = self.core
        build = type(core.scheduler).build_connector_meta
        vars(core.scheduler)["build_connector_meta"] = partial(build, core.scheduler, rests=rests)
        core.now += seconds
        self._take_in()
        core.scheduler.begin_step(core.now)
        self.worker.reports_max = reports_max
        self.engine.step(behaviour or EngineBehaviour())
        self._hand_out()

    def _take_in(self) -> None:
        self.core.manager.begin_step(self.core.now)
        while self.tiers.completion:
            self.core.manager.on_completion(self.tiers.completion.popleft())
        counters, passages = self.core.counters, self.core.manager.passages
        state = (
            self.core.manager.version, counters.chunks_loaded, counters.chunks_stored, counters.deadlines_expired,
            tuple(self.core.scheduler._records), passages.account.total, tuple(passages.owners),
            self.core.scheduler._running.resets,  # all are asked about afresh
        )  # fmt: skip
        if state != self._state:
            self._state, self._progressed_s = state, self.core.now

    def _hand_out(self) -> None:
        for op in self.core.manager.take_ops():
            self.tiers.submit(op)
        events = self.core.manager.take_events()
        self.mirror.take(events)
        for event in events:
            residents = self.residents[event.tier]
            match event.kind:
                case CacheEventKind.STORED:
                    residents.update(event.keys)
                case CacheEventKind.REMOVED:
                    known = event.tier in self._indexed
                    assert not known or residents.issuperset(event.keys), "removed what was never stored"
                    residents.difference_update(event.keys)
                case CacheEventKind.CLEARED:
                    residents.clear()

    def reset(self) -> None:
        """Empty the host tier, between steps."""
        self.core.scheduler.reset_cache()
        self._hand_out()

    def set_health(self, tier: int, *, usable: bool) -> None:
        """Open or close a tier's breaker."""
        self.tiers.completion.append(TierHealth(tier, usable=usable))

    def damage_slot(self, pick: int) -> None:
        """Corrupt a readable chunk in the host tier that no I/O is using."""
        ready = [chunk for chunk in self.core.host.slots.visible() if chunk.state is ChunkState.READY]
        if ready:
            slot = ready[pick % len(ready)].slot
            self.memory[slot] = GARBAGE
            self.worker.damaged.add(slot)

    def damage_frame(self, tier: int, pick: int) -> None:
        """Corrupt a frame at rest."""
        frames = self.tiers.stores[tier].frames
        if frames:
            frames[list(frames)[pick % len(frames)]] = GARBAGE

    def fill_below(self, request: BedRequest, tier: int = 0, chunks: Sequence[int] | None = None) -> None:
        """Put a request's chunks into a lower tier, as an earlier process would have stored them."""
        core = self.core
        core.truth.learn(request)
        store = self.tiers.stores[tier]
        leaving = set(core.lower[tier].residency.rows.deleting())
        for group in core.geometry.groups:
            keys = core.truth.keys(request, group.index)
            for i, key in enumerate(keys):
                if (chunks is None or i in chunks) and key not in leaving:
                    store.frames[key] = core.truth.payloads[key]
        if store.spec.capabilities.authoritative_index:
            core.lower[tier].load_index(content_of((key, 4096 + len(frame)) for key, frame in store.frames.items()))
            self.residents[store.spec.name] |= store.frames.keys() - leaving

    def run_transfers(self) -> None:
        """Let all started transfers end well."""
        for job_id in list(self.worker.running):
            self.worker.run(job_id)

    def run_io(self) -> None:
        """Let all instructions to tiers end well."""
        for op_id in list(self.tiers.pending):
            self.tiers.complete(op_id)

    def settle(self, steps_max: int = 400) -> int:
        """Let everything end well, and step until no work is pending. Returns the number of steps."""
        for tier in range(len(self.spec.tiers)):
            self.set_health(tier, usable=True)
        for steps in range(steps_max):
            if not self.engine.sequences and self.is_quiet:
                return steps
            self.run_transfers()
            self.run_io()
            self.step(seconds=0.1)
            self.check()
        left = [(one.request.request_id, one.computed, one.request.num_tokens) for one in self.engine.sequences]
        raise AssertionError(f"no end after {steps_max} steps: {left}, {len(self.tiers.pending)} instructions")

    @property
    def is_quiet(self) -> bool:
        """Whether no transfer, instruction or report is in flight."""
        return (
            self.worker.is_idle
            and not self.tiers.pending
            and not self.tiers.completion
            and not self.engine.orphans
            and not self.engine.held
            and not self.core.scheduler.has_pending_work
            and all(tier.is_quiet for tier, _ in self._lower)
        )

    @property
    def _lower(self) -> list[tuple[LowerTier, TierStore]]:
        """View of the core on each lower tier, beside its content."""
        return list(zip(self.core.lower, self.tiers.stores, strict=True))

    # -- what must always hold ---------------------------------------------------------------------------------------

    def answered(self, sequence: EngineSequence[BedRequest], local: int, answer: int | None) -> None:
        """Check that offered keys are readable, and that no deferral outlives its deadline without progress."""
        now = self.core.now
        record = self.core.scheduler._records[sequence.request.request_id]
        if answer is None:
            passage, loads = self.core.manager.passages.get(record.ctx.request_id), self.core.scheduler._lookups._loads
            waits_for_load = passage is not None and passage.ready and loads.has_any(record.lookup.wanted)
            if record.has_jobs or waits_for_load:
                sequence.deferred_since_s = None
                return  # it waits for a worker, of its own or of another request's load, not for a tier
            if sequence.deferred_since_s is None:
                sequence.deferred_since_s = now
            waited = now - max(sequence.deferred_since_s, self._progressed_s)
            is_under_way = any(op.slots for op in self.tiers.pending.values())
            is_late = is_under_way and waited > self.spec.deadline_s
            assert not is_late, f"{sequence.request.request_id} is deferred for {waited} s without any progress"
            return
        sequence.deferred_since_s = None
        assert answer in range(sequence.request.num_tokens - local + 1 - self.core.geometry.has_windows)
        if not answer:
            return
        self.offers += 1
        for group in self.core.geometry.groups:
            assert answer >= group.chunk_tokens
            keys = self.core.truth.keys(sequence.request, group.index)
            stop = cdiv(local + answer, group.chunk_tokens)
            for i in range(max(local // group.chunk_tokens, stop - (group.window_chunks or stop)), stop):
                if record.lookup.will_stream and keys[i] not in record.lookup.gathered:
                    # It is not held. When the offer is repeated, in a later step, it may have been evicted.
                    repeated = self._offered.get(sequence.request.request_id) is record.lookup.wanted
                    # A search that verifies another one is not verified itself, although it took several steps.
                    took_steps = record.lookup.verifies and record.lookup.began != self.core.manager.budget.step
                    known = repeated or took_steps or self._is_somewhere(keys[i], record.lookup.since_s)
                    assert known, f"{keys[i].hex()} is offered, but in no tier"
                    continue
                chunk = self._offered_chunk(sequence, keys[i])
                assert chunk.pins > 0
                if chunk.slot not in self.worker.damaged:
                    assert self.core.truth.is_good(keys[i], self.memory[chunk.slot])
        self._offered[sequence.request.request_id] = record.lookup.wanted

    def loads_ended(self, report: LoadReport) -> None:
        """Note that the core reported loads as ended."""

    def aborted(self, request_id: str) -> None:
        """Note that a request was aborted during its load."""

    def _is_somewhere(self, key: Key, since: float | None) -> bool:
        """Whether the core knows a chunk to be in some tier.

        since: answers that shared tiers gave since then, the begin of the lookup, count although they have expired.
        """
        core = self.core
        if core.host.slots.find(key) is not None:
            return True
        return core.manager._tier_io.sources_of([key], since=math.inf if since is None else since) != [None]

    def _offered_chunk(self, sequence: EngineSequence[BedRequest], key: Key) -> Chunk:
        """Chunk that is held for a request, readable or (if another request found it corrupt) doomed."""
        granted = self.core.manager.passages.granted(sequence.request.request_id)
        assert key in granted, f"{key.hex()} is offered to {sequence.request.request_id}, but not held for it"
        chunk = granted[key][0]
        assert chunk.state in (ChunkState.READY, ChunkState.DOOMED)
        return chunk

    def check(self) -> None:
        """Check all invariants that hold between any two events."""
        self.core.scheduler.validate()
        self._check_holds()
        self._check_residents()
        for store in self.tiers.stores:
            capacity = store.spec.limits.capacity_bytes
            assert capacity is None or store.used_bytes <= capacity

    def _check_holds(self) -> None:
        """Check that every pin on a chunk has an owner, and is counted once."""
        core = self.core
        tier_io = core.manager._tier_io
        holds: Counter[int] = Counter()
        passages = core.manager.passages
        for owner in passages.owners:
            holds.update(chunk.slot for chunk, _ in passages.granted(owner).values())
        for _, slots in passages._releases.waiting():
            holds.update(slots)
        for status in core.scheduler._jobs._live.values():
            holds.update(core.host.slots.leased(status.job.slots))
        for pending in tier_io.in_flight:
            holds.update(pending.slots)
        holds.update(tier_io.admissions.dirty_pins.slots)
        holds.update(tier_io._demotions.held)
        for reads in tier_io.reads.values():
            holds.update(chain.from_iterable(reads._waiting.values()))
        for slot, holders in enumerate(core.host.slots.pins):
            key = core.host.slots.key(slot)
            assert holds.pop(slot, 0) == holders, f"{key.hex()}: {core.host.slots.transitions_of(key)}"
        assert not holds, "a chunk without a slot is held"

    def _check_residents(self) -> None:
        """Check that replayed events give exactly the resident set (once they are drained)."""
        if not self.core.manager._events._runs:
            assert self.core.ready() == self.residents["host"]
            self.mirror.check(self.residents)

    def check_end(self) -> None:
        """Check that nothing leaked when all requests have ended and all I/O is done."""
        core, scheduler = self.core, self.core.scheduler
        self.check()
        assert self.audit.is_quiet
        assert not scheduler._records
        assert not len(scheduler._jobs)
        assert not len(scheduler._fences)
        assert not len(scheduler._tables._windows)
        assert not scheduler._completions.has_pending_report
        assert not scheduler._lookups.open_ids
        assert not len(scheduler._lookups._loads)
        assert not core.manager.passages.owners
        assert core.manager.passages.account.total == 0
        assert core.manager.passages.hold_chunks_max == self.spec.reserved
        assert not scheduler._loads._streams
        assert not self.worker.open_loads
        assert not core.manager._tier_io.in_flight
        assert not core.manager.has_pending_changes
        self.mirror.check_end(self.residents)
        assert core.host.room == core.host.num_slots, "a slot is neither free nor evictable"
        assert not self.engine.tables.pool.num_held
        brought = sum(core.counters.tokens_loaded.values())
        assert brought + core.counters.tokens_given_up == self.engine.tokens_external
        has = core.counters.tokens_local + brought
        assert core.counters.tokens_asked == has + core.counters.tokens_computed
        assert not scheduler._accounting._open
        for chunk in core.host.slots.visible():
            assert chunk.pins == 0
            if chunk.slot not in self.worker.damaged:
                assert core.truth.is_good(chunk.key, self.memory[chunk.slot])
        for tier, store in self._lower:
            assert tier.residency.reserved_bytes == 0
            assert tier.is_quiet
            if tier.capabilities.authoritative_index:
                assert set(store.frames) <= set(tier.residency), "bytes at rest without an account"
                assert self.residents[tier.name] == set(tier.residency)

    def states(self) -> Counter[RequestState]:
        """Number of requests per state."""
        return Counter(record.state for record in self.core.scheduler._records.values())
