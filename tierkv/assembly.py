"""How a stack is wired: description, installed plugins and an engine's shape become objects that know each other."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierkv.abc import Codec
from tierkv.codecs.frame import PARTS_MAX, FrameSealer
from tierkv.config.loading import load_config, parse_config
from tierkv.config.resolving import ResolvedStack, resolve
from tierkv.config.schema import StackConfig
from tierkv.dispatch.copy_pool import CopyPool
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.dispatch.runtime import Runtime
from tierkv.errors import ConfigError
from tierkv.events import Observers
from tierkv.manager.host_index import HostIndex
from tierkv.manager.lower_tier import LowerTier
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.plugins import PluginRegistry, load_plugins
from tierkv.recorded_stack import RecordedStack
from tierkv.recording.writer import RecordWriter
from tierkv.scheduler.block_events import BlockEvents
from tierkv.scheduler.event_queue import EventQueue
from tierkv.scheduler.limits import SchedulerLimits, StorePolicy
from tierkv.scheduler.plans.lazy import check_lazy
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.stack import Stack
from tierkv.stack_parts import StackParts
from tierkv.tier_changes import SCAN_TIMEOUT_S, TierChanges
from tierkv.tier_opening import TierOpener, close_backend, dispatch_limits, share_host_slots
from tierkv.tiers.arena import HostArena, private_memory
from tierkv.tiers.shared_memory import SharedMemory
from tierkv.tiers.tier import Tier
from tierkv.types.engine import EngineSpec
from tierkv.types.geometry import Geometry
from tierkv.types.namespace import Namespace
from tierkv.worker.part_book import PartBook
from tierkv.worker.worker import Worker
from tierkv.worker_setup import WorkerSetup

_log = logging.getLogger(__name__)


def open_stack(
    config: StackConfig | Mapping[str, Any] | str | Path,
    engine: EngineSpec,
    *,
    plugins: PluginRegistry | None = None,
    runtime: Runtime | None = None,
    verify_frames: bool = True,
) -> Stack:
    """Open a stack for an engine. Blocks until durable tiers have told what they hold.

    Args:
        config: a stack description: a path to TOML, YAML or JSON, a mapping, or a loaded one.
        engine: the engine's shape.
        plugins: what is installed; found by entry points if left out.
        runtime: where time, chance and threads come from; the real ones if left out.
        verify_frames: False compares no checksum anywhere. It exists for one test, which shows that corruption then
            changes tokens.

    Raises:
        ConfigError: the description is wrong, or does not fit the engine; lists every problem.
        PluginError: a plugin that the stack asks for is missing or broken.
        BackendError: a tier cannot be opened; says what to do.
    """
    registry = plugins or load_plugins()
    resolved = _resolved(config, registry)
    return _Assembly(resolved, engine, registry, runtime or Runtime(), verify_frames=verify_frames).build()


def _resolved(config: StackConfig | Mapping[str, Any] | str | Path, registry: PluginRegistry) -> ResolvedStack:
    if isinstance(config, StackConfig):
        return resolve(config, registry)
    if isinstance(config, Mapping):
        return resolve(parse_config(config), registry)
    return resolve(load_config(Path(config)), registry, str(config))


def _check_capabilities(engine: EngineSpec) -> None:
    """Every load may fail, and may take several steps: there is no way to load otherwise.

    Raises:
        ConfigError: the engine says that it cannot live with that.
    """
    needs = {
        "loads_may_fail": "compute again what LoadReport.invalid_block_ids names",
        "loads_span_steps": "let a request wait until LoadReport.finished names it",
    }
    for flag, do in needs.items():
        if not getattr(engine.capabilities, flag):
            raise ConfigError(
                f"EngineCapabilities({flag}=False): tierkv has no other way to load. Let the engine {do}, and leave "
                "the flag at True"
            )


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


def _check_store_plan(config: StackConfig, engine: EngineSpec, geometry: Geometry) -> None:
    if config.store.plan != "lazy":
        return
    if not engine.capabilities.shows_free_blocks:
        raise ConfigError(
            'store.plan = "lazy": this engine does not show its free blocks (EngineCapabilities.shows_free_blocks); '
            'use "immediate" or "eager"'
        )
    check_lazy(geometry)


class _Assembly:
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
        _check_capabilities(engine)
        _check_store_plan(self.config, engine, self.geometry)
        self.verify_loads = self.config.host.verify and verify_frames
        self.shared = SharedMemory() if engine.capabilities.worker_processes else None
        if engine.num_workers > PARTS_MAX:
            raise ConfigError(f"num_workers = {engine.num_workers}: a chunk has room for the parts of {PARTS_MAX}")

    def build(self) -> Stack:
        """The wired stack."""
        with contextlib.ExitStack() as undo:
            memory = private_memory if self.shared is None else self.shared.map
            if self.shared is not None:
                undo.callback(self.shared.close)
            arena = HostArena(self.config.host.capacity, self.geometry.payload_bytes_max, memory)
            undo.callback(arena.close)
            runtime, counters = self.runtime, self.counters
            opener = TierOpener(
                self.registry, runtime, self.namespace, self.sealer, arena, counters, self.config.tenants.told_apart_max
            )
            codecs = opener.open_codecs(self.resolved.tiers)
            with contextlib.ExitStack() as unopened:
                tiers = self._open_tiers(opener, codecs, unopened)
                unopened.pop_all()  # from here on the dispatcher closes them
            limits = [dispatch_limits(tier) for tier in self.resolved.tiers]
            dispatcher = Dispatcher(tiers, limits, runtime.clock, spawn=runtime.spawn, pause=runtime.pause)
            undo.callback(dispatcher.close, 0.0)
            tables = [
                opener.table(index, resolved, tier.backend)
                for index, (resolved, tier) in enumerate(zip(self.resolved.tiers, tiers, strict=True))
            ]
            stack = self._wire(arena, dispatcher, opener, codecs, tables)
            undo.pop_all()
        return stack

    def _wire(
        self,
        arena: HostArena,
        dispatcher: Dispatcher,
        opener: TierOpener,
        codecs: Mapping[str, Codec],
        lower: Sequence[LowerTier],
    ) -> Stack:
        config, counters = self.config, self.counters
        share_host_slots(lower, arena.num_slots)
        host = HostIndex(arena.num_slots, opener.host_policy(config.host, self.resolved.host_policy, arena.num_slots))
        manager = OffloadManager(
            host,
            lower,
            [group.payload_bytes for group in self.geometry.groups],
            max(1, int(arena.num_slots * config.host.reserved_share)),
            counters,
        )
        self._recover(lower, dispatcher)
        events = config.events
        described = events.enabled and events.self_describing
        block_events = BlockEvents(
            self.geometry, counters, _log.warning, active=described, snapshots_max=events.payloads_max
        )
        scheduler = OffloadScheduler(
            manager,
            self.geometry,
            SchedulerLimits(
                lookup_deadline_s=config.lookup.deadline_s,
                store_chunks_per_step_max=config.store.chunks_per_step_max,
                prompt_only=config.store.prompt_only,
                num_workers=self.engine.num_workers,
                gpu_prefix_caching=self.engine.capabilities.prefix_caching,
                weighs_recompute=config.lookup.recompute == "auto",
                load_tokens_min=config.lookup.load_tokens_min,
                prefill_tokens_per_s=self.engine.capabilities.prefill_tokens_per_s,
                store_plan=config.store.plan,
                store_policy=StorePolicy(config.store.policy),
                holds_blocks_of_finished=self.engine.capabilities.holds_blocks_of_finished,
            ),
            counters,
            _log.warning,
            block_events=block_events,
        )
        workers, copies = self._workers(arena)
        parts = StackParts(
            scheduler=scheduler,
            manager=manager,
            dispatcher=dispatcher,
            workers=workers,
            copies=copies,
            arena=arena,
            shared=self.shared,
            setup=self._setup(arena),
            part_book=None if len(workers) == 1 else PartBook(arena, self.sealer, self.geometry),
            namespace=self.namespace,
            geometry=self.geometry,
            counters=counters,
            observers=self._observers(),
            events=EventQueue(block_events, counters, kept=events.enabled),
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
        runtime = self.runtime
        if config.record.path is None:
            return Stack(parts, runtime.clock, runtime.pause)
        writer = self._record_writer(Path(config.record.path), parts.changes.names)
        return RecordedStack(parts, runtime.clock, runtime.pause, writer)

    def _record_writer(self, path: Path, tier_names: Sequence[str]) -> RecordWriter:
        record = self.config.record
        head = {
            "is": "record", "step": 0, "t": 0, "version": 1, "model": self.namespace.model, "pid": os.getpid(),
            "opened": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "tiers": ["host", *tier_names],
        }  # fmt: skip
        runtime = self.runtime
        return RecordWriter(
            path, head, record.bytes_max, record.keep, clock=runtime.clock, pause=runtime.pause, spawn=runtime.spawn
        )

    def _workers(self, arena: HostArena) -> tuple[tuple[Worker, ...], tuple[CopyPool, ...]]:
        """The workers of this process and their threads: one pool each, since each belongs to a thread of its own."""
        if self.shared is not None:
            return (), ()
        threads = self.config.host.copy_threads
        runtime = self.runtime
        names = [f"tierkv-copy-{rank}" for rank in range(self.engine.num_workers)]
        pools = tuple(CopyPool(threads, name=name, spawn=runtime.spawn, pause=runtime.pause) for name in names)
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
