"""``TierKVSpec``: the class that vLLM's offloading connector creates, once per role.

The scheduler's object opens a stack when vLLM asks for its manager. A worker's object opens its worker at the first
transfer, which carries the setup (:class:`~.manager.TierKVTransfer`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadingWorker, TransferResult

from tierkv.config.resolving import resolve
from tierkv.integrations.vllm.device import device_words, named_backends
from tierkv.integrations.vllm.engine_checks import (
    check_context,
    check_model,
    check_nodes,
    check_role,
    check_speculation,
    let_failed_loads_recompute,
    warn_of_lost_stores,
)
from tierkv.integrations.vllm.identity.weights import revision_of, weights_words
from tierkv.integrations.vllm.kv_events import OffloadingEvents, localities, with_events
from tierkv.integrations.vllm.metrics import metric_definitions
from tierkv.integrations.vllm.options import read_options
from tierkv.integrations.vllm.refusals import WorkerErrors, contains_errors
from tierkv.integrations.vllm.spec.containment import ContainedManager
from tierkv.integrations.vllm.spec.failed_loads import report_failed_loads
from tierkv.integrations.vllm.spec.manager import TierKVManager, TierKVTransfer
from tierkv.integrations.vllm.spec.notes import WorkerNote, read_note
from tierkv.integrations.vllm.spec.requests import receive_requests
from tierkv.integrations.vllm.spec.shape import (
    VLLM_KEYS,
    check_engine,
    config_labels,
    offloading_engine,
    with_stack_chunks,
)
from tierkv.integrations.vllm.spec.worker import DeviceBlocks, EndedTransfer, SpecWorker
from tierkv.integrations.vllm.states import check_sizes, layer_states
from tierkv.integrations.vllm.versions import check_strict
from tierkv.plugins.loading import load_plugins
from tierkv.stack.opening import open_staged_stack
from tierkv.stack.staged import DESCRIBED

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingMetricMetadata
    from vllm.v1.kv_offload.config import OffloadingConfig

_log = logging.getLogger(__name__)


class TierKVSpec(OffloadingSpec):  # type: ignore[misc]  # vLLM has no types here
    """A stack of tiers behind vLLM's ``OffloadingConnector``.

    vLLM's scheduler decides about loads, so ``lookup.recompute`` and ``lookup.load_tokens_min`` of the stack have no
    effect. ``host.verify`` has none either: a chunk is checked when it is read into the host tier, and not again before
    the copy to the device. Quotas per tenant are not supported: vLLM's
    chunk hashes depend on salt and adapter, but do not name them.

    Raises:
        ConfigError: the stack's description is wrong, contradicts vLLM's own keys, or the engine's configuration is
            not supported.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self._options = read_options(config.extra_config, known=VLLM_KEYS)
        check_strict(self._options.strict)
        self._stack_config = self._options.stack
        super().__init__(with_stack_chunks(config, self._stack_config))
        check_engine(self.config)
        let_failed_loads_recompute()
        self.offload_prompt_only = self._stack_config.store.prompt_only
        self._manager: ContainedManager | None = None
        self._worker: TierKVWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003 - vLLM's signature
        """Metrics of tierkv for vLLM's exporter."""
        return metric_definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003 - (the same)
        """Labels of vLLM 0.33's info metric."""
        return tuple(config_labels(dict.fromkeys(DESCRIBED, "")))

    def get_manager(self) -> ContainedManager:
        """Return the scheduler's side; the first call opens the stack.

        Raises:
            ConfigError: the workers have not described their layers, or these are not supported.
            PluginError: a plugin that the stack names is missing or broken.
            BackendError: a tier cannot be opened.
        """
        if self._manager is None:
            enabled = self.kv_events_config.enable_kv_cache_events
            registry = load_plugins()
            config = with_events(self._stack_config, enabled=enabled)
            places = localities(resolve(config, registry, self._options.source))
            ids = [group.group_id for group in self.config.groups]
            noted = read_note(self.config.engine_id, len(ids))
            if any(noted.states):
                check_sizes(set(self.tokens_per_block), self.tokens_per_hash)
            engine = offloading_engine(self.config, device_words(), noted)
            stack = open_staged_stack(config, engine, group_ids=ids, waits_whole=True, plugins=registry)
            events = OffloadingEvents(places) if enabled else None
            manager = TierKVManager(stack, places, events, self._options.reset_scope)
            receive_requests(manager.named.receive)
            self._manager = ContainedManager(manager, contains=contains_errors())
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> TierKVWorker:
        """Return a worker's side. The first worker writes the note about its layers and weights.

        Raises:
            ConfigError: the engine's configuration is not supported. The message names the setting and the fix.
        """
        if self._worker is None:
            vllm_config = get_current_vllm_config()
            transfer = vllm_config.kv_transfer_config
            if transfer.kv_connector == "OffloadingConnector":  # otherwise the role is that of a connector around it
                check_role(transfer)
            check_model(vllm_config)
            check_nodes(vllm_config)
            check_speculation(vllm_config)
            rank, states = self.config.parallel.rank, layer_states(self.config.groups)
            check_context(vllm_config)
            note = None
            if rank == 0:
                facts = weights_words(vllm_config)
                if named := named_backends(vllm_config):
                    facts["backend"] = named
                words = " ".join(f"{name}={value}" for name, value in facts.items())
                note = WorkerNote(self.config.engine_id, states, revision_of(vllm_config.model_config), words)
                warn_of_lost_stores(vllm_config, self._stack_config)
            self._worker = TierKVWorker(_pages(kv_caches), rank, note, contains=contains_errors())
            self._worker.reports_failures = report_failed_loads(self._worker.take_failed)
        return self._worker


class TierKVWorker(OffloadingWorker):  # type: ignore[misc]  # (the same)
    """Transfers of one worker; raises nothing after its start. :mod:`~.worker` describes failed transfers.

    Args:
        pages: per group, the engine's tensors as ``[num_blocks, page_bytes]`` bytes.
        rank: rank of this worker.
        note: note about layers and weights, closed with the worker.
        contains: whether errors are kept from vLLM.
    """

    def __init__(
        self,
        pages: Sequence[Sequence[torch.Tensor]],
        rank: int,
        note: WorkerNote | None = None,
        *,
        contains: bool = True,
    ) -> None:
        self.reports_failures = False
        """Whether vLLM asks for failed loads (:mod:`~.failed_loads`). If not, each of them ends the engine."""
        self._worker = SpecWorker(pages, rank)
        self._note = note
        self._errors = WorkerErrors(_log, contains=contains)
        self._loading: dict[int, str] = {}  # job -> request
        self._failed: set[str] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: TierKVTransfer) -> bool:
        """Start to copy blocks to the host tier."""
        try:
            self._worker.submit(job_id, dst_spec.transfer, _blocks(src_spec), dst_spec.setup, is_store=True)
        except Exception as error:  # noqa: BLE001 - nothing of tierkv may end the engine
            self._errors.contain(error, "did not store chunks")
            self._worker.give_up(job_id, dst_spec.transfer.number, is_store=True)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: TierKVTransfer,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002, FBT001, FBT002 - vLLM 0.33's signature; no load waits for another
    ) -> bool:
        """Start to copy chunks to blocks."""
        self._loading[job_id] = src_spec.request_id
        if src_spec.is_lost:
            self._worker.give_up(job_id, src_spec.transfer.number, is_store=False)
            return True
        try:
            self._worker.submit(job_id, src_spec.transfer, _blocks(dst_spec), src_spec.setup, is_store=False)
        except Exception as error:  # noqa: BLE001 - (the same)
            self._errors.contain(error, "did not load chunks")
            self._worker.give_up(job_id, src_spec.transfer.number, is_store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the previous call.

        After an error, all transfers are given up. If their copies cannot be awaited, the next call tries it again.
        """
        try:
            ended = self._worker.get_finished()
        except Exception as error:  # noqa: BLE001 - (the same)
            self._errors.contain(error, "lost the results of transfers")
            self._worker.give_up_all()
            ended = self._worker.take_ended()
        try:
            ended += self._worker.end_given_up()
        except Exception as error:  # noqa: BLE001 - (the same)
            self._errors.contain(error, "could not wait for copies")
        return [self._result(one) for one in ended] if ended else []

    def _result(self, ended: EndedTransfer) -> TransferResult:
        request_id = self._loading.pop(ended.job_id, None)
        if request_id is not None and not ended.success:
            self._failed.add(request_id)
        success = ended.success or self.reports_failures
        return TransferResult(ended.job_id, success, ended.bytes_moved, ended.seconds)

    def take_failed(self) -> set[str]:
        """Return requests whose loads failed since the previous call."""
        failed, self._failed = self._failed, set()
        return failed

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until the transfers have ended. If that is not possible, the manager drops their chunks."""
        try:
            self._worker.wait(job_ids)
        except Exception as error:  # noqa: BLE001 - (the same)
            self._errors.contain(error, "could not wait for single transfers, and waits for all")
            try:
                self._worker.drain()
            except Exception as second:  # noqa: BLE001 - (the same)
                self._errors.contain(second, "could not wait for copies")
                self._worker.give_up_all()

    def shutdown(self) -> None:
        """Wait for copies in flight, and close."""
        try:
            if self._note is not None:
                self._note.close()
            self._worker.shutdown()
        except Exception as error:  # noqa: BLE001 - (the same)
            self._errors.contain(error, "was not closed")


def _blocks(spec: GPULoadStoreSpec) -> DeviceBlocks:
    return DeviceBlocks(spec.block_ids.tolist(), list(spec.group_sizes), list(spec.block_indices))


def _pages(kv_caches: CanonicalKVCaches) -> list[list[torch.Tensor]]:
    """Per group, the whole (padded) pages of each tensor that it uses, without duplicates."""
    tensors = [tensor.tensor.view(torch.uint8) for tensor in kv_caches.tensors]
    return [[tensors[i] for i in dict.fromkeys(ref.tensor_idx for ref in refs)] for refs in kv_caches.group_data_refs]
