"""vLLM's own tiering where there is no GPU: its spec, manager, tiers and shared memory; only the page copies are ours.

``TieringOffloadingSpec.get_worker`` refuses every platform without CUDA or XPU, because its copies go through device
streams. Everything that this benchmark compares (what is looked up, promoted, cascaded, evicted, read) is untouched.
Copies run on one thread, as those of tierkv do by default, and are as plain as a copy can be: one memcpy per page, no
header, no checksum.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Pages = npt.NDArray[np.int8]


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # not installed where types are checked
    """VLLM's tiering, with a worker for KV caches in host memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this process, made once."""
        worker = self._worker
        if worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError("the benchmark's worker copies one block per chunk")
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = self._worker = HostCopyWorker(kv_caches, region)
        return worker


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]  # not installed where types are checked
    """Copies pages between the KV cache and the region, in the order of submission, on one thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._device: list[Pages] = []
        self._host: list[Pages] = []
        for cache in kv_caches.tensors:
            self._device.append(cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes).numpy())
            self._host.append(region.create_next_worker_view(cache.page_size_bytes).numpy())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="peer-copy")
        self._running: dict[int, Future[int]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """KV cache to region."""
        return self._submit(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: Any) -> bool:  # noqa: ANN401 - what later versions add
        """Region to KV cache."""
        return self._submit(job_id, self._host, src_spec, self._device, dst_spec)

    def _submit(
        self,
        job_id: int,
        source: list[Pages],
        source_spec: LoadStoreSpec,
        target: list[Pages],
        spec: LoadStoreSpec,
    ) -> bool:
        if not isinstance(source_spec, BlockIDsLoadStoreSpec) or not isinstance(spec, BlockIDsLoadStoreSpec):
            raise TypeError("the benchmark's worker knows transfers between blocks and chunks only")
        rows, places = source_spec.block_ids.tolist(), spec.block_ids.tolist()
        self._running[job_id] = self._pool.submit(_copy, source, rows, target, places)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers that have ended since the last call."""
        done = [job_id for job_id, future in self._running.items() if future.done()]
        sizes = {job_id: self._running.pop(job_id).result() for job_id in done}
        return [TransferResult(job_id, success=True, transfer_size=size) for job_id, size in sizes.items()]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these have ended."""
        for job_id in job_ids & self._running.keys():
            self._running[job_id].result()

    def shutdown(self) -> None:
        """End the thread, then release the region."""
        self._pool.shutdown()
        self._device.clear()
        self._host.clear()
        self._region.cleanup()


def _copy(source: list[Pages], rows: list[int], target: list[Pages], places: list[int]) -> int:
    """Every tensor's page of each row. Returns bytes."""
    for pages, room in zip(source, target, strict=True):
        for row, place in zip(rows, places, strict=True):
            np.copyto(room[place], pages[row])
    return len(rows) * sum(int(pages.shape[1]) for pages in source)
