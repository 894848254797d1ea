"""How a stack is wired: description, installed plugins and an engine's shape become objects that know each other."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tierkv.config.loading import load_config, parse_config
from tierkv.config.resolving import ResolvedStack, resolve
from tierkv.config.schema import RecordConfig, StackConfig, StoreConfig
from tierkv.dispatch.runtime import Runtime
from tierkv.errors import ConfigError
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry
from tierkv.recording.writer import RecordWriter
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.limits import SchedulerLimits, StorePolicy
from tierkv.scheduler.requests.hint_reader import HintReader
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.scheduler.staged.staged_jobs import StagedJobs
from tierkv.scheduler.staged.staged_lookups import StagedLookups
from tierkv.scheduler.store.lazy import check_lazy
from tierkv.stack.core import BaseParts, StackParts, StagedParts
from tierkv.stack.stack import RecordedStack, Stack
from tierkv.stack.staged import StagedStack
from tierkv.stack.wiring import Assembly, namespace_of
from tierkv.types.engine import EngineSpec
from tierkv.types.geometry import Geometry
from tierkv.worker.completion_flags import CompletionFlags
from tierkv.worker.rank_reports import RankReports
from tierkv.worker.staged_seals import StagedSeals

__all__ = ["namespace_of", "open_stack", "open_staged_stack"]

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
    return _Scheduled(resolved, engine, registry, runtime or Runtime(), verify_frames=verify_frames).build()


def open_staged_stack(
    config: StackConfig | Mapping[str, Any] | str | Path,
    engine: EngineSpec,
    *,
    group_ids: Sequence[int] | None = None,
    plugins: PluginRegistry | None = None,
    runtime: Runtime | None = None,
) -> StagedStack:
    """Open a stack for an engine that schedules itself; see :class:`StagedStack`. Blocks as :func:`open_stack` does.

    Args:
        config: as for :func:`open_stack`. What our own scheduler would do with it (``store.plan``, ``store.policy``,
            ``record``, ``events.self_describing``) must be left at its default; ``lookup.recompute`` and
            ``lookup.load_tokens_min`` have no effect, since the engine decides what it loads.
        engine: the engine's shape; its workers count as other processes in any case. What its capabilities say of
            loads does not matter: this kind of stack answers for them.
        group_ids: the number that stands at the end of the keys of each group; 0, 1, 2, ... if left out.
        plugins: as for :func:`open_stack`.
        runtime: as for :func:`open_stack`.

    Raises:
        ConfigError, PluginError, BackendError: as for :func:`open_stack`.
    """
    registry = plugins or load_plugins()
    capabilities = replace(engine.capabilities, worker_processes=True)
    ids = tuple(range(len(engine.groups))) if group_ids is None else tuple(group_ids)
    shape = replace(engine, capabilities=capabilities)
    return _Staged(_resolved(config, registry), shape, registry, runtime or Runtime(), ids).build()


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


def _check_store_plan(config: StackConfig, engine: EngineSpec, geometry: Geometry) -> None:
    if config.store.plan != "lazy":
        return
    if not engine.capabilities.shows_free_blocks:
        raise ConfigError(
            'store.plan = "lazy": this engine does not show its free blocks (EngineCapabilities.shows_free_blocks); '
            'use "immediate" or "eager"'
        )
    check_lazy(geometry)


class _Scheduled(Assembly[Stack]):
    """A stack with our own scheduler."""

    def check(self) -> None:
        _check_capabilities(self.engine)
        _check_store_plan(self.config, self.engine, self.geometry)

    def block_events(self) -> BlockEvents:
        events = self.config.events
        described = events.enabled and events.self_describing
        return BlockEvents(
            self.geometry, self.counters, _log.warning, active=described, snapshots_max=events.payloads_max
        )

    def wire(self, base: BaseParts, undo: contextlib.ExitStack) -> Stack:  # noqa: ARG002 - opens nothing
        config, counters = self.config, self.counters
        scheduler = OffloadScheduler(
            base.manager,
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
                delays_free_blocks=self.engine.capabilities.delays_free_blocks,
            ),
            counters,
            _log.warning,
            block_events=base.block_events,
        )
        parts = StackParts(
            **_fields(base),
            scheduler=scheduler,
            rank_reports=None if len(base.workers) == 1 else RankReports(base.arena, self.sealer, self.geometry),
        )
        runtime = self.runtime
        if config.record.path is None:
            return Stack(parts, runtime.clock, runtime.engine_sleep)
        writer = self._record_writer(_of_replica(Path(config.record.path), self.engine.replica), parts.changes.names)
        return RecordedStack(parts, runtime.clock, runtime.engine_sleep, writer)

    def _record_writer(self, path: Path, tier_names: Sequence[str]) -> RecordWriter:
        record = self.config.record
        head = {
            "is": "record", "step": 0, "t": 0, "version": 1, "model": self.namespace.model, "pid": os.getpid(),
            "opened": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "tiers": ["host", *tier_names],
        }  # fmt: skip
        runtime = self.runtime
        return RecordWriter(
            path,
            head,
            record.bytes_max,
            record.keep,
            clock=runtime.clock,
            engine_sleep=runtime.engine_sleep,
            spawn=runtime.spawn,
        )


class _Staged(Assembly[StagedStack]):
    """A stack for an engine that schedules itself."""

    def __init__(
        self,
        resolved: ResolvedStack,
        engine: EngineSpec,
        registry: PluginRegistry,
        runtime: Runtime,
        group_ids: tuple[int, ...],
    ) -> None:
        super().__init__(resolved, engine, registry, runtime, verify_frames=True)
        self._group_ids = group_ids

    def check(self) -> None:
        _check_not_ours(self.config)

    def wire(self, base: BaseParts, undo: contextlib.ExitStack) -> StagedStack:
        counters = self.counters
        flags = CompletionFlags(self.geometry.num_workers)
        undo.callback(flags.close)
        parts = StagedParts(
            **_fields(base),
            lookups=StagedLookups(base.manager, self.geometry, self.config.lookup.deadline_s, counters),
            jobs=StagedJobs(flags),
            completion_flags=flags,
            staged_seals=StagedSeals(base.arena, self.sealer, self.geometry),
            hints=HintReader(lambda: base.manager.tier_names, counters, _log.warning),
            group_ids=self._group_ids,
        )
        return StagedStack(parts, self.runtime.clock, self.runtime.engine_sleep)


def _fields(base: BaseParts) -> dict[str, Any]:
    return {item.name: getattr(base, item.name) for item in fields(base)}


def _of_replica(path: Path, replica: int) -> Path:
    """A file of its own for each replica; the first one's has the name that was given."""
    return path.with_name(f"{path.stem}.replica-{replica}{path.suffix}") if replica else path


def _check_not_ours(config: StackConfig) -> None:
    """Whether all that is asked for can be had without our scheduler."""
    plain = StoreConfig()
    wrong = {
        "store.plan": config.store.plan != plain.plan,
        "store.policy": config.store.policy != plain.policy,
        "record.path": config.record != RecordConfig() and config.record.path is not None,
        "events.self_describing": config.events.self_describing,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"{key} is set, but this engine schedules itself: it decides when blocks are stored, and describes "
                "events, on its own. Leave the key out, or connect the engine so that tierkv schedules"
            )
