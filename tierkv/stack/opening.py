"""Opening of stacks: a description, installed plugins and an engine's shape become a stack in service."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierkv.config.loading import load_config, parse_config
from tierkv.config.resolving import ResolvedStack, resolve
from tierkv.config.schema import StackConfig, StoreConfig
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.errors import ConfigError
from tierkv.kept_tokens.restoring import restored_snapshots
from tierkv.kept_tokens.token_file import TokenFile
from tierkv.kept_tokens.token_writer import TokenWriter
from tierkv.logs.definitions import EVENTS_UNDESCRIBED, HINT_IGNORED, LogEvent
from tierkv.logs.stack_log import StackLog
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry
from tierkv.recording.entries import VERSION, now_as_text
from tierkv.recording.recorder import Recorder
from tierkv.recording.writer import RecordWriter
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.events.event_queue import EventQueue
from tierkv.scheduler.limits import SchedulerLimits, StorePolicy
from tierkv.scheduler.requests.hint_reader import HintReader
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.scheduler.staged.staged_jobs import StagedJobs
from tierkv.scheduler.staged.staged_lookups import StagedLookups
from tierkv.scheduler.store.lazy import check_lazy
from tierkv.scheduler.wiring import wire_core, wire_manager
from tierkv.stack.journal import Journals, StepJournal
from tierkv.stack.stack import Stack
from tierkv.stack.staged import StagedStack
from tierkv.stack.wiring import (
    OpenedTiers,
    StackPlan,
    connect,
    host_tier,
    namespace_of,
    open_tiers,
    plan_stack,
    reserved_chunks_max,
)
from tierkv.types.cache_events import HOST
from tierkv.types.engine import EngineSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.worker.completion_flags import CompletionFlags
from tierkv.worker.rank_reports import RankReports
from tierkv.worker.staged_seals import StagedSeals

__all__ = ["namespace_of", "open_stack", "open_staged_stack"]


def open_stack(
    config: StackConfig | Mapping[str, Any] | str | Path,
    engine: EngineSpec,
    *,
    plugins: PluginRegistry | None = None,
    runtime: Runtime | None = None,
    verify_frames: bool = True,
) -> Stack:
    """Open a stack for an engine. Blocks until durable tiers have listed what they hold.

    Args:
        config: a stack description: a path to TOML, YAML or JSON, a mapping, or a loaded one.
        engine: the engine's shape.
        plugins: the installed plugins; found by entry points if left out.
        runtime: source of time, chance and threads; the real one if left out.
        verify_frames: False compares no checksum anywhere. It exists for one test, which shows that corruption then
            changes tokens.

    Raises:
        ConfigError: the description is wrong, or does not fit the engine; lists every problem.
        PluginError: a plugin that the description names is missing or broken.
        BackendError: a tier cannot be opened; says what to do.
    """
    registry = plugins or load_plugins()
    resolved = _resolved(config, registry)
    plan = plan_stack(resolved, engine, registry, runtime or Runtime(), verify_frames=verify_frames)
    _check_capabilities(engine)
    _check_store_plan(plan.config, engine, plan.geometry)
    with contextlib.ExitStack() as undo:
        tokens = _token_file(plan)
        if tokens is not None:
            undo.callback(tokens.close)
        opened = open_tiers(plan, undo)
        block_events = _block_events(plan, described=plan.config.events.self_describing)
        core = wire_core(
            plan.geometry,
            host_tier(plan, opened),
            opened.lower,
            limits=_scheduler_limits(plan),
            counters=plan.counters,
            reserved_chunks_max=reserved_chunks_max(plan, opened),
            step_keys_max=plan.config.step.keys_max,
            warn=_reports(plan.log, HINT_IGNORED),
            block_events=block_events,
        )
        wiring = connect(plan, opened, core.manager, block_events)
        if tokens is not None:
            undo.callback(_take_up_tokens(plan, opened, wiring.events, block_events, tokens).close, 1.0)
        rank_reports = None if len(wiring.workers) == 1 else RankReports(opened.arena, plan.sealer, plan.geometry)
        recorder = _recorder(plan, core.scheduler, wiring.changes.names)
        journal = _with_spans(plan, core.scheduler, wiring.changes.names, recorder)
        stack = Stack(wiring, core.scheduler, rank_reports, journal, plan.runtime.clock, plan.runtime.engine_sleep)
        if recorder is not None:
            recorder.watch(stack)
        undo.pop_all()
    return stack


def open_staged_stack(  # noqa: PLR0913 - as open_stack, and what the engine does with answers
    config: StackConfig | Mapping[str, Any] | str | Path,
    engine: EngineSpec,
    *,
    group_ids: Sequence[int] | None = None,
    waits_whole: bool = False,
    plugins: PluginRegistry | None = None,
    runtime: Runtime | None = None,
) -> StagedStack:
    """Open a :class:`StagedStack` for an engine that schedules itself. Blocks until durable tiers have listed content.

    Args:
        config: as for :func:`open_stack`. Settings of tierkv's own scheduler (``store.plan``, ``store.policy``,
            ``record``, ``events.self_describing``) must keep their defaults; ``lookup.load_tokens_min`` has no effect,
            since the engine decides what it loads. With ``lookup.recompute``, chunks of tiers that are slower than
            computing are misses.
        engine: the engine's shape. Its workers count as other processes in any case. Its capabilities for loads have no
            effect: a staged load does not fail.
        group_ids: the number at the end of the keys of each group; 0, 1, 2, ... if left out.
        waits_whole: whether the engine stops at the first MISS, and uses no HIT while another answer is PENDING. A
            prompt that waits for its chunks is then asked about by two of them in a step, and not by all.
        plugins: as for :func:`open_stack`.
        runtime: as for :func:`open_stack`.

    Raises:
        ConfigError, PluginError, BackendError: as for :func:`open_stack`.
    """
    registry = plugins or load_plugins()
    capabilities = replace(engine.capabilities, worker_processes=True)
    ids = tuple(range(len(engine.groups))) if group_ids is None else tuple(group_ids)
    shape = replace(engine, capabilities=capabilities)
    resolved = _resolved(config, registry)
    plan = plan_stack(resolved, shape, registry, runtime or Runtime(), verify_frames=True)
    _check_staged(plan.config)
    with contextlib.ExitStack() as undo:
        opened = open_tiers(plan, undo)
        manager = wire_manager(
            plan.geometry,
            host_tier(plan, opened),
            opened.lower,
            plan.counters,
            reserved_chunks_max(plan, opened),
            plan.config.step.keys_max,
        )
        wiring = connect(plan, opened, manager, _block_events(plan, described=False))
        flags = CompletionFlags(plan.geometry.num_workers)
        undo.callback(flags.close)
        stack = StagedStack(
            wiring,
            lookups=StagedLookups(
                manager, plan.geometry, _scheduler_limits(plan), plan.counters, waits_whole=waits_whole
            ),
            jobs=StagedJobs(flags),
            flags=flags,
            seals=StagedSeals(opened.arena, plan.sealer, plan.geometry),
            hints=HintReader(lambda: manager.tier_names, plan.counters, _reports(plan.log, HINT_IGNORED)),
            group_ids=ids,
            clock=plan.runtime.clock,
            sleep=plan.runtime.engine_sleep,
        )
        undo.pop_all()
    return stack


def _resolved(config: StackConfig | Mapping[str, Any] | str | Path, registry: PluginRegistry) -> ResolvedStack:
    if isinstance(config, StackConfig):
        return resolve(config, registry)
    if isinstance(config, Mapping):
        return resolve(parse_config(config), registry)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config = {config!r:.80}: give the path of a stack's file, or a mapping with its tables")
    return resolve(load_config(Path(config)), registry, str(config))


def _check_capabilities(engine: EngineSpec) -> None:
    """Refuse an engine whose loads must not fail, or must end within a step: tierkv has no such loads.

    Raises:
        ConfigError: the engine is one.
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


def _block_events(plan: StackPlan, *, described: bool) -> BlockEvents:
    events = plan.config.events
    return BlockEvents(
        plan.geometry,
        plan.counters,
        _reports(plan.log, EVENTS_UNDESCRIBED),
        active=events.enabled and described,
        snapshots_max=events.payloads_max,
    )


def _token_file(plan: StackPlan) -> TokenFile | None:
    """Open the file of kept tokens, if the description names one and events are wanted.

    Raises:
        ConfigError: it cannot be opened.
    """
    events = plan.config.events
    if events.tokens_path is None or not events.enabled:
        return None
    path = _path_of_replica(Path(events.tokens_path), plan.engine.replica)
    return TokenFile(path, plan.sealer.namespace, events.payloads_max, plan.log)


def _take_up_tokens(
    plan: StackPlan, opened: OpenedTiers, queue: EventQueue, block_events: BlockEvents, file: TokenFile
) -> TokenWriter:
    """Restore and announce what the file has of chunks in listed tiers, and keep those of this process from now on."""
    tables = [tier for tier in opened.lower if tier.capabilities.authoritative_index]
    may_come = bool(opened.absent) or not all(tier.knows_content for tier in tables)

    def is_held(key: Key) -> bool:
        return may_come or any(tier.residency.rows.is_at_rest(key) for tier in tables)

    snapshots = restored_snapshots(file, plan.geometry, is_held)
    block_events.restore(snapshots)
    queue.announce(snapshots)
    runtime = plan.runtime
    block_events.keeper = writer = TokenWriter(
        file, plan.counters, plan.log, clock=runtime.clock, engine_sleep=runtime.engine_sleep, spawn=runtime.spawn
    )
    return writer


def _reports(log: StackLog, event: LogEvent) -> Callable[[str], None]:
    """Return a function that logs an event with the given reason; each reason has a rate of its own."""
    return lambda reason: log.report(event, kind=reason, reason=reason)


def _scheduler_limits(plan: StackPlan) -> SchedulerLimits:
    config, capabilities = plan.config, plan.engine.capabilities
    return SchedulerLimits(
        lookup_deadline_s=config.lookup.deadline_s,
        store_chunks_per_step_max=config.store.chunks_per_step_max,
        prompt_only=config.store.prompt_only,
        reads_ahead=config.lookup.read_ahead,
        num_workers=plan.engine.num_workers,
        gpu_prefix_caching=capabilities.prefix_caching,
        weighs_recompute=config.lookup.recompute == "auto",
        load_tokens_min=config.lookup.load_tokens_min,
        prefill_tokens_per_s=capabilities.prefill_tokens_per_s,
        store_plan=config.store.plan,
        store_policy=StorePolicy(config.store.policy),
        delays_free_blocks=capabilities.delays_free_blocks,
    )


def _with_spans(
    plan: StackPlan, scheduler: OffloadScheduler, tier_names: Sequence[str], recorder: Recorder | None
) -> Journals:
    """Return the journals of a stack: its recorder, spans, both or neither.

    Raises:
        ConfigError: spans are asked for, and OpenTelemetry is not installed.
    """
    journals: list[StepJournal] = [] if recorder is None else [recorder]
    if (where := plan.config.record.spans) is None:
        return Journals(*journals)
    try:
        from tierkv.recording.exporting import open_tracer  # noqa: PLC0415 - an extra, only if it is asked for
        from tierkv.recording.spans import SpanJournal  # noqa: PLC0415 - (the same)
    except ImportError as error:
        raise ConfigError(
            f'record.spans = "{where}": {error}; pip install opentelemetry-sdk '
            "opentelemetry-exporter-otlp-proto-http, or leave the key out"
        ) from error
    tracer, shut_down = open_tracer(where)
    return Journals(*journals, SpanJournal(tracer, scheduler.view, tier_names, shut_down))


def _recorder(plan: StackPlan, scheduler: OffloadScheduler, tier_names: Sequence[str]) -> Recorder | None:
    """Return the recorder that the description asks for; it observes the scheduler's requests."""
    record, runtime = plan.config.record, plan.runtime
    if record.path is None:
        return None
    head = {
        "is": "record", "step": 0, "t": 0, "version": VERSION, "model": plan.namespace.model, "pid": os.getpid(),
        "opened": now_as_text(), "tiers": [HOST, *tier_names],
        "chunk_tokens": plan.geometry.groups[plan.geometry.lookup_order[0]].chunk_tokens,
        "chunk_bytes": sum(group.payload_bytes for group in plan.geometry.groups),
    }  # fmt: skip
    writer = RecordWriter(
        _path_of_replica(Path(record.path), plan.engine.replica),
        head,
        record.bytes_max,
        record.keep,
        clock=runtime.clock,
        engine_sleep=runtime.engine_sleep,
        spawn=runtime.spawn,
        log=plan.log,
    )
    recorder = Recorder(writer, scheduler.view, plan.counters, tier_names, runtime.clock)
    scheduler.view.watcher = recorder.request_changed
    return recorder


def _path_of_replica(path: Path, replica: int) -> Path:
    """Return a file of its own for each replica; the first one's has the configured name."""
    return path.with_name(f"{path.stem}.replica-{replica}{path.suffix}") if replica else path


def _check_staged(config: StackConfig) -> None:
    """Refuse settings of tierkv's own scheduler, which a staged stack does not have.

    Raises:
        ConfigError: one is set.
    """
    plain = StoreConfig()
    wrong = {
        "store.plan": config.store.plan != plain.plan,
        "store.policy": config.store.policy != plain.policy,
        "record.path": config.record.path is not None,
        "record.spans": config.record.spans is not None,
        "events.self_describing": config.events.self_describing,
    }
    if keys := [key for key, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(
            f"{', '.join(keys)}: without effect, since this engine schedules itself: it decides when blocks are stored "
            "and describes events on its own. Leave it out, or connect the engine so that tierkv schedules (in vLLM: "
            "TierKVConnector)"
        )
