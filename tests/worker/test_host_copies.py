"""Copies on the host's cores: what a small chunk costs a copy thread beside the move of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from calls import calls_of

from tierkv.dispatch.threads.copy_pool import CopyPool
from tierkv.dispatch.threads.spawn import Handle, Runner
from tierkv.errors import NoThreadError, TierKVError
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key
from tierkv.types.transfers import VOID_SLOT, SlotRef, TransferJob
from tierkv.worker import host_copies
from tierkv.worker.chunk_runs import RUN_BYTES, chunk_runs
from tierkv.worker.host_copies import CopyPart, HostCopies
from tierkv.worker.pages import HostPages
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import CopyResult

CHUNKS = 32
PAGE_BYTES = 4096
KEYS = tuple(make_key(b"%032d" % number, 0) for number in range(CHUNKS))


def run_whole(copies: HostCopies, job: TransferJob) -> CopyPart:
    """Copy all chunks of a job in one part."""
    return copies._run(job, range(len(job.keys)), copies._layout(job))


@pytest.mark.parametrize(
    ("is_store", "follow", "calls_max"), [(True, True, 26), (False, True, 32), (True, False, 34), (False, False, 39)]
)
def test_a_chunk_of_one_page_takes_few_calls(*, is_store: bool, follow: bool, calls_max: int) -> None:
    """A chunk of 64 KiB is copied and hashed in 12 us: 60 calls took as long again, a second time per hit."""
    geometry = Geometry.of(EngineSpec("m", "uint8", (GroupSpec(16, (PAGE_BYTES,)),), 16), blocks=1)
    arena = HostArena(CHUNKS * 2 * PAGE_BYTES, PAGE_BYTES)
    pages = HostPages(geometry, [[np.ones((CHUNKS, PAGE_BYTES), np.uint8)]])
    copies = HostCopies(RankSlice(arena, FrameSealer(bytes(16)), geometry), pages, lambda _: Future())
    slots = tuple(SlotRef(slot, 0) for slot in range(CHUNKS))

    def job(*, store: bool) -> TransferJob:
        blocks = tuple(range(CHUNKS)) if follow else tuple(range(CHUNKS))[::-1]
        return TransferJob(1, "r", store, KEYS, slots, (0,) * CHUNKS, blocks, (CHUNKS,), (0,))

    assert not run_whole(copies, job(store=True)).failed
    assert not run_whole(copies, job(store=is_store)).failed
    assert calls_of(run_whole, copies, job(store=is_store)) <= calls_max * CHUNKS


class Bench:
    """Copies between pages of two tensors and an arena, on the caller's thread."""

    def __init__(self, chunks: int, factor: int = 1) -> None:
        self.geometry = Geometry.of(EngineSpec("m", "uint8", (GroupSpec(16, (96, 32)),), 16), blocks=factor)
        self.arena = HostArena(chunks * 2 * PAGE_BYTES, factor * 128)
        rng = np.random.default_rng(1)
        blocks = (chunks + 1) * factor
        self.tensors = [rng.integers(256, size=(blocks, size), dtype=np.uint8) for size in (96, 32)]
        self.pages = HostPages(self.geometry, [self.tensors])
        self.sealer = FrameSealer(bytes(16))
        self.copies = HostCopies(RankSlice(self.arena, self.sealer, self.geometry), self.pages, lambda _: Future())

    def job(self, slots: list[int], blocks: list[int], *, store: bool) -> TransferJob:
        """Job whose chunks have these slots, and all blocks in order."""
        refs = tuple([SlotRef(slot, 0) if slot >= 0 else VOID_SLOT for slot in slots])
        return TransferJob(
            1, "r", store, KEYS[: len(slots)], refs, (0,) * len(slots), tuple(blocks), (len(blocks),), (0,)
        )

    def run(self, job: TransferJob) -> CopyPart:
        """Copy all chunks of a job in one part."""
        return run_whole(self.copies, job)

    def check(self, slots: list[int], blocks: list[int]) -> None:
        """Compare every chunk in its slot with its blocks."""
        factor = self.geometry.blocks_per_chunk
        for number, slot in enumerate(slots):
            self.sealer.check_slot(self.arena.slot(slot), KEYS[number])
            ids = blocks[number * factor : (number + 1) * factor]
            expected = np.concatenate([tensor[block] for tensor in self.tensors for block in ids])
            assert np.array_equal(self.arena.payload(slot)[: len(expected)], expected)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize(
    "slots", [list(range(6)), list(range(6))[::-1], [0, 1, 2, 5, 4, 3], [0, 2, 4, 1, 3, 5], [3, 4, 0, 1, 2, 5]]
)
def test_chunks_of_runs_are_what_single_copies_give(slots: list[int], factor: int) -> None:
    """Whatever the order of slots and blocks: every chunk goes to its slot, and back to its blocks."""
    bench = Bench(6, factor)
    ascending = list(range(6 * factor))
    for ids in (ascending, ascending[2 * factor :] + ascending[: 2 * factor], ascending[::-1]):
        assert not bench.run(bench.job(slots, ids, store=True)).failed
        bench.check(slots, ids)
        for tensor in bench.tensors:
            tensor[[*range(6 * factor)]] = 0
        assert not bench.run(bench.job(slots, ids, store=False)).failed
        bench.check(slots, ids)


def test_a_run_is_copied_by_one_call_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call gives back the interpreter's lock: for long enough only if it copies more than a small chunk."""
    bench, copied = Bench(8), []
    for name in ("gather_run", "scatter_run"):
        original = getattr(bench.pages, name)

        def noted(group: int, first: int, rows: object, original: Callable[..., None] = original) -> None:
            copied.append((first, len(rows)))  # type: ignore[arg-type]
            original(group, first, rows)

        monkeypatch.setattr(bench.pages, name, noted)
    slots = [*range(4), *range(7, 3, -1)]
    for store in (True, False):
        assert not bench.run(bench.job(slots, list(range(8)), store=store)).failed
    assert copied == [(0, 4), (4, 4)] * 2


def test_a_damaged_chunk_of_a_run_fails_alone() -> None:
    """The chunks beside it in the run are loaded, and its own blocks stay as they are."""
    bench = Bench(6)
    slots, ids = list(range(6)), list(range(6))
    bench.run(bench.job(slots, ids, store=True))
    bench.arena.payload(2)[5] ^= 1
    wanted = [tensor.copy() for tensor in bench.tensors]
    for tensor in bench.tensors:
        tensor[:6] = 0
    assert bench.run(bench.job(slots, ids, store=False)).failed == {KEYS[2]}
    for tensor, before in zip(bench.tensors, wanted, strict=True):
        before[2] = 0
        assert np.array_equal(tensor, before)


class Threads:
    """Copy threads that run on request, on a clock that each part moves by one second."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[None], Callable[[], None]]] = []
        self.now_s = 0.0

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Queue a function."""
        future: Future[None] = Future()
        self.waiting.append((future, function))
        return future

    def run(self, number: int) -> None:
        """Run one of the functions that wait."""
        future, function = self.waiting.pop(number)
        function()
        future.set_result(None)

    def clock(self) -> float:
        """Half a second later than before."""
        self.now_s += 0.5
        return self.now_s


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, Threads]:
    """Copies of seven chunks, of which a part of a load has three at most, and its threads."""
    monkeypatch.setattr(host_copies, "PART_BYTES", 3 * 128 + 1)
    bench, threads = Bench(7), Threads()
    slice_of_all = RankSlice(bench.arena, bench.sealer, bench.geometry)
    bench.copies = HostCopies(slice_of_all, bench.pages, threads.submit, threads.clock)
    return bench, threads


def stored(bench: Bench) -> tuple[list[int], list[Any]]:
    """Slots and blocks of all chunks, which are stored and then wiped, and what the tensors had."""
    ids = list(range(7))
    bench.run(bench.job(ids, ids, store=True))
    before = [tensor.copy() for tensor in bench.tensors]
    for tensor in bench.tensors:
        tensor[:7] = 0
    return ids, before


def test_all_copy_threads_share_a_long_load(divided: tuple[Bench, Threads]) -> None:
    """Its parts may end in any order. The load ends with the last one, and lasted from the first on."""
    bench, threads = divided
    ids, before = stored(bench)
    began_s = threads.now_s
    load = bench.copies.start(bench.job(ids, ids, store=False))
    assert [len(part) for part in load._parts] == [3, 3, 1]
    for number in (1, 1, 0):
        assert not load.done()
        threads.run(number)
    assert load.done()
    assert load.result() == CopyResult(frozenset(), (), threads.now_s - began_s - 0.5)
    assert all(np.array_equal(tensor, earlier) for tensor, earlier in zip(bench.tensors, before, strict=True))
    assert len(bench.copies.start(bench.job(ids, ids, store=True))._parts) == 1


def test_a_very_long_load_stays_on_one_thread(divided: tuple[Bench, Threads], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other threads copy short loads meanwhile, which would wait behind all its parts."""
    bench, _ = divided
    ids, _ = stored(bench)
    monkeypatch.setattr(host_copies, "PARTS_MAX", 2)
    assert len(bench.copies.start(bench.job(ids[:6], ids[:6], store=False))._parts) == 2
    assert len(bench.copies.start(bench.job(ids, ids, store=False))._parts) == 1


def test_each_part_of_a_load_fails_alone(divided: tuple[Bench, Threads]) -> None:
    """A damaged chunk of one part fails, and each chunk of a part that no thread took; the others are loaded."""
    bench, threads = divided
    ids, before = stored(bench)
    bench.arena.payload(1)[5] ^= 1
    load = bench.copies.start(bench.job(ids, ids, store=False))
    threads.run(0)
    refused, _ = threads.waiting.pop(0)
    refused.set_exception(TierKVError("the pool is full"))
    assert not load.done()
    threads.run(0)
    assert load.done()
    assert load.result().failed == {KEYS[1], KEYS[3], KEYS[4], KEYS[5]}
    for tensor, wanted in zip(bench.tensors, before, strict=True):
        wanted[[1, 3, 4, 5]] = 0
        assert np.array_equal(tensor, wanted)


def test_a_part_that_no_thread_takes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """In a container at its limit of threads every store failed, tiers looked healthy, and no line said why."""

    def no_thread(_name: str, _runner: Runner) -> Handle:
        raise NoThreadError("no thread can be started")

    bench, pool = Bench(7), CopyPool(1, spawn=no_thread)
    bench.copies = HostCopies(RankSlice(bench.arena, bench.sealer, bench.geometry), bench.pages, pool.submit)
    ids = list(range(7))
    assert bench.copies.start(bench.job(ids, ids, store=True)).result().failed == set(KEYS[:7])
    (line,) = [record.getMessage() for record in caplog.records]
    assert "event=chunk_not_copied" in line
    assert "no thread" in line


def test_a_void_slot_is_in_no_run() -> None:
    """Its number comes just before that of the first slot: no memory before the arena is used for it."""
    bench = Bench(3)
    bench.run(bench.job([0, 1, 2], [0, 1, 2], store=True))
    result = bench.run(bench.job([-1, 0, 1], [3, 0, 1], store=False))
    assert result.failed == {KEYS[0], KEYS[1], KEYS[2]}  # the slots hold the chunks of other keys


def test_runs_are_bounded_and_end_at_gaps() -> None:
    """A run holds as many chunks as a core's cache, of one group, whole, with slots and blocks that follow."""
    half = RUN_BYTES // 2

    def runs(
        slots: list[int], blocks: Sequence[tuple[int, tuple[int, ...]]], groups: list[int], size: int
    ) -> list[tuple[range, bool]]:
        refs, ids = tuple([SlotRef(slot, 0) for slot in slots]), tuple([b for _, some in blocks for b in some])
        job = TransferJob(1, "r", True, KEYS[: len(slots)], refs, tuple(groups), ids, (len(ids), 0), (0, 0))
        return list(chunk_runs(job, blocks, 2, [size, size], range(len(slots))))

    whole = [(0, (2 * i, 2 * i + 1)) for i in range(5)]
    up = [0, 1, 2, 3, 4]
    assert runs(up, whole, [0] * 5, 8) == [(range(5), True)]
    assert runs(up, whole, [0] * 5, half) == [(range(2), True), (range(2, 4), True), (range(4, 5), False)]
    assert runs(up, whole, [0] * 5, half + 1) == [(range(5), False)]
    assert runs(up, whole, [0, 0, 0, 1, 1], 8) == [(range(3), True), (range(3, 5), True)]
    assert runs([4, 3, 2, 3, 4], whole, [0] * 5, 8) == [(range(3), True), (range(3, 5), True)]
    assert runs([0, 1, 1, 2, 3], whole, [0] * 5, 8) == [(range(2), True), (range(2, 5), True)]
    assert runs([0, 2, 4, 5, 7], whole, [0] * 5, 8) == [(range(2), False), (range(2, 4), True), (range(4, 5), False)]
    assert runs([-1, 0, 1], whole[:3], [0] * 3, 8) == [(range(1), False), (range(1, 3), True)]
    lacking = [(1, (1,)), (0, (2, 3)), (0, (4, 5)), (0, (6,))]
    assert runs(up[:4], lacking, [0] * 4, 8) == [(range(1), False), (range(1, 3), True), (range(3, 4), False)]
    assert runs(up[:3], [(0, (1, 0)), (0, (2, 3)), (0, (9, 8))], [0] * 3, 8) == [(range(3), False)]
    assert runs([], [], [], 8) == []
