"""``TierKVConnector``: the class that vLLM creates, once per role.

It translates vLLM's calls and passes them to :mod:`~.scheduler` in the scheduler's process, or to :mod:`~.worker` in a
worker's process.

Order of calls within a step of the worker (vLLM 0.32, both of its model runners): ``handle_preemptions`` comes first,
before any block is written, with or without a forward pass. So flushed transfers are awaited there, and the loads of
the step begin. ``start_load_kv`` does both where a version of vLLM leaves the first call out. ``wait_for_save`` follows
the forward pass, then the results are collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never, cast

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.config.resolving import ResolvedStack, resolve
from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.connector.containment import ContainedScheduler, ContainedWorker
from tierkv.integrations.vllm.connector.meta import StepMeta, WorkerMeta
from tierkv.integrations.vllm.connector.requests import described_view_of, view_of
from tierkv.integrations.vllm.connector.scheduler import NO_INSTRUCTIONS, ConnectorScheduler
from tierkv.integrations.vllm.connector.shape import check_hash_seed, engine_spec
from tierkv.integrations.vllm.connector.worker import ConnectorWorker
from tierkv.integrations.vllm.engine_checks import check_role, let_failed_loads_recompute, warn_of_lost_stores
from tierkv.integrations.vllm.kv_events import KVEvents, localities, with_events
from tierkv.integrations.vllm.metrics import StatsFeed, build_kv_connector_stats, build_prom_metrics
from tierkv.integrations.vllm.options import read_options
from tierkv.integrations.vllm.refusals import contains_errors
from tierkv.integrations.vllm.versions import check_strict
from tierkv.plugins.loading import load_plugins
from tierkv.stack.opening import open_stack
from tierkv.types.transfers import WorkerOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_NOTHING = WorkerMeta(WorkerOutput())


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here
    """A stack of tiers behind vLLM, run by tierkv's scheduler.

    Raises:
        ConfigError: the stack's description is wrong, or the engine is configured in a way that tierkv cannot serve.
        PluginError: a plugin that the stack names is missing or broken.
        BackendError: a tier cannot be opened.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _apply_settings(vllm_config)
        spec = engine_spec(vllm_config, kv_cache_config)
        self.scheduler: ContainedScheduler = cast("ContainedScheduler", _Absent("a worker", "the scheduler's"))
        """The scheduler's side; absent from a worker's object."""
        self.worker: ContainedWorker = cast("ContainedWorker", _Absent("the scheduler", "a worker's"))
        """The worker's side; absent from the scheduler's object."""
        self._is_scheduler = role is KVConnectorRole.SCHEDULER
        self._started_step: KVConnectorMetadata | None = None
        self._invalid_block_ids: set[int] = set()
        options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        config = options.stack
        if self._is_scheduler:
            check_hash_seed(vllm_config)
            registry = load_plugins()
            check_strict(options.strict)
            warn_of_lost_stores(vllm_config, config)
            self._publishes = _publishes_events(vllm_config)
            config = with_events(config, enabled=self._publishes)
            resolved = resolve(config, registry, options.source)
            stack = open_stack(config, spec, plugins=registry)
            self._sources = _sources(resolved)
            self.scheduler = ContainedScheduler(
                ConnectorScheduler(
                    stack, options.reset_scope, described_view_of if config.events.self_describing else view_of
                ),
                contains=contains_errors(),
            )
            self._empty_step = StepMeta(NO_INSTRUCTIONS.meta, last_steps=self.scheduler.run_last_steps)
            self._stats = StatsFeed(stack)
            self._events = KVEvents(stack.geometry, kv_cache_config, localities(resolved))
        else:
            divided = None if config.chunk.parts is None else spec.groups
            inner = ConnectorWorker(kv_cache_config, get_tensor_model_parallel_rank(), divided)
            self.worker = ContainedWorker(inner, contains=contains_errors())

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM must wait for stores. False: a dropped store is only a later miss."""
        return False

    def shutdown(self) -> None:
        """End transfers in flight, flush, and close."""
        side = self.scheduler if self._is_scheduler else self.worker
        side.shutdown()

    # -- worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the engine's KV tensors, by layer."""
        self.worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Start a step: wait for transfers that read blocks to be written, and start loads."""
        meta = self._started_step = kv_connector_metadata
        self.worker.start_step(meta.meta, meta.setup, meta.failed_loads, meta.last_steps, stops=meta.stops)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:  # noqa: ARG002 - vLLM's signature
        """Start the step, unless :meth:`handle_preemptions` did. Copy threads run loads while the model computes."""
        step = self._connector_metadata
        if step is not None and step is not self._started_step:
            self.handle_preemptions(step)

    def clear_connector_metadata(self) -> None:
        """End a step of the worker. The next one may have an equal message."""
        self._started_step = None
        super().clear_connector_metadata()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request computes only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object) -> None:
        """Do nothing: blocks are stored after the step, with all layers."""

    def wait_for_save(self) -> None:
        """Queue the stores of the step. They start with the next step, so that they do not delay this one."""
        step = self._connector_metadata
        if step is not None and step.meta.stores:
            self.worker.queue_stores(step.meta)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002 - (the same)
        """Return loads that ended, and those of them that failed as a whole."""
        results = self.worker.take_results()
        self._invalid_block_ids = results.invalid_block_ids
        return KVConnectorTransferResults(set(), results.finished, results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks of loads that failed in part."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        """Return this worker's report to the scheduler's side; None if there is none."""
        report = self.worker.take_output()
        return None if report is None else WorkerMeta(*report)

    def unregister_kv_caches(self) -> None:
        """Wait for all copies before the KV memory is unmapped (sleep mode, vLLM 0.33)."""
        self.worker.drain()

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Register a new request."""
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens that can be loaded; None: ask again in the next step."""
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Start the load of a request, if it has one, after its blocks were allocated."""
        self.scheduler.update_state_after_alloc(request, blocks.blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return the numbers of loaded tokens by vLLM's name of the source tier."""
        sources: dict[CacheHitSource, int] = {}
        for tier, tokens in self.scheduler.loaded_by_tier(request.request_id).items():
            source = self._sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + tokens
        unknown = num_external_tokens - sum(sources.values())
        if unknown:  # the sources of later parts of a streamed load are not known yet
            sources[CacheHitSource.EXTERNAL_UNSPECIFIED] = unknown
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Build the step's instructions to the workers."""
        made = self.scheduler.build(scheduler_output)
        if made is NO_INSTRUCTIONS:
            return self._empty_step
        return StepMeta(made.meta, made.setup, made.failed_loads, made.stops, self.scheduler.run_last_steps)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the reports of the workers."""
        report = connector_output.kv_connector_worker_meta
        meta = report if isinstance(report, WorkerMeta) else _NOTHING
        self.scheduler.process_output(
            meta.output, meta.started_workers, connector_output.finished_recving, meta.stopped_workers
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request, in an engine with one group of blocks."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Its blocks are free at once; fences protect those that a transfer still reads."""
        self.scheduler.request_finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must run steps without requests, because transfers are in flight."""
        return self.scheduler.has_pending_work

    def reset_cache(self) -> bool | None:
        """Empty the tiers that ``tierkv_reset_scope`` names: all of them, unless it is "host"."""
        return self.scheduler.reset_cache()

    # -- observation ---------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return events of stored and removed blocks for vLLM to publish."""
        return self.scheduler.errors.observe(self._take_events, []) if self._publishes else ()

    def _take_events(self) -> list[KVCacheEvent]:
        return list(self._events.translate(self.scheduler.stack.events.take_block_events()))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the statistics since the previous step. None on a worker, which reports to the scheduler's side."""
        if not self._is_scheduler:
            return None
        scheduler = self.scheduler
        try:  # as errors.observe() does, at two calls less per step
            return self._stats.connector_stats(idle=scheduler.is_idle)
        except Exception as error:  # noqa: BLE001 - nothing of tierkv may end the engine
            scheduler.errors.note(error)
            return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Rebuild statistics in the front end from their transferred form."""
        return build_kv_connector_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Build the exporter in the front end."""
        return build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _Absent:
    """Side that a connector does not have: any use of it is an error of the engine.

    Args:
        created_for: owner of the connector.
        called_as: the side.
    """

    def __init__(self, created_for: str, called_as: str) -> None:
        self._why = f"this TierKVConnector was created for {created_for}, and was called as {called_as}"

    def __getattr__(self, name: str) -> Never:
        raise EngineProtocolError(self._why)


def _sources(stack: ResolvedStack) -> dict[str, CacheHitSource]:
    """VLLM's name of each tier: host, disk, or external for shared tiers."""
    sources = {"host": CacheHitSource.HOST}
    for tier in stack.tiers:
        shared = tier.backend.capabilities.shared
        sources[tier.config.name] = CacheHitSource.EXTERNAL_UNSPECIFIED if shared else CacheHitSource.DISK
    return sources


def _publishes_events(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _apply_settings(vllm_config: VllmConfig) -> None:
    """Apply required settings of vLLM's connector configuration; refuse those that cannot be changed.

    Raises:
        ConfigError: the role is not ``kv_both``.
    """
    check_role(vllm_config.kv_transfer_config)
    let_failed_loads_recompute(vllm_config)
