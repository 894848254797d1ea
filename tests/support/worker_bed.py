"""Worker over real memory: in host memory, on a GPU, or on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from hand_device import HandDevice

from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key
from tierkv.types.transfers import ConnectorMeta, SlotRef, TransferJob
from tierkv.worker.cuda.batch_copy import load_batch_copy
from tierkv.worker.cuda.copies import DIRECT_BYTES, CudaCopies
from tierkv.worker.cuda.pages import DevicePages
from tierkv.worker.cuda.runtime import CudaDevice
from tierkv.worker.worker import Worker

NAMESPACE = bytes(range(16))
SPEC = EngineSpec("m", "float32", (GroupSpec(16, (64, 128)), GroupSpec(16, (32,))), 16)
GEOMETRY = Geometry.of(SPEC, blocks=3)
NUM_BLOCKS = 32

HOST, HAND = "host", "hand"
HAND_DIRECT, HAND_SINGLY = "hand, directly", "hand, singly"
"""Ways of copying: pages from their blocks to the slots; staged, and one by one, as with an older driver."""
_NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = pytest.param("cuda", marks=_NEEDS_CUDA)
DEVICES = [
    HOST, HAND, HAND_DIRECT, HAND_SINGLY,
    CUDA, pytest.param("cuda, directly", marks=_NEEDS_CUDA), pytest.param("cuda, singly", marks=_NEEDS_CUDA),
]  # fmt: skip
"""Devices of a worker's tensors. The same tests run on all."""


class Bed:
    """Worker whose copy thread can be held back by a gate."""

    def __init__(
        self,
        device: str = HOST,
        *,
        verify_loads: bool = True,
        geometry: Geometry = GEOMETRY,
        pinnable: bool = True,
        staging_bytes: int = 1200,
        piece_bytes: int = 1200,
    ) -> None:
        rng = np.random.default_rng(7)
        self.geometry = geometry
        self.device, _, way = device.partition(", ")
        self.hand = HandDevice(pinnable=pinnable, has_batches=way != "singly")
        self.caches: list[list[Any]] = [
            [rng.integers(0, 255, (NUM_BLOCKS, size), dtype=np.uint8) for size in group.page_bytes]
            for group in geometry.groups
        ]
        self.arena = HostArena(1 << 20, geometry.payload_bytes_max)
        self.pool = ThreadPoolExecutor(1)
        self.sealer = FrameSealer(NAMESPACE)
        self.gate = Event()
        self.gate.set()
        self.worker = Worker(self.arena, self.sealer, geometry, self.submit, verify_loads=verify_loads)
        if self.device == "cuda":
            self.caches = [[torch.from_numpy(tensor).cuda() for tensor in group] for group in self.caches]
        self.worker.register_kv_caches(self.caches)
        if self.device == HAND or way:
            is_hand = self.device == HAND  # over the same memory
            tensors = [[torch.from_numpy(t) if is_hand else t for t in group] for group in self.caches]
            pages = DevicePages(geometry, tensors)
            real = CudaDevice(pages.device, None if is_hand or way == "singly" else load_batch_copy())
            self.worker._copies.close()  # type: ignore[union-attr]  # they are registered
            self.worker._copies = CudaCopies(
                self.worker._rank_slice, pages, self.submit, self.hand if is_hand else real, 4 * staging_bytes,
                direct_bytes=1 if way == "directly" else DIRECT_BYTES, piece_bytes=piece_bytes,
            )  # fmt: skip

    def submit(self, copy: Callable[[], Any]) -> Future[Any]:
        """Run a copy on the one copy thread, after the gate opens."""

        def gated() -> object:
            self.gate.wait(10)
            return copy()

        return self.pool.submit(gated)

    def snapshot(self) -> list[list[np.ndarray]]:
        """Return a copy of all tensors."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return [[tensor.cpu().numpy().copy() for tensor in group] for group in self.caches]
        return [[tensor.copy() for tensor in group] for group in self.caches]

    def clear(self, group: int, blocks: slice = slice(None)) -> None:
        """Write zeros, as the forward pass would."""
        for tensor in self.caches[group]:
            tensor[blocks] = 0

    def close(self) -> None:
        """End the copy thread."""
        self.gate.set()
        self.worker.shutdown()
        self.pool.shutdown()

    def run(
        self, *, loads: tuple[TransferJob, ...] = (), stores: tuple[TransferJob, ...] = ()
    ) -> dict[int, frozenset[Key]]:
        """Run one step that is flushed at once; returns the failures."""
        everything = frozenset(j.job_id for j in (*loads, *stores))
        self.worker.start_step(ConnectorMeta(loads=loads, stores=stores, jobs_to_flush=everything))
        output = self.worker.get_finished()
        assert set(output.finished) == everything
        return dict(output.failed_keys)


def job(
    job_id: int,
    blocks: list[int],
    *,
    store: bool,
    group: int = 0,
    first_block: int = 0,
    keys: tuple[Key, ...] | None = None,
    slot: int = 0,
) -> TransferJob:
    """Return a job over one group, with chunks in neighbouring slots."""
    chunks = -(-(first_block % 3 + len(blocks)) // 3)
    names = keys or tuple(make_key(b"%08d" % (first_block // 3 + i), group) for i in range(chunks))
    sizes, indices = [0, 0], [0, 0]
    sizes[group], indices[group] = len(blocks), first_block
    return TransferJob(
        job_id=job_id,
        request_id="r",
        is_store=store,
        keys=names,
        slots=tuple(SlotRef(slot + i, 0) for i in range(chunks)),
        chunk_groups=(group,) * chunks,
        block_ids=tuple(blocks),
        group_sizes=tuple(sizes),
        block_indices=tuple(indices),
    )
