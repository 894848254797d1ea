"""Wiring that both kinds of stack share: memory, tiers, dispatch, workers, observers.

:func:`plan_stack` checks description and engine against each other. :func:`open_tiers` opens everything that has to be
closed again. Then the sans-I/O core is wired over the opened tiers (:mod:`tierkv.scheduler.wiring`), and
:func:`connect` joins both into a :class:`StackWiring`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tierkv._version import __version__
from tierkv.abc import Codec
from tierkv.config.resolving import ResolvedStack, ResolvedTier
from tierkv.config.schema import StackConfig
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.dispatch.threads.copy_pool import CopyPool
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.dispatch.threads.spawn import Spawn
from tierkv.errors import BackendError, ConfigError, NamespaceMismatchError
from tierkv.frames.frame import PARTS_MAX
from tierkv.frames.sealer import FrameSealer
from tierkv.logs.definitions import STACK_OPENED, TIER_LEFT_OUT, TIER_OPENED
from tierkv.logs.stack_log import StackLog
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.manager import OffloadManager
from tierkv.memory.arena import HostArena, private_memory
from tierkv.memory.population import Population, begin_population
from tierkv.memory.shared import SharedMemory
from tierkv.metrics.counters import CoreCounters
from tierkv.plugins.registry import PluginRegistry
from tierkv.scheduler.events.announcements import Announcements
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.events.event_queue import EventQueue
from tierkv.stack.observers import Observers
from tierkv.stack.remote_worker import WorkerSetup
from tierkv.stack.tier_factory import TierFactory, dispatch_limits, held_by, share_host_slots
from tierkv.stack.tier_lifecycle import SCAN_TIMEOUT_S, TierChanges
from tierkv.stack.timed_opening import AbsentTier, OpenDeadlineError, Opening, close_backend
from tierkv.structures.key_table import KeyDirectory
from tierkv.tiers.tier import Tier
from tierkv.types.engine import EngineSpec
from tierkv.types.geometry import Geometry, GroupGeometry
from tierkv.types.namespace import Namespace
from tierkv.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Everything that is known before anything is opened."""

    resolved: ResolvedStack
    """The description, with its plugins and their options."""
    engine: EngineSpec
    """The engine's shape."""
    registry: PluginRegistry
    """The installed plugins."""
    runtime: Runtime
    """Time, chance and threads."""
    geometry: Geometry
    """Sizes of groups and chunks."""
    namespace: Namespace
    """Identity of the engine's KV bytes."""
    sealer: FrameSealer
    """Seals and verifies frames."""
    counters: CoreCounters
    """Counters of scheduler and manager."""
    log: StackLog
    """Log of the stack."""
    began_s: float
    """Time on the stack's clock at which the opening began."""

    @property
    def config(self) -> StackConfig:
        """The description."""
        return self.resolved.config

    @property
    def verify_loads(self) -> bool:
        """Whether workers verify each chunk on its way to the GPU."""
        return self.config.host.verify and self.sealer.verify


@dataclass(frozen=True, slots=True)
class OpenedTiers:
    """Everything of a stack that holds memory, files or threads, but its workers."""

    arena: HostArena
    """Memory of the host tier."""
    shared: SharedMemory | None
    """The arena's memory, where workers are other processes."""
    population: Population
    """Provides the arena's pages in the background."""
    dispatcher: Dispatcher
    """Runs the operations of the tiers."""
    factory: TierFactory
    """Opened the tiers, and opens those attached later."""
    codecs: Mapping[str, Codec]
    """Codecs in use, by name."""
    lower: Sequence[LowerTier]
    """The tiers as the manager knows them, still empty."""
    absent: Sequence[AbsentTier]
    """Tiers that could not be opened, and are tried again."""


@dataclass(frozen=True, slots=True)
class StackWiring:
    """Collaborators of a stack, as built by the wiring code."""

    manager: OffloadManager
    """Owner of all chunks."""
    dispatcher: Dispatcher
    """Runs the operations of the tiers."""
    workers: tuple[Worker, ...]
    """Workers of this process, by rank; empty where the workers are other processes."""
    copies: tuple[CopyPool, ...]
    """Copy threads of those workers."""
    arena: HostArena
    """Memory of the host tier."""
    shared: SharedMemory | None
    """The arena's memory, where workers are other processes."""
    population: Population
    """Provides the arena's pages in the background."""
    setup: WorkerSetup | None
    """Setup of rank 0, where workers are other processes."""
    namespace: Namespace
    """Identity of the engine's KV bytes."""
    geometry: Geometry
    """Sizes of groups and chunks."""
    counters: CoreCounters
    """Counters of scheduler and manager."""
    observers: Observers
    """Plugins that observe cache events."""
    events: EventQueue
    """Events that the engine has not taken yet."""
    changes: TierChanges
    """Tiers to be attached or detached."""
    log: StackLog
    """Log of the stack."""
    rest_steps_max: int
    """Steps in a row that may leave the tiers alone."""
    spawn: Spawn
    """Starts threads."""


def namespace_of(config: StackConfig, engine: EngineSpec, geometry: Geometry) -> Namespace:
    """Return everything that makes the engine's KV bytes interchangeable; the description overrides the engine."""
    named = config.namespace
    return Namespace(
        model=named.model if named.model is not None else engine.model,
        revision=named.revision if named.revision is not None else engine.revision,
        dtype=engine.dtype,
        layout=engine.layout,
        groups=tuple(
            (sizes.block_tokens, _part_pages(sizes) * sizes.parts, group.kind.value, group.window_tokens)
            for group, sizes in zip(engine.groups, geometry.groups, strict=True)
        ),
        blocks_per_chunk=geometry.blocks_per_chunk,
        hash_block_tokens=engine.hash_block_tokens,
        rank=engine.rank,
        world_size=engine.world_size,
        epoch=named.epoch,
    )


def _part_pages(group: GroupGeometry) -> tuple[int, ...]:
    """Bytes of one block in each tensor, of the heads of one part."""
    return tuple(size // group.worker_parts for size in group.page_bytes)


def plan_stack(
    resolved: ResolvedStack, engine: EngineSpec, registry: PluginRegistry, runtime: Runtime, *, verify_frames: bool
) -> StackPlan:
    """Derive geometry, namespace and seal from description and engine.

    Raises:
        ConfigError: they do not fit each other.
    """
    config = resolved.config
    chunk = config.chunk
    geometry = Geometry.of(engine, blocks=chunk.blocks, tokens=chunk.tokens, parts=chunk.parts)
    namespace = namespace_of(config, engine, geometry)
    sealer = FrameSealer(namespace.fingerprint(), verify=verify_frames)
    if engine.replica < 0:
        raise ConfigError(f"replica = {engine.replica}: the replicas of an engine are counted from 0")
    if engine.num_workers > PARTS_MAX:
        raise ConfigError(f"num_workers = {engine.num_workers}: a chunk has room for the parts of {PARTS_MAX}")
    if chunk.parts is not None and chunk.parts > PARTS_MAX:
        raise ConfigError(f"chunk.parts = {chunk.parts}: a chunk has room for {PARTS_MAX} parts")
    log, began_s = StackLog(runtime.clock, config.log.interval_s), runtime.clock()
    return StackPlan(resolved, engine, registry, runtime, geometry, namespace, sealer, CoreCounters(), log, began_s)


def open_tiers(plan: StackPlan, undo: contextlib.ExitStack) -> OpenedTiers:
    """Map the arena, open the lower tiers and start their dispatch. undo: closes them if a later part fails.

    All tiers are opened side by side. One that cannot be opened, or not within its ``open_deadline_s``, is absent: it
    is logged and tried again, unless it is required.

    Raises:
        NamespaceMismatchError: the place of a tier holds other data.
        BackendError: a required tier cannot be opened.
        PluginError: a plugin is broken.
        ConfigError: a codec does not suit the engine's payloads.
    """
    config, runtime = plan.config, plan.runtime
    shared = SharedMemory() if plan.engine.capabilities.worker_processes else None
    if shared is not None:
        undo.callback(shared.close)
    memory = private_memory if shared is None else shared.map
    arena = HostArena(config.host.capacity, plan.geometry.payload_bytes_max, memory)
    undo.callback(arena.close)
    population = begin_population(arena, runtime.spawn, runtime.io_sleep, wanted=config.host.populate)
    undo.callback(population.stop)
    factory = TierFactory(
        plan.registry, runtime, plan.namespace, plan.sealer, arena, plan.counters,
        config.tenants.tracked_max, plan.geometry, plan.log, plan.engine.replica,
    )  # fmt: skip
    codecs = factory.open_codecs(plan.resolved.tiers)
    served, tiers, absent = _open_side_by_side(plan, factory, codecs)
    for late in absent:
        undo.callback(late.abandon)
    limits = [dispatch_limits(resolved) for resolved in served]
    with contextlib.ExitStack() as closing:
        for tier in tiers:
            closing.callback(close_backend, tier.backend)
        dispatcher = Dispatcher(tiers, limits, runtime.clock, spawn=runtime.spawn, engine_sleep=runtime.engine_sleep)
        closing.pop_all()  # the dispatcher closes them from here on
    undo.callback(dispatcher.close, 0.0)
    directory = KeyDirectory()
    lower = [
        factory.tables.make_table(index, resolved, tier.backend, directory)
        for index, (resolved, tier) in enumerate(zip(served, tiers, strict=True))
    ]
    share_host_slots(lower, arena.num_slots)
    return OpenedTiers(arena, shared, population, dispatcher, factory, codecs, lower, absent)


def _open_side_by_side(
    plan: StackPlan, factory: TierFactory, codecs: Mapping[str, Codec]
) -> tuple[list[ResolvedTier], list[Tier], list[AbsentTier]]:
    """Open tiers, each on a thread of its own. Returns those that opened, their tiers, and those that did not.

    Raises:
        TierKVError: as :func:`open_tiers`. Every tier is closed again.
    """
    served: list[ResolvedTier] = []
    tiers: list[Tier] = []
    absent: list[AbsentTier] = []
    described = plan.resolved.tiers
    names = tuple(resolved.config.name for resolved in described)
    with contextlib.ExitStack() as undo:
        openings: list[Opening] = []
        for resolved in described:
            openings.append(Opening(resolved.config.name, partial(factory.open_tier, resolved, codecs), plan.log))
            undo.callback(openings[-1].abandon)
            openings[-1].begin()
        for position, (resolved, opening) in enumerate(zip(described, openings, strict=True)):
            try:
                tier = opening.wait(resolved.config.open_deadline_s)
            except BackendError as error:
                if resolved.config.required or isinstance(error, NamespaceMismatchError):
                    raise
                plan.log.report(TIER_LEFT_OUT, tier=resolved.config.name, reason=error)
                still_opening = opening if isinstance(error, OpenDeadlineError) else None
                absent.append(AbsentTier(resolved, names[position + 1 :], still_opening))
                continue
            undo.callback(close_backend, tier.backend)
            tiers.append(tier)
            served.append(resolved)
        undo.pop_all()
    return served, tiers, absent


def host_tier(plan: StackPlan, opened: OpenedTiers) -> HostTier:
    """Return the empty host tier, with the eviction policy of the description."""
    slots = opened.arena.num_slots
    return HostTier(slots, opened.factory.tables.make_host_policy(plan.config.host, plan.resolved.host_policy, slots))


def reserved_chunks_max(plan: StackPlan, opened: OpenedTiers) -> int:
    """Return the number of host chunks that waiting requests may reserve together."""
    return max(1, int(opened.arena.num_slots * plan.config.host.reserved_share))


def connect(plan: StackPlan, opened: OpenedTiers, manager: OffloadManager, block_events: BlockEvents) -> StackWiring:
    """List what the tiers hold, start the workers of this process, and join everything."""
    config = plan.config
    _list_contents(opened)
    block_events.tiers = manager.tiers
    workers, copies = _workers(plan, opened.arena)
    _log_opening(plan, opened)
    return StackWiring(
        manager=manager,
        dispatcher=opened.dispatcher,
        workers=workers,
        copies=copies,
        arena=opened.arena,
        shared=opened.shared,
        population=opened.population,
        setup=_worker_setup(plan, opened),
        spawn=plan.runtime.spawn,
        namespace=plan.namespace,
        geometry=plan.geometry,
        counters=plan.counters,
        observers=_observers(plan),
        events=EventQueue(
            block_events,
            plan.counters,
            manager.budget.share(),
            kept=config.events.enabled,
            announcements=Announcements(block_events, manager.tiers, manager.step),
        ),
        changes=TierChanges(
            opened.factory,
            plan.registry,
            plan.runtime,
            opened.codecs,
            manager=manager,
            dispatcher=opened.dispatcher,
            names=[tier.name for tier in opened.lower],
            absent=opened.absent,
            num_slots=opened.arena.num_slots,
        ),
        log=plan.log,
        rest_steps_max=config.step.rest_steps_max,
    )


def _list_contents(opened: OpenedTiers) -> None:
    """Index the stored chunks of each tier. A tier that cannot list them is out of service until it can."""
    for result in opened.dispatcher.scan_all(SCAN_TIMEOUT_S):
        opened.lower[result.tier].knows_content = not result.error
        opened.lower[result.tier].load_index(result.content)


def _log_opening(plan: StackPlan, opened: OpenedTiers) -> None:
    """Log what was found in each tier, and the whole stack."""
    backends = {tier.config.name: tier.backend.name for tier in plan.resolved.tiers}
    for tier in opened.lower:
        plan.log.report(TIER_OPENED, tier=tier.name, backend=backends[tier.name], **held_by(tier))
    plan.log.report(
        STACK_OPENED,
        version=__version__,
        model=plan.namespace.model,
        namespace=plan.sealer.namespace.hex(),
        tiers=",".join(["host", *(tier.name for tier in opened.lower)]),
        host_bytes=opened.arena.num_slots * opened.arena.slot_bytes,
        chunks=sum(len(tier.residency.policy) for tier in opened.lower),
        seconds=plan.runtime.clock() - plan.began_s,
    )


def _workers(plan: StackPlan, arena: HostArena) -> tuple[tuple[Worker, ...], tuple[CopyPool, ...]]:
    """Return the workers of this process, and a pool of copy threads for each, since each has a thread of its own."""
    if plan.engine.capabilities.worker_processes:
        return (), ()
    host, runtime = plan.config.host, plan.runtime
    pools = tuple(
        CopyPool(host.copy_threads, name=name, spawn=runtime.spawn, engine_sleep=runtime.engine_sleep)
        for name in [f"tierkv-copy-{rank}" for rank in range(plan.engine.num_workers)]
    )
    workers = tuple(
        Worker(
            arena, plan.sealer, plan.geometry, pool.submit,
            rank=rank, verify_loads=plan.verify_loads, wait_for=runtime.wait, clock=runtime.clock,
            sleep=runtime.engine_sleep, gpu_staging_bytes=host.gpu_staging, log=plan.log,
        )
        for rank, pool in enumerate(pools)
    )  # fmt: skip
    return workers, pools


def _worker_setup(plan: StackPlan, opened: OpenedTiers) -> WorkerSetup | None:
    """Return the setup of rank 0, where workers are other processes."""
    if opened.shared is None:
        return None
    return WorkerSetup(
        rank=0,
        geometry=plan.geometry,
        namespace=plan.sealer.namespace,
        arena=opened.shared.arena_handle(opened.arena),
        copy_threads=plan.config.host.copy_threads,
        gpu_staging_bytes=plan.config.host.gpu_staging,
        verify_frames=plan.sealer.verify,
        verify_loads=plan.verify_loads,
    )


def _observers(plan: StackPlan) -> Observers:
    """Return the observers. They have a thread of their own: a slow one must not delay copies."""
    if not plan.registry.has_observers:
        return Observers(None, None)
    return Observers(
        plan.registry.observe, CopyPool(name="tierkv-observe", spawn=plan.runtime.spawn).submit, log=plan.log
    )
