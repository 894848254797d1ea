"""``TierKVConnector``: tierkv's own scheduler inside vLLM, as a KV connector of its version 1 interface.

vLLM makes one object per role: one in the scheduler's process, one in each worker's. This module translates; what the
two sides do stands in :mod:`~.scheduler` and :mod:`~.worker`.

Order within a step of the worker (vLLM 0.32, both of its model runners): ``handle_preemptions`` before anything is
written, with or without a forward pass, so that is where flushed transfers are waited for and this step's loads begin;
``wait_for_save`` after the forward pass; then the results.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

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
from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.integrations.vllm.connector.meta import StepMeta, WorkerMeta
from tierkv.integrations.vllm.connector.scheduler import ConnectorScheduler
from tierkv.integrations.vllm.connector.shape import check_hashes, engine_spec
from tierkv.integrations.vllm.connector.worker import ConnectorWorker
from tierkv.integrations.vllm.kv_events import KVEvents, localities, with_events
from tierkv.integrations.vllm.metrics import StatsFeed, build_kv_connector_stats, build_prom_metrics
from tierkv.integrations.vllm.options import read_options
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

_log = logging.getLogger(__name__)

_NOTHING = WorkerOutput()


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here
    """A stack of tiers behind vLLM, run by tierkv's scheduler.

    Raises:
        ConfigError: the stack's description is wrong, or the engine is configured in a way that tierkv cannot serve.
        PluginError: a plugin that the stack asks for is missing or broken.
        BackendError: a tier cannot be opened.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _settle(vllm_config)
        spec = engine_spec(vllm_config, kv_cache_config)
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._invalid_block_ids: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            check_hashes(vllm_config)
            registry = load_plugins()
            config = read_options(self._kv_transfer_config.kv_connector_extra_config)
            self._publishes = _publishes_events(vllm_config)
            config = with_events(config, enabled=self._publishes)
            resolved = resolve(config, registry)
            stack = open_stack(config, spec, plugins=registry)
            self._sources = _sources(resolved)
            self._scheduler = ConnectorScheduler(stack)
            self._stats = StatsFeed(stack)
            self._events = KVEvents(stack.geometry, kv_cache_config, localities(resolved))
        else:
            self._worker = ConnectorWorker(kv_cache_config, get_tensor_model_parallel_rank())

    @property
    def scheduler(self) -> ConnectorScheduler:
        """The scheduler's side.

        Raises:
            EngineProtocolError: this object is a worker's.
        """
        if self._scheduler is None:
            raise EngineProtocolError("this TierKVConnector was made for a worker, and was called as the scheduler's")
        return self._scheduler

    @property
    def worker(self) -> ConnectorWorker:
        """The worker's side.

        Raises:
            EngineProtocolError: this object is the scheduler's.
        """
        if self._worker is None:
            raise EngineProtocolError("this TierKVConnector was made for the scheduler, and was called as a worker's")
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a later miss, and nothing else."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:  # noqa: ARG003 - vLLM's signature
        """Layers outside, blocks whole: then a block is one run of bytes in each layer. vLLM may decide otherwise."""
        return "LBNHC"

    def shutdown(self) -> None:
        """End what is under way, flush, and close."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # -- worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV tensors, by layer."""
        self.worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First call of a step: what reads blocks that will be written has ended after it; loads begin."""
        meta = kv_connector_metadata
        self.worker.start_step(meta.meta, meta.setup, meta.voided, meta.last_steps)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Loads began with the step: copy threads carry them while the model computes."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request computes only when its load is over: no layer has to wait."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object) -> None:
        """Blocks are stored whole, all layers together, after the step."""

    def wait_for_save(self) -> None:
        """The step's blocks are computed: their stores begin with the next step, so that they delay nothing in this."""
        if self.has_connector_metadata():
            self.worker.queue_stores(self._get_connector_metadata().meta)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002 - (the same)
        """Loads that ended, and those of them that failed as a whole."""
        results = self.worker.take_results()
        self._invalid_block_ids = results.invalid_block_ids
        return KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of loads that failed in part."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        """What the scheduler's side is to be told."""
        told = self.worker.take_output()
        return None if told is None else WorkerMeta(*told)

    def unregister_kv_caches(self) -> None:
        """The KV memory is about to be unmapped (sleep mode): nothing may be copying. vLLM 0.33."""
        self.worker.drain()

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded; None: ask again in the next step."""
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated: a load starts, if there is one."""
        self.scheduler.update_state_after_alloc(request, blocks.blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Which tiers the tokens of the load come from."""
        sources: dict[CacheHitSource, int] = {}
        for tier, tokens in self.scheduler.loaded_by_tier(request.request_id).items():
            source = self._sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + tokens
        unknown = num_external_tokens - sum(sources.values())
        if unknown:  # of a load that streams it is not decided yet who serves what comes later
            sources[CacheHitSource.EXTERNAL_UNSPECIFIED] = unknown
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's instructions to the workers."""
        told = self.scheduler.build(scheduler_output)
        return StepMeta(told.meta, told.setup, told.voided, self.scheduler.take_last_steps)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers told."""
        told = connector_output.kv_connector_worker_meta
        output, begun = (told.output, told.begun) if isinstance(told, WorkerMeta) else (_NOTHING, 0)
        self.scheduler.take_in(output, begun, connector_output.finished_recving)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, in an engine with one group of blocks."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: its blocks are free at once, fences guard what still reads them."""
        self.scheduler.request_finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM should go on stepping though it has no request: transfers are under way."""
        return self.scheduler.has_pending_work

    def reset_cache(self) -> bool | None:
        """Empty the host tier; lower tiers keep what they have."""
        return self.scheduler.reset_cache()

    # -- watching ------------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What came and went in which tier, for vLLM to publish."""
        return list(self._events.translate(self.scheduler.stack.events.take_block_events())) if self._publishes else ()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What the stack counted since the last step. Of a worker: nothing, its transfers are told to the scheduler."""
        return self._stats.connector_stats(idle=self._scheduler.is_idle) if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """The same in the front end, from what has travelled."""
        return build_kv_connector_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The exporter, in the front end."""
        return build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _sources(stack: ResolvedStack) -> dict[str, CacheHitSource]:
    """What vLLM calls each tier: its words are host, disk, and everything beyond this machine."""
    sources = {"host": CacheHitSource.HOST}
    for tier in stack.tiers:
        shared = tier.backend.capabilities.shared
        sources[tier.config.name] = CacheHitSource.EXTERNAL_UNSPECIFIED if shared else CacheHitSource.DISK
    return sources


def _publishes_events(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _settle(vllm_config: VllmConfig) -> None:
    """What tierkv needs of the connector's configuration, set where that is possible, else refused.

    Raises:
        ConfigError: the role is not ``kv_both``.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f'kv_role = "{transfer.kv_role}": tierkv stores and loads; write "kv_role": "kv_both" in '
            "--kv-transfer-config"
        )
    if transfer.kv_load_failure_policy != "recompute":
        # vLLM reads it after it has made its connector. With "fail" a damaged chunk would fail its request.
        _log.info("kv_load_failure_policy is set to 'recompute': what cannot be loaded is computed")
        transfer.kv_load_failure_policy = "recompute"
