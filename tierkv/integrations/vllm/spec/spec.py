"""``TierKVSpec``: the class that vLLM's offloading connector creates, once per role.

The scheduler's object opens a stack when vLLM asks for its manager. A worker's object opens its worker at the first
transfer, which carries the setup (:class:`~.manager.TierKVTransfer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadingWorker, TransferResult

from tierkv.config.resolving import resolve
from tierkv.integrations.vllm.device import device_words
from tierkv.integrations.vllm.kv_events import OffloadingEvents, localities, with_events
from tierkv.integrations.vllm.metrics import metric_definitions
from tierkv.integrations.vllm.options import read_options
from tierkv.integrations.vllm.spec.manager import TierKVManager, TierKVTransfer
from tierkv.integrations.vllm.spec.notes import StatesNote, read_states
from tierkv.integrations.vllm.spec.shape import (
    VLLM_KEYS,
    check_engine,
    config_labels,
    offloading_engine,
    with_stack_chunks,
)
from tierkv.integrations.vllm.spec.worker import DeviceBlocks, SpecWorker
from tierkv.integrations.vllm.states import check_sizes, layer_states
from tierkv.plugins.loading import load_plugins
from tierkv.stack.opening import open_staged_stack
from tierkv.stack.staged import DESCRIBED

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingMetricMetadata
    from vllm.v1.kv_offload.config import OffloadingConfig


class TierKVSpec(OffloadingSpec):  # type: ignore[misc]  # vLLM has no types here
    """A stack of tiers behind vLLM's ``OffloadingConnector``.

    vLLM's scheduler decides about loads, so ``lookup.recompute`` and ``lookup.load_tokens_min`` of the stack have no
    effect. ``host.verify`` has none either: a chunk is checked when it is read into the host tier, and not again before
    the copy to the device, because vLLM cannot handle a failure there. Quotas per tenant are not supported: vLLM's
    chunk hashes depend on salt and adapter, but do not name them.

    Raises:
        ConfigError: the stack's description is wrong, contradicts vLLM's own keys, or the engine's configuration is
            not supported.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self._stack_config = read_options(config.extra_config, known=VLLM_KEYS)
        super().__init__(with_stack_chunks(config, self._stack_config))
        check_engine(self.config)
        self.offload_prompt_only = self._stack_config.store.prompt_only
        self._manager: TierKVManager | None = None
        self._worker: TierKVWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003 - vLLM's signature
        """Metrics of tierkv for vLLM's exporter."""
        return metric_definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003 - (the same)
        """Labels of vLLM 0.33's info metric."""
        return tuple(config_labels(dict.fromkeys(DESCRIBED, "")))

    def get_manager(self) -> TierKVManager:
        """Return the scheduler's side; the first call opens the stack.

        Raises:
            ConfigError: the workers have not described their states, or these are not supported.
            PluginError: a plugin that the stack names is missing or broken.
            BackendError: a tier cannot be opened.
        """
        if self._manager is None:
            enabled = self.kv_events_config.enable_kv_cache_events
            registry = load_plugins()
            config = with_events(self._stack_config, enabled=enabled)
            places = localities(resolve(config, registry))
            ids = [group.group_id for group in self.config.groups]
            states = read_states(self.config.engine_id, len(ids))
            if any(states):
                check_sizes(set(self.tokens_per_block), self.tokens_per_hash)
            engine = offloading_engine(self.config, device_words(), states)
            stack = open_staged_stack(config, engine, group_ids=ids, plugins=registry)
            self._manager = TierKVManager(stack, places, OffloadingEvents(places) if enabled else None)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> TierKVWorker:
        """Return a worker's side. The first worker writes the note about its state layers.

        Raises:
            ConfigError: the states are not supported. The message names the setting and the fix.
        """
        if self._worker is None:
            rank, states = self.config.parallel.rank, layer_states(self.config.groups)
            note = StatesNote(self.config.engine_id, states) if rank == 0 else None
            self._worker = TierKVWorker(_pages(kv_caches), rank, note)
        return self._worker


class TierKVWorker(OffloadingWorker):  # type: ignore[misc]  # (the same)
    """Transfers of one worker. :mod:`~.worker` describes failed transfers.

    Args:
        pages: per group, the engine's tensors as ``[num_blocks, page_bytes]`` bytes.
        rank: rank of this worker.
        note: note about state layers, closed with the worker.
    """

    def __init__(self, pages: Sequence[Sequence[torch.Tensor]], rank: int, note: StatesNote | None = None) -> None:
        self._worker = SpecWorker(pages, rank)
        self._note = note

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: TierKVTransfer) -> bool:
        """Start to copy blocks to the host tier."""
        self._worker.submit(job_id, dst_spec.transfer, _blocks(src_spec), dst_spec.setup, is_store=True)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: TierKVTransfer,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002, FBT001, FBT002 - vLLM 0.33's signature; no load waits for another
    ) -> bool:
        """Start to copy chunks to blocks."""
        self._worker.submit(job_id, src_spec.transfer, _blocks(dst_spec), src_spec.setup, is_store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the previous call."""
        return [
            TransferResult(ended.job_id, ended.success, ended.bytes_moved, ended.seconds)
            for ended in self._worker.get_finished()
        ]

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until the transfers have ended."""
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """Wait for copies in flight, and close."""
        if self._note is not None:
            self._note.close()
        self._worker.shutdown()


def _blocks(spec: GPULoadStoreSpec) -> DeviceBlocks:
    return DeviceBlocks(spec.block_ids.tolist(), list(spec.group_sizes), list(spec.block_indices))


def _pages(kv_caches: CanonicalKVCaches) -> list[list[torch.Tensor]]:
    """Per group, the whole (padded) pages of each tensor that it uses, without duplicates."""
    tensors = [tensor.tensor.view(torch.uint8) for tensor in kv_caches.tensors]
    return [[tensors[i] for i in dict.fromkeys(ref.tensor_idx for ref in refs)] for refs in kv_caches.group_data_refs]
