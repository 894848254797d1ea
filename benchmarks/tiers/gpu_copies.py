"""Pages of a GPU into pinned host slots and back, beside one pinned copy of the same bytes in one piece.

No rows where there is no CUDA device. ``copies`` is what the GPU has to do: gather and device to host, host to device
and scatter. ``whole`` is what an engine gets: the same through the worker, with checksums on copy threads. ``beside``
is a matrix product while the worker stores and loads, beside the same product alone: what copies cost the model.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from benchmarks.measure import Cost, Settings, has_gpu, medians, take_turns, timed, wall_ratios
from benchmarks.rows import Row, Target
from benchmarks.tiers.host_copies import GB, PAGE_BYTES, Layout
from tierkv.dispatch.threads.copy_pool import CopyPool
from tierkv.frames.frame import HEADER_BYTES
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key
from tierkv.types.namespace import FINGERPRINT_BYTES
from tierkv.types.transfers import ConnectorMeta, SlotRef, TransferJob
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import Copies
from tierkv.worker.worker import GPU_STAGING_BYTES, Worker

LAYOUTS = (
    Layout("2 MiB chunks of 32 pages in one tensor", 1, 32),
    Layout("2 MiB chunks, a page in each of 32 tensors", 32, 1),
    Layout("8 MiB chunks, 2 pages in each of 64 tensors", 64, 2),
    Layout("512 KiB chunks, a page in each of 8 tensors", 8, 1),
    Layout("64 KiB chunks of one page", 1, 1),
)
COPY_THREADS = 8
PRODUCT = 8192
"""Rows and columns of the matrices beside which the worker copies."""
_POLL_S = 0.5e-3
"""Rest between two questions whether copies have ended. Engines rest a millisecond; without rests, the thread that
asks would hold the interpreter most of the time."""


def run(settings: Settings) -> Iterator[Row]:
    """Measure store and load, for each layout."""
    if not has_gpu():
        return
    import torch  # noqa: PLC0415 - an extra

    total = settings.pick(1 << 30, 32 << 20)
    for layout in LAYOUTS:
        bench = _Bench(layout, total // layout.chunk_bytes, torch.device("cuda"))
        try:
            yield from bench.rows(settings)
            yield from bench.rows_beside(settings)
        finally:
            bench.close()


class _Bench:
    """Worker with its KV tensors and arena, and the two pieces of memory of the single copy."""

    def __init__(self, layout: Layout, chunks: int, device: Any) -> None:  # noqa: ANN401 - torch's, an extra
        import torch  # noqa: PLC0415 - an extra

        self._torch = torch
        self._layout, self._chunks = layout, chunks
        spec = EngineSpec("benchmark", "uint8", (GroupSpec(16, (PAGE_BYTES,) * layout.tensors),), 16)
        geometry = Geometry.of(spec, blocks=layout.blocks_per_chunk)
        self._arena = HostArena(chunks * (HEADER_BYTES + layout.chunk_bytes), layout.chunk_bytes)
        sealer = FrameSealer(bytes(FINGERPRINT_BYTES))
        blocks = chunks * layout.blocks_per_chunk
        self._pages = [
            torch.randint(0, 256, (blocks, PAGE_BYTES), dtype=torch.uint8, device=device) for _ in range(layout.tensors)
        ]
        self._expected = [pages.clone() for pages in self._pages]
        self._pool = CopyPool(COPY_THREADS)
        self._worker = Worker(self._arena, sealer, geometry, self._pool.submit)
        self._worker.register_kv_caches([self._pages])
        self._copies = self._bare_copies(RankSlice(self._arena, sealer, geometry, verify_loads=False))
        self._device_piece = torch.empty(chunks * layout.chunk_bytes, dtype=torch.uint8, device=device)
        self._host_piece = torch.empty(chunks * layout.chunk_bytes, dtype=torch.uint8, pin_memory=True)
        order = list(range(blocks))
        random.Random(2).shuffle(order)
        self._block_ids = tuple(order)
        self._keys = tuple(make_key(number.to_bytes(32, "big"), 0) for number in range(chunks))

    def _bare_copies(self, slots: RankSlice) -> Copies:
        from tierkv.worker.cuda.copies import cuda_copies  # noqa: PLC0415 - imports torch, an extra

        return cuda_copies(slots, [self._pages], _run_now, GPU_STAGING_BYTES)

    def close(self) -> None:
        """Unpin and free, in this order."""
        self._copies.close()
        self._worker.shutdown()
        self._pool.close(10.0)
        self._arena.close()

    def rows(self, settings: Settings) -> Iterator[Row]:
        for what, is_store, plain in (("store", True, self._piece_out), ("load", False, self._piece_in)):
            turns = take_turns(
                [partial(self._bare, is_store=is_store), partial(self._whole, is_store=is_store), plain],
                settings.rounds,
            )
            yield self._row(f"{what}, copies, {self._layout.name}", turns[0], turns[2])
            yield self._row(f"{what}, whole, {self._layout.name}", turns[1], turns[2])
        self._verify()

    def rows_beside(self, settings: Settings) -> Iterator[Row]:
        """Measure a matrix product alone, and while the worker stores and loads in turn."""
        size = settings.pick(PRODUCT, 256)
        product = _Product(self._torch, size, settings.pick(200, 4))
        copied: list[Cost] = []
        alone, beside = take_turns([product.run, partial(self._beside, product, copied)], settings.rounds)
        operations = 2 * size**3 * product.times / 1e12
        moved = 2 * self._chunks * self._layout.chunk_bytes / GB
        yield Row(
            f"product beside copies, {self._layout.name}",
            "TFLOP/s",
            operations / medians(beside).wall_s,
            "the product alone",
            operations / medians(alone).wall_s,
            wall_ratios(alone, beside),
            Target("ratio", ">=", 0.9),
            {"GB/s stored and loaded meanwhile": moved / medians(copied).wall_s} if copied else {},
        )

    def _beside(self, product: _Product, copied: list[Cost]) -> Cost:
        """Run the product while another thread stores and loads all chunks, again and again."""
        ended, failed = threading.Event(), []

        def work() -> None:
            try:
                while not ended.is_set():
                    copied.append(timed(lambda: (self._whole(is_store=True), self._whole(is_store=False))))
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            cost = product.run()
        finally:
            ended.set()
            thread.join()
        if failed:
            raise failed[0]
        return cost

    def _row(self, what: str, ours: list[Cost], plain: list[Cost]) -> Row:
        gigabytes = self._chunks * self._layout.chunk_bytes / GB
        return Row(
            what,
            "GB/s",
            gigabytes / medians(ours).wall_s,
            "one pinned copy",
            gigabytes / medians(plain).wall_s,
            wall_ratios(plain, ours),
            Target("ratio", ">=", 0.75),
            {"cpu s/GB": medians(ours).cpu_s / gigabytes, "cpu s/GB of the limit": medians(plain).cpu_s / gigabytes},
        )

    def _bare(self, *, is_store: bool) -> Cost:
        """Enqueue on this thread and wait for the GPU; checksums are left out, or follow after the measured time."""
        started = []

        def work() -> None:
            started.append(self._copies.start(self._job(is_store=is_store)))
            self._torch.cuda.synchronize()

        cost = timed(work)
        started[0].wait()
        if started[0].result().failed:
            raise RuntimeError("a transfer failed")
        return cost

    def _whole(self, *, is_store: bool) -> Cost:
        """Copy through the worker, in jobs of at most 64 chunks, as in steps."""
        job = self._job(is_store=is_store)
        jobs = tuple(self._pieces(job))
        meta = ConnectorMeta(loads=() if is_store else jobs)
        failed: dict[int, Any] = {}

        def work() -> None:
            left = len(jobs)
            self._worker.queue_stores(ConnectorMeta(stores=jobs if is_store else ()))
            self._worker.start_step(meta)
            while left:
                output = self._worker.get_finished()
                failed.update(output.failed_keys)
                left -= len(output.finished)
                time.sleep(_POLL_S)

        cost = timed(work)
        if failed:
            raise RuntimeError(f"transfers failed: {failed}")
        return cost

    def _pieces(self, job: TransferJob) -> Iterator[TransferJob]:
        factor, step = self._layout.blocks_per_chunk, 64
        for number, first in enumerate(range(0, self._chunks, step)):
            some = slice(first, min(first + step, self._chunks))
            ids = job.block_ids[some.start * factor : some.stop * factor]
            groups = job.chunk_groups[some]
            yield TransferJob(
                number, "request", job.is_store, job.keys[some], job.slots[some], groups, ids, (len(ids),), (0,)
            )

    def _job(self, *, is_store: bool) -> TransferJob:
        slots = tuple(SlotRef(slot, 0) for slot in range(self._chunks))
        groups = (0,) * self._chunks
        return TransferJob(
            1, "request", is_store, self._keys, slots, groups, self._block_ids, (len(self._block_ids),), (0,)
        )

    def _piece_out(self) -> Cost:
        return timed(lambda: self._copy(self._host_piece, self._device_piece))

    def _piece_in(self) -> Cost:
        return timed(lambda: self._copy(self._device_piece, self._host_piece))

    def _copy(self, target: Any, source: Any) -> None:  # noqa: ANN401 - torch's, an extra
        target.copy_(source, non_blocking=True)
        self._torch.cuda.synchronize()

    def _verify(self) -> None:
        """Store, wipe, load, compare every byte, both ways of loading."""
        for way in (self._bare, self._whole):
            way(is_store=True)
            for pages in self._pages:
                pages.zero_()
            self._torch.cuda.synchronize()
            way(is_store=False)
            if not all(map(self._torch.equal, self._pages, self._expected)):
                raise RuntimeError("what was loaded is not what was stored")


class _Product:
    """Matrix product that keeps the GPU busy."""

    def __init__(self, torch: Any, size: int, times: int) -> None:  # noqa: ANN401 - an extra
        self._torch = torch
        self.times = times
        self._left, self._right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self._result = torch.empty_like(self._left)

    def run(self) -> Cost:
        """Multiply some times. Other streams are not waited for."""

        def work() -> None:
            for _ in range(self.times):
                self._torch.matmul(self._left, self._right, out=self._result)
            self._torch.cuda.current_stream().synchronize()

        return timed(work)


def _run_now(function: Callable[[], Any]) -> Future[Any]:
    """Enqueue on the caller's thread, so that its time counts."""
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - as a pool does
        future.set_exception(error)
    return future
