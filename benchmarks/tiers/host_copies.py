"""GPU pages into sealed host slots and back, through the worker, beside one memcpy of the same bytes.

The pages lie scattered over a pool that no cache holds; memcpy gets them in one piece of a chunk's size. One thread on
both sides. What ours does on top: gather or scatter, one checksum over every byte, header and padding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from benchmarks.measure import Cost, Settings, cpu_ratios, cpu_s_per_gb, medians, take_turns, timed
from benchmarks.rows import Row, Target
from benchmarks.tiers.rig import huge_memory
from tierkv.frames.frame import HEADER_BYTES
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import Bytes, HostArena
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key
from tierkv.types.namespace import FINGERPRINT_BYTES
from tierkv.types.transfers import ConnectorMeta, SlotRef, TransferJob
from tierkv.worker.worker import Worker

GB = 1e9
PAGE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a chunk's pages on the GPU: a number of tensors, and a number of blocks of each."""

    name: str
    tensors: int
    blocks_per_chunk: int

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of a chunk."""
        return self.tensors * self.blocks_per_chunk * PAGE_BYTES


LAYOUTS = (
    Layout("2 MiB chunks of 32 pages in one tensor", 1, 32),
    Layout("2 MiB chunks, a page in each of 32 tensors", 32, 1),
    Layout("64 KiB chunks of one page", 1, 1),
)


def run(settings: Settings) -> Iterator[Row]:
    """Measure store and load, for each layout."""
    total = settings.pick(128 << 20, 4 << 20)
    for layout in LAYOUTS:
        yield from _Bench(layout, total // layout.chunk_bytes).rows(settings)


class _Bench:
    """Worker with its pool and arena, and the memory of memcpy."""

    def __init__(self, layout: Layout, chunks: int) -> None:
        self._layout = layout
        self._chunks = chunks
        spec = EngineSpec("benchmark", "uint8", (GroupSpec(16, (PAGE_BYTES,) * layout.tensors),), 16)
        self._geometry = Geometry.of(spec, blocks=layout.blocks_per_chunk)
        self._arena = HostArena(chunks * (HEADER_BYTES + layout.chunk_bytes), layout.chunk_bytes)
        self._sealer = FrameSealer(bytes(FINGERPRINT_BYTES))
        self._worker = Worker(self._arena, self._sealer, self._geometry, _run_now)
        blocks = chunks * layout.blocks_per_chunk
        self._source = huge_memory(chunks * layout.chunk_bytes)
        self._source[:] = np.random.default_rng(1).integers(256, size=len(self._source), dtype=np.uint8)
        self._target = huge_memory(len(self._source))
        shape = (layout.tensors, blocks, PAGE_BYTES)
        self._source_pages, self._target_pages = list(self._source.reshape(shape)), list(self._target.reshape(shape))
        self._keys = tuple(make_key(number.to_bytes(32, "big"), 0) for number in range(chunks))
        order = list(range(blocks))
        random.Random(2).shuffle(order)
        self._block_ids = tuple(order)

    def rows(self, settings: Settings) -> Iterator[Row]:
        store = take_turns([self._store, self._copy_in], settings.rounds)
        self._verify_slots()
        load = take_turns([self._load, self._copy_out], settings.rounds)
        self._verify_target()
        yield self._row("store", store)
        yield self._row("load", load)

    def _row(self, what: str, turns: list[list[Cost]]) -> Row:
        total_bytes = self._chunks * self._layout.chunk_bytes
        gigabytes = total_bytes / GB
        ours, plain = map(medians, turns)
        return Row(
            f"{what}, {self._layout.name}",
            "GB/cpu s",
            gigabytes / ours.cpu_s,
            "memcpy of the same bytes",
            gigabytes / plain.cpu_s,
            cpu_ratios(turns[1], turns[0]),
            Target("ratio", ">=", 0.75),
            {
                "GB/s on the wall": gigabytes / ours.wall_s,
                "GB/s on the wall, memcpy": gigabytes / plain.wall_s,
                "cpu s/GB": cpu_s_per_gb(ours, total_bytes),
                "cpu s/GB of the limit": cpu_s_per_gb(plain, total_bytes),
            },
        )

    def _store(self) -> Cost:
        self._worker.register_kv_caches([self._source_pages])
        self._worker.queue_stores(ConnectorMeta(stores=(self._job(is_store=True),)))
        return self._timed_step(ConnectorMeta())

    def _load(self) -> Cost:
        self._worker.register_kv_caches([self._target_pages])
        return self._timed_step(ConnectorMeta(loads=(self._job(is_store=False),)))

    def _timed_step(self, meta: ConnectorMeta) -> Cost:
        cost = timed(lambda: self._worker.start_step(meta))
        failed = self._worker.get_finished().failed_keys
        if failed:
            raise RuntimeError(f"transfers failed: {failed}")
        return cost

    def _job(self, *, is_store: bool) -> TransferJob:
        slots = tuple(SlotRef(slot, 0) for slot in range(self._chunks))
        groups = (0,) * self._chunks
        sizes = (len(self._block_ids),)
        return TransferJob(1, "request", is_store, self._keys, slots, groups, self._block_ids, sizes, (0,))

    def _copy_in(self) -> Cost:
        pieces = list(self._source.reshape(self._chunks, -1))
        slots = [self._payload(number) for number in range(self._chunks)]
        return timed(lambda: _copy_each(slots, pieces))

    def _copy_out(self) -> Cost:
        pieces = list(self._target.reshape(self._chunks, -1))
        slots = [self._payload(number) for number in range(self._chunks)]
        return timed(lambda: _copy_each(pieces, slots))

    def _payload(self, number: int) -> Bytes:
        return self._arena.payload(number)[: self._layout.chunk_bytes]

    def _verify_slots(self) -> None:
        """Store once more, since memcpy used the same slots, and compare every byte."""
        self._store()
        factor = self._layout.blocks_per_chunk
        for number, key in enumerate(self._keys):
            self._sealer.check_slot(self._arena.slot(number), key)
            ids = self._block_ids[number * factor : (number + 1) * factor]
            expected = np.concatenate([pages[block] for pages in self._source_pages for block in ids])
            if not np.array_equal(self._payload(number), expected):
                raise RuntimeError(f"chunk {number} is not what was on the GPU")

    def _verify_target(self) -> None:
        """Load once more, into memory that memcpy has filled with the same chunks in another order."""
        self._target[:] = 0
        self._load()
        if not np.array_equal(self._source, self._target):
            raise RuntimeError("what was loaded is not what was stored")


def _copy_each(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def _run_now(transfer: Callable[[], frozenset[Key]]) -> Future[frozenset[Key]]:
    """Copy on the caller's thread, so that one thread is compared with one thread."""
    future: Future[frozenset[Key]] = Future()
    future.set_result(transfer())
    return future
