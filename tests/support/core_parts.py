"""The core under test, wired without I/O: scheduler, manager, host tier and lower tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from at_rest import content_of
from core_truth import BedRequest, Truth, engine_spec

from tierkv.abc import Capabilities, EvictionPolicy
from tierkv.manager.contract import RequestContext
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.manager.manager import OffloadManager
from tierkv.manager.step_budget import STEP_KEYS_MAX
from tierkv.metrics.counters import CoreCounters
from tierkv.policies.lru import LruPolicy
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.scheduler.wiring import wire_core
from tierkv.structures.key_table import KeyDirectory
from tierkv.types.engine import GroupSpec, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierOp, Verb
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

DISK = Capabilities(durable=True, authoritative_index=True, scan=True, preferred_batch=4)
"""Tier whose chunks are all known."""
OBJECTS = Capabilities(durable=True, shared=True, bounded=False, preferred_batch=4)
"""Tier that must be probed."""

FRAME_BYTES = 8192
"""Largest size at rest of a chunk of the tests' size: a header page and a payload page."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Lower tier of a core under test. Times are short, so that few steps reach them."""

    name: str = "disk"
    capabilities: Capabilities = DISK
    limits: LowerTierLimits = field(
        default_factory=lambda: LowerTierLimits(capacity_bytes=None, write=WritePolicy.THROUGH, queue_chunks_max=1000)
    )


def disk(*, frames: int | None = None, write: str = "through", queue: int = 1000, name: str = "disk") -> TierSpec:
    """Tier with an authoritative index and room for ``frames`` frames."""
    capacity = None if frames is None else frames * FRAME_BYTES
    limits = LowerTierLimits(capacity_bytes=capacity, write=WritePolicy(write), queue_chunks_max=queue)
    return TierSpec(name, DISK, limits)


def objects(
    *, write: str = "through", probe_keys_max: int = 1024, presence_keys_max: int = 1_000_000, name: str = "objects"
) -> TierSpec:
    """Shared tier."""
    limits = LowerTierLimits(
        None, WritePolicy(write), queue_chunks_max=1000,
        probe_keys_max=probe_keys_max, presence_keys_max=presence_keys_max,
    )  # fmt: skip
    return TierSpec(name, OBJECTS, limits)


@dataclass(slots=True)
class Core:
    """Parts wired by :func:`make_core`, with the few moves that case tests repeat."""

    scheduler: OffloadScheduler
    manager: OffloadManager
    host: HostTier
    lower: list[LowerTier]
    counters: CoreCounters
    geometry: Geometry
    truth: Truth
    warnings: list[str]
    block_events: BlockEvents
    now: float = 0.0

    def begin(self, now: float | None = None) -> None:
        """Begin a step, by default at the time of the previous one."""
        self.now = self.now if now is None else now
        self.manager.begin_step(self.now)
        self.scheduler.begin_step(self.now)

    def request(self, tokens: Sequence[int] | int, request_id: str = "a", **params: object) -> BedRequest:
        """Request with these tokens (a number: tokens 0, 1, 2, ...); not registered yet."""
        numbers = range(tokens) if isinstance(tokens, int) else tokens
        return BedRequest(request_id, list(numbers), self.geometry.hash_block_tokens, params or None)

    def arrive(self, tokens: Sequence[int] | int, request_id: str = "a", **params: object) -> BedRequest:
        """Register a request."""
        request = self.request(tokens, request_id, **params)
        self.scheduler.on_new_request(request)
        return request

    def record(self, request: BedRequest) -> RequestRecord:
        """The scheduler's record of a request, with all its keys."""
        record = self.scheduler._record("record", request)
        record.extend_keys(self.geometry)
        return record

    def ask(self, request: BedRequest, computed: int = 0) -> int | None:
        """Answer of a lookup."""
        return self.scheduler.get_num_new_matched_tokens(request, computed)[0]

    def schedule(
        self, request: BedRequest, *, computed: int, scheduled: int, ids: Sequence[Sequence[int]], whole: bool = True
    ) -> ConnectorMeta:
        """Run one step in which this request alone is computed."""
        entry = ScheduledRequest(request.request_id, computed, scheduled, tuple(map(tuple, ids)), whole)
        return self.scheduler.build_connector_meta(StepOutput((entry,)))

    def put(self, keys: Sequence[Key], request_id: str = "writer") -> None:
        """Make chunks readable in the host tier, as a finished store would."""
        ctx = RequestContext(request_id)
        grant = self.manager.prepare_store([(key, int.from_bytes(key[-4:], "big")) for key in keys], ctx)
        assert grant is not None
        self.manager.complete_store(grant.slots)

    def keep_below(self, keys: Sequence[Key], tier: int = 0) -> None:
        """Put chunks into a lower tier with an index."""
        self.lower[tier].load_index(content_of([(key, FRAME_BYTES) for key in keys]))

    def finish(
        self, op: TierOp, kind: OutcomeKind | Sequence[OutcomeKind] = OutcomeKind.OK, elapsed_s: float = 0.0
    ) -> None:
        """Complete an instruction, all keys alike or one outcome per key."""
        kinds = [kind] * len(op.keys) if isinstance(kind, OutcomeKind) else kind
        size = FRAME_BYTES if op.verb is Verb.WRITE else 0
        outcomes = tuple(Outcome(one, size if one is OutcomeKind.OK else 0) for one in kinds)
        self.manager.on_completion(Completion(op.op_id, outcomes, elapsed_s=elapsed_s))

    def finish_all(self, kind: OutcomeKind = OutcomeKind.OK, *, probed: OutcomeKind | None = None) -> list[TierOp]:
        """Complete all instructions of the manager, and those that follow in later steps. Returns all of them.

        probed: outcome of probes; None: ``kind``.
        """
        done: list[TierOp] = []
        while ops := self.manager.take_ops():
            self.manager.budget.begin_step()
            for op in ops:
                self.finish(op, kind if op.verb is not Verb.PROBE or probed is None else probed)
            done += ops
        return done

    def report(self, *job_ids: int, failed: dict[int, frozenset[Key]] | None = None) -> LoadReport:
        """Report these jobs as ended by one worker."""
        return self.scheduler.update_connector_output(WorkerOutput(dict.fromkeys(job_ids, 1), failed or {}))

    def ready(self) -> set[Key]:
        """Keys that are readable in the host tier."""
        return {chunk.key for chunk in self.host.slots.visible() if chunk.state is ChunkState.READY}


def make_core(
    *,
    block_tokens: Sequence[int] = (4,),
    factor: int = 1,
    hash_block_tokens: int | None = None,
    slots: int = 64,
    reserved: int | None = None,
    tiers: Sequence[TierSpec] = (),
    limits: SchedulerLimits | None = None,
    groups: Sequence[GroupSpec] | None = None,
    host_policy: EvictionPolicy | None = None,
    lower_policy: Callable[[], EvictionPolicy] = LruPolicy,
    step_keys: int = STEP_KEYS_MAX,
) -> Core:
    """Core without I/O.

    reserved: slots that waiting requests may hold together (all of them by default). groups: the engine's groups,
    instead of full attention with ``block_tokens``. step_keys: budget of a step.
    """
    if groups is not None:
        block_tokens = [group.block_tokens for group in groups]
    engine = engine_spec(block_tokens, hash_block_tokens or min(block_tokens), groups)
    geometry = Geometry.of(engine, blocks=factor)
    counters = CoreCounters()
    directory = KeyDirectory()
    lower = [
        LowerTier(i, tier.name, tier.capabilities, tier.limits, lower_policy(), directory)
        for i, tier in enumerate(tiers)
    ]
    warnings: list[str] = []
    event_warnings: list[str] = []
    wired = wire_core(
        geometry,
        HostTier(slots, LruPolicy() if host_policy is None else host_policy),
        lower,
        limits=limits,
        counters=counters,
        reserved_chunks_max=reserved,
        step_keys_max=step_keys,
        warn=warnings.append,
        block_events=BlockEvents(geometry, counters, event_warnings.append, active=True),
    )
    core = Core(
        wired.scheduler, wired.manager, wired.host, lower, counters, geometry, Truth(geometry), warnings,
        wired.block_events,
    )  # fmt: skip
    core.begin(0.0)
    return core


def with_limits(spec: TierSpec, **changes: object) -> TierSpec:
    """Tier with other limits."""
    return replace(spec, limits=replace(spec.limits, **changes))  # type: ignore[arg-type]  # fields checked at run time
