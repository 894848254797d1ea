"""What is wired alike in every stack: memory, tiers, dispatch and manager; and what is closed again if it fails."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from tierkv.abc import Codec
from tierkv.config.resolving import ResolvedStack
from tierkv.config.schema import StackConfig
from tierkv.dispatch.copy_pool import CopyPool
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.dispatch.runtime import Runtime
from tierkv.errors import ConfigError
from tierkv.frames.frame import PARTS_MAX, FrameSealer
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.manager import OffloadManager
from tierkv.memory.arena import HostArena, private_memory
from tierkv.memory.shared import SharedMemory
from tierkv.metrics.counters import CoreCounters
from tierkv.plugins.registry import PluginRegistry
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.events.event_queue import EventQueue
from tierkv.stack.core import BaseParts, StackBase
from tierkv.stack.observers import Observers
from tierkv.stack.remote_worker import WorkerSetup
from tierkv.stack.tier_factory import TierOpener, close_backend, dispatch_limits, share_host_slots
from tierkv.stack.tier_lifecycle import SCAN_TIMEOUT_S, TierChanges
from tierkv.tiers.tier import Tier
from tierkv.types.engine import EngineSpec
from tierkv.types.geometry import Geometry
from tierkv.types.namespace import Namespace
from tierkv.worker.worker import Worker

_log = logging.getLogger(__name__)

StackT = TypeVar("StackT", bound=StackBase)


def namespace_of(config: StackConfig, engine: EngineSpec, geometry: Geometry) -> Namespace:
    """Everything that makes the engine's KV bytes interchangeable, with what the user says about it."""
    named = config.namespace
    return Namespace(
        model=named.model if named.model is not None else engine.model,
        revision=named.revision if named.revision is not None else engine.revision,
        dtype=engine.dtype,
        layout=engine.layout,
        groups=tuple(
            (group.block_tokens, group.page_bytes * engine.num_workers, group.kind.value, group.window_tokens)
            for group in engine.groups
        ),
        blocks_per_chunk=geometry.blocks_per_chunk,
        hash_block_tokens=engine.hash_block_tokens,
        rank=engine.rank,
        world_size=engine.world_size,
        epoch=named.epoch,
    )


class Assembly(ABC, Generic[StackT]):
    """One opening of one stack; keeps what was opened, to close it again if a later part fails."""

    def __init__(
        self,
        resolved: ResolvedStack,
        engine: EngineSpec,
        registry: PluginRegistry,
        runtime: Runtime,
        *,
        verify_frames: bool,
    ) -> None:
        self.resolved = resolved
        self.config = resolved.config
        self.registry = registry
        self.runtime = runtime
        self.counters = CoreCounters()
        self.engine = engine
        self.geometry = Geometry.of(engine, blocks=self.config.chunk.blocks, tokens=self.config.chunk.tokens)
        self.namespace = namespace_of(self.config, engine, self.geometry)
        self.sealer = FrameSealer(self.namespace.fingerprint(), verify=verify_frames)
        if engine.replica < 0:
            raise ConfigError(f"replica = {engine.replica}: the replicas of an engine are counted from 0")
        self.check()
        self.verify_loads = self.config.host.verify and verify_frames
        self.shared = SharedMemory() if engine.capabilities.worker_processes else None
        if engine.num_workers > PARTS_MAX:
            raise ConfigError(f"num_workers = {engine.num_workers}: a chunk has room for the parts of {PARTS_MAX}")

    @abstractmethod
    def check(self) -> None:
        """Whether description and engine go together with this kind of stack.

        Raises:
            ConfigError: they do not.
        """

    @abstractmethod
    def wire(self, base: BaseParts, undo: contextlib.ExitStack) -> StackT:
        """The stack. undo: closes what is opened here, should anything fail."""

    def build(self) -> StackT:
        """The wired stack."""
        with contextlib.ExitStack() as undo:
            memory = private_memory if self.shared is None else self.shared.map
            if self.shared is not None:
                undo.callback(self.shared.close)
            arena = HostArena(self.config.host.capacity, self.geometry.payload_bytes_max, memory)
            undo.callback(arena.close)
            runtime, counters = self.runtime, self.counters
            opener = TierOpener(
                self.registry, runtime, self.namespace, self.sealer, arena, counters,
                self.config.tenants.tracked_max, self.engine.replica,
            )  # fmt: skip
            codecs = opener.open_codecs(self.resolved.tiers)
            with contextlib.ExitStack() as unopened:
                tiers = self._open_tiers(opener, codecs, unopened)
                unopened.pop_all()  # from here on the dispatcher closes them
            limits = [dispatch_limits(tier) for tier in self.resolved.tiers]
            dispatcher = Dispatcher(
                tiers, limits, runtime.clock, spawn=runtime.spawn, engine_sleep=runtime.engine_sleep
            )
            undo.callback(dispatcher.close, 0.0)
            tables = [
                opener.table(index, resolved, tier.backend)
                for index, (resolved, tier) in enumerate(zip(self.resolved.tiers, tiers, strict=True))
            ]
            stack = self.wire(self._base(arena, dispatcher, opener, codecs, tables), undo)
            undo.pop_all()
        return stack

    def _base(
        self,
        arena: HostArena,
        dispatcher: Dispatcher,
        opener: TierOpener,
        codecs: Mapping[str, Codec],
        lower: Sequence[LowerTier],
    ) -> BaseParts:
        config, counters = self.config, self.counters
        share_host_slots(lower, arena.num_slots)
        host = HostTier(arena.num_slots, opener.host_policy(config.host, self.resolved.host_policy, arena.num_slots))
        manager = OffloadManager(
            host,
            lower,
            [group.payload_bytes for group in self.geometry.groups],
            max(1, int(arena.num_slots * config.host.reserved_share)),
            counters,
        )
        self._recover(lower, dispatcher)
        workers, copies = self._workers(arena)
        block_events = self.block_events()
        return BaseParts(
            manager=manager,
            dispatcher=dispatcher,
            workers=workers,
            copies=copies,
            arena=arena,
            shared=self.shared,
            setup=self._setup(arena),
            namespace=self.namespace,
            geometry=self.geometry,
            counters=counters,
            observers=self._observers(),
            block_events=block_events,
            events=EventQueue(block_events, counters, kept=config.events.enabled),
            changes=TierChanges(
                opener,
                self.registry,
                self.runtime,
                codecs,
                manager=manager,
                dispatcher=dispatcher,
                names=[tier.config.name for tier in self.resolved.tiers],
                num_slots=arena.num_slots,
            ),
            completions_per_step_max=config.lookup.completions_per_step_max,
        )

    def block_events(self) -> BlockEvents:
        """What describes events; here nobody does."""
        return BlockEvents(self.geometry, self.counters, _log.warning, active=False)

    def _workers(self, arena: HostArena) -> tuple[tuple[Worker, ...], tuple[CopyPool, ...]]:
        """The workers of this process and their threads: one pool each, since each belongs to a thread of its own."""
        if self.shared is not None:
            return (), ()
        threads = self.config.host.copy_threads
        runtime = self.runtime
        names = [f"tierkv-copy-{rank}" for rank in range(self.engine.num_workers)]
        pools = tuple(
            CopyPool(threads, name=name, spawn=runtime.spawn, engine_sleep=runtime.engine_sleep) for name in names
        )
        workers = tuple(
            Worker(
                arena, self.sealer, self.geometry, pool.submit,
                rank=rank, verify_loads=self.verify_loads, wait_for=runtime.wait, clock=runtime.clock,
                gpu_staging_bytes=self.config.host.gpu_staging,
            )
            for rank, pool in enumerate(pools)
        )  # fmt: skip
        return workers, pools

    def _setup(self, arena: HostArena) -> WorkerSetup | None:
        """What workers in other processes must know, for rank 0."""
        if self.shared is None:
            return None
        return WorkerSetup(
            rank=0,
            geometry=self.geometry,
            namespace=self.sealer.namespace,
            arena=self.shared.handle(arena),
            copy_threads=self.config.host.copy_threads,
            gpu_staging_bytes=self.config.host.gpu_staging,
            verify_frames=self.sealer.verify,
            verify_loads=self.verify_loads,
        )

    def _observers(self) -> Observers:
        """Observers have a thread of their own: a slow one must not delay copies."""
        if not self.registry.has_observers:
            return Observers(None, None)
        return Observers(self.registry.observe, CopyPool(name="tierkv-observe", spawn=self.runtime.spawn).submit)

    def _open_tiers(self, opener: TierOpener, codecs: Mapping[str, Codec], undo: contextlib.ExitStack) -> list[Tier]:
        tiers = []
        for resolved in self.resolved.tiers:
            tier = opener.open(resolved, codecs)
            undo.callback(close_backend, tier.backend)
            tiers.append(tier)
        return tiers

    def _recover(self, lower: Sequence[LowerTier], dispatcher: Dispatcher) -> None:
        """Take over what lies in the tiers. One that cannot tell is out of service, and its breaker says so."""
        for result in dispatcher.scan_all(SCAN_TIMEOUT_S):
            if result.error:
                _log.warning("tier %s is out of service: %s", lower[result.tier].name, result.error)
            lower[result.tier].load_index(result.entries)
