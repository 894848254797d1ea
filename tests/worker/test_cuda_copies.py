"""Copies of a GPU: no thread waits, no result counts before its event has passed, and errors are reports."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worker_bed import CUDA, GEOMETRY, HAND, HAND_DIRECT, NUM_BLOCKS, SPEC, Bed, job
from worker_ranks import config_of, spec_of

import tierkv
from tierkv.dispatch.threads.copy_pool import CopyPool
from tierkv.errors import EngineProtocolError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput
from tierkv.worker.cuda.batch_copy import BatchCopy, Numbers, load_batch_copy
from tierkv.worker.cuda.copies import PIECES_MAX, CudaCopies
from tierkv.worker.cuda.pages import DevicePages
from tierkv.worker.cuda.runtime import CudaDevice
from tierkv.worker.pages import HostPages
from tierkv.worker.rank_slice import RankSlice


@pytest.fixture
def bed() -> Iterator[Bed]:
    """Worker over a simulated GPU."""
    made = Bed(HAND)
    yield made
    made.close()


def start(bed: Bed, *, loads: tuple[TransferJob, ...] = (), stores: tuple[TransferJob, ...] = ()) -> None:
    """Begin transfers and let the copy thread enqueue them."""
    bed.worker.queue_stores(ConnectorMeta(stores=stores))
    bed.worker.start_step(ConnectorMeta(loads=loads))
    bed.pool.submit(int).result(10)


def finish(bed: Bed) -> dict[int, frozenset[bytes]]:
    """Let the GPU finish; returns the failures of the running transfers."""
    bed.hand.let_go()
    first = bed.worker.get_finished()  # loads have ended, of stores the checksums begin
    bed.pool.submit(int).result(10)
    output = WorkerOutput.aggregate([first, bed.worker.get_finished()])
    assert output.finished
    return dict(output.failed_keys)


@pytest.mark.parametrize("store", [True, False])
def test_a_transfer_ends_with_its_event_and_no_thread_waits(bed: Bed, store: bool) -> None:
    """Polling queries the events, however often, and waits for none."""
    bed.run(stores=(job(1, [1, 2, 3], store=True),))
    bed.hand.waits = 0
    transfer = job(2, [4, 5, 6], store=store)
    start(bed, stores=(transfer,) if store else (), loads=() if store else (transfer,))
    for _ in range(3):
        assert bed.worker.get_finished().is_empty
    assert not finish(bed)
    assert bed.hand.queries >= 3
    assert bed.hand.waits == bed.hand.synchronized == 0


def test_a_question_looks_at_one_piece_that_is_on_its_way() -> None:
    """The engine's thread asks in every step: of a job of several pieces it asks about the first."""
    bed = Bed(HAND, piece_bytes=1)
    stored = job(1, list(range(1, 13)), store=True)
    start(bed, stores=(stored,))
    bed.hand.queries = 0
    assert bed.worker.get_finished().is_empty
    assert len(stored.keys) > 1
    assert bed.hand.queries == 1
    assert not finish(bed)
    bed.close()


def test_a_slot_is_sealed_after_the_copy_not_before(bed: Bed) -> None:
    """Promise 1: a checksum computed while the copy engine writes would cover incomplete bytes."""
    start(bed, stores=(job(1, [1, 2, 3], store=True),))
    bed.worker.get_finished()
    bed.pool.submit(int).result(10)
    assert bed.arena.slot(0)[0] == 0, "no header yet"
    bed.arena.payload(0)[:64] = 77  # the copy engine is still at it
    assert not finish(bed)
    bed.sealer.check_slot(bed.arena.slot(0), job(1, [1], store=True).keys[0])
    assert set(bed.arena.payload(0)[:64]) == {77}


def test_a_damaged_chunk_is_not_even_enqueued(bed: Bed) -> None:
    """The checksum of a load is verified before its bytes are copied to the device. Its neighbour is loaded."""
    stored = job(1, [1, 2, 3, 4, 5, 6], store=True)
    bed.run(stores=(stored,))
    bed.arena.slot(0)[HEADER_BYTES + 5] ^= 1
    before = bed.snapshot()
    start(bed, loads=(job(2, [11, 12, 13, 14, 15, 16], store=False),))
    after = bed.snapshot()
    np.testing.assert_array_equal(after[0][0][11:14], before[0][0][11:14])
    np.testing.assert_array_equal(after[0][0][14:17], before[0][0][4:7])
    assert finish(bed) == {2: frozenset({stored.keys[0]})}


def test_copies_run_after_the_work_that_the_engine_enqueued(bed: Bed) -> None:
    """The step that computes or reads a block may still run: every batch waits for that point."""
    bed.hand.recorded = 40
    start(bed, stores=(job(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], store=True),))
    start(bed, loads=(job(2, [11, 12, 13], store=False),))
    waited = [[event._number for event in stream.waited_for] for stream in bed.hand.streams]  # type: ignore[attr-defined]
    assert waited == [[40], [40], [], []], "two batches on two streams; the load found nothing to load yet"
    finish(bed)
    start(bed, loads=(job(3, [11, 12, 13], store=False),))
    assert len(bed.hand.streams[2].waited_for) == 1, "loads have streams of their own"
    assert not finish(bed)


def test_transfers_are_timed_by_the_gpu(bed: Bed) -> None:
    """S109: bytes and seconds of a transfer, from its first copy to its last, however late it is observed."""
    bed.run(stores=(job(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], store=True),))
    bed.worker.queue_stores(ConnectorMeta(stores=(job(2, [1, 2, 3], store=True),)))
    bed.worker.start_step(ConnectorMeta())
    bed.worker.drain()
    assert bed.worker.get_finished().transfers == {"GPU_to_CPU": [{"op_size": 576, "op_time": 0.001}]}
    bed.worker.start_step(ConnectorMeta(loads=(job(3, [1, 2, 3], store=False),)))
    bed.worker.drain()
    assert bed.worker.get_finished().transfers == {"CPU_to_GPU": [{"op_size": 576, "op_time": 0.001}]}


def test_a_piece_is_sealed_while_others_are_copied(bed: Bed) -> None:
    """A long job does not wait for its last copy: the checksums of each piece follow its own."""
    start(bed, stores=(job(1, list(range(1, 13)), store=True),))  # two pieces of two chunks
    bed.hand.passed = bed.hand.recorded - 1  # all but the last event
    assert bed.worker.get_finished().is_empty
    bed.pool.submit(int).result(10)
    assert [bed.arena.slot(slot)[0] != 0 for slot in range(4)] == [True, True, False, False]
    assert not finish(bed)
    assert bed.arena.slot(3)[0]


def test_a_long_job_has_few_pieces() -> None:
    """The engine's thread queues each piece, and the copy threads' queue is bounded: 128k tokens must not fill it."""
    bed = Bed(HAND, piece_bytes=1)
    copies = bed.worker._copies
    assert isinstance(copies, CudaCopies)
    submit, asked = copies._submit, []

    def counted(function: Callable[[], Any]) -> Any:
        asked.append(function)
        return submit(function)

    copies._submit = counted
    blocks = [1 + i % (NUM_BLOCKS - 1) for i in range(3 * 40)]
    stored = job(1, blocks, store=True)
    transfer = copies.start(stored)
    assert len(asked) <= PIECES_MAX
    transfer.wait()
    assert not transfer.result().failed
    assert all(bed.arena.slot(slot)[0] for slot in range(40))
    bed.close()


@pytest.mark.parametrize("refused", [2, 5])
def test_a_refused_piece_fails_its_chunks_alone(bed: Bed, refused: int) -> None:
    """The copy threads' queue may be full in the middle of a job, of copies or of seals: other pieces are stored."""
    copies = bed.worker._copies
    assert isinstance(copies, CudaCopies)
    submit, asked = copies._submit, []
    full = CopyPool(jobs_max=1, spawn=lambda *_: None)  # type: ignore[arg-type]  # no thread
    full.submit(int)

    def some(function: Callable[[], Any]) -> Any:
        asked.append(function)
        return full.submit(function) if len(asked) == refused else submit(function)

    copies._submit = some
    stored = job(1, list(range(1, 19)), store=True)  # three pieces of two chunks
    transfer = copies.start(stored)
    transfer.wait()
    result = transfer.result()
    assert result.failed == frozenset(stored.keys[2:4])
    assert result.checksums == (b"",) * 6, "one for each chunk: those of several workers are counted"
    assert [bed.arena.slot(slot)[0] != 0 for slot in range(6)] == [True, True, False, False, True, True]


def test_long_runs_are_copied_directly() -> None:
    """Pages that follow one another are one copy for each tensor, and no staging memory is touched."""
    bed = Bed(HAND_DIRECT)
    copies = bed.worker._copies
    assert isinstance(copies, CudaCopies)
    assert not bed.run(stores=(job(1, [1, 2, 3, 7, 5, 6], store=True),))
    assert bed.hand.batches == [2 * 3], "one run of the first chunk, two of the second; two tensors"
    assert not bed.run(loads=(job(2, [11, 12, 13, 17, 15, 16], store=False),))
    assert all((next(streams).staging == 0xAB).all() for streams in (copies._store_streams, copies._load_streams))
    bed.close()


def test_flushed_jobs_are_waited_for(bed: Bed) -> None:
    """Preemption: the engine's thread waits for these events, because it requested the flush."""
    assert not bed.run(stores=(job(1, [1, 2, 3], store=True),))
    assert bed.hand.waits == 1


def test_an_unpinned_arena_works_too() -> None:
    """Batches go through a pinned buffer: slower, and as exact."""
    bed = Bed(HAND, pinnable=False)
    before = bed.snapshot()
    assert not bed.run(stores=(job(1, [1, 2, 3, 4, 5, 6, 7], store=True),))
    assert not bed.run(loads=(job(2, [11, 12, 13, 14, 15, 16, 17], store=False),))
    after = bed.snapshot()
    for tensor in (0, 1):
        np.testing.assert_array_equal(after[0][tensor][11:18], before[0][tensor][1:8])
    assert bed.hand.synchronized == 4, "each batch of two chunks, both ways"
    bed.close()


def test_the_arena_is_pinned_once_and_unpinned_by_the_last(bed: Bed) -> None:
    """Workers of one process share it.

    CUDA refuses a second registration, and unpinning too early is a segmentation fault.
    """
    address = bed.arena.payload(0).ctypes.data - HEADER_BYTES
    length = bed.arena.num_slots * bed.arena.slot_bytes
    assert bed.hand.registered == {address: length}
    pages = DevicePages(GEOMETRY, [[torch.from_numpy(t) for t in group] for group in bed.caches])
    second = CudaCopies(RankSlice(bed.arena, bed.sealer, GEOMETRY), pages, bed.submit, bed.hand, 1)
    bed.worker.shutdown()
    bed.worker.shutdown()
    assert bed.hand.registered == {address: length}
    second.close()
    second.close()
    assert bed.hand.registered == {}


def test_device_memory_is_bounded_by_the_configuration() -> None:
    """Promise 6: four streams share the configured memory, and each holds at least one part of a chunk."""
    config = config_of(host={"capacity": "128KiB", "gpu_staging": "4KiB"})
    with tierkv.open_stack(config, spec_of(1)) as stack:
        assert stack.worker._gpu_staging_bytes == 4096
    with tierkv.open_stack(config, spec_of(2, processes=True)) as stack:
        assert stack.worker_setup(1).gpu_staging_bytes == 4096
    for whole, share in ((4 * 1200, 1200), (100, 576)):
        bed = Bed(HAND, staging_bytes=whole // 4)
        copies = bed.worker._copies
        assert isinstance(copies, CudaCopies)
        assert [len(next(copies._store_streams).staging) for _ in range(2)] == [share, share]
        bed.close()


def test_a_full_gpu_fails_the_batch_only(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    """Out of memory is a failed store, logged with its traceback. The next store succeeds."""
    failing = job(1, [1, 2, 3, 4, 5, 6], store=True)
    bed.hand.is_full = True
    with caplog.at_level(logging.ERROR):
        assert bed.run(stores=(failing,)) == {1: frozenset(failing.keys)}
    assert "out of memory" in caplog.text
    assert not any(bed.arena.slot(slot)[0] for slot in (0, 1)), "nothing was sealed"
    bed.hand.is_full = False
    assert not bed.run(stores=(job(2, [1, 2, 3], store=True),))


def test_a_broken_gpu_fails_its_jobs(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    """S114, D4: an event that raises ends the jobs as failed. Only the engine may end the process."""
    stored = job(1, [1, 2, 3], store=True)
    start(bed, stores=(stored,))
    bed.hand.is_broken = True
    with caplog.at_level(logging.ERROR):
        assert bed.worker.get_finished().is_empty
        bed.pool.submit(int).result(10)
        assert bed.worker.get_finished().failed_keys == {1: frozenset(stored.keys)}
    assert "illegal memory access" in caplog.text
    assert bed.arena.slot(0)[0] == 0


def test_a_refused_job_has_failed(bed: Bed) -> None:
    """A job that a full or closed pool refuses is reported as failed, not lost."""
    copies = bed.worker._copies
    assert isinstance(copies, CudaCopies)
    copies._submit = CopyPool(jobs_max=1, spawn=lambda *_: None).submit  # type: ignore[arg-type,return-value]  # no thread
    copies._submit(int)
    stored = job(1, [1, 2, 3], store=True)
    assert bed.run(stores=(stored,)) == {1: frozenset(stored.keys)}


def test_batches_of_several_threads_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy threads share the streams: one batch must not be overwritten by the gather of another."""
    bed = Bed(HAND, staging_bytes=600)
    pool = ThreadPoolExecutor(8)
    copies = bed.worker._copies
    assert isinstance(copies, CudaCopies)
    copies._submit = pool.submit
    gather = copies._pages.gather

    def slow_gather(*arguments: Any) -> None:
        gather(*arguments)
        time.sleep(0.001)  # let other threads in, if they can

    monkeypatch.setattr(copies._pages, "gather", slow_gather)
    before = bed.snapshot()
    starts = range(1, NUM_BLOCKS - 3)
    jobs = [job(i, [i, i + 1, i + 2], store=True, slot=i, keys=(make_key(b"%d" % i, 0),)) for i in starts]
    assert not bed.run(stores=tuple(jobs))
    for i in starts:
        expected = np.concatenate([tensor[i : i + 3].reshape(-1) for tensor in before[0]])
        np.testing.assert_array_equal(bed.arena.payload(i)[: len(expected)], expected)
    pool.shutdown()
    bed.close()


# -- layout ------------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Geometry, list[tuple[int, list[int]]]]:
    """Draw tensors of any page sizes, and chunks with any range of blocks."""
    factor = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.sampled_from([1, 2, 6, 7, 8, 12, 64, 96]), min_size=1, max_size=4))
    geometry = Geometry.of(EngineSpec("m", "u8", (GroupSpec(16, tuple(sizes)),), 16), blocks=factor)
    chunks = []
    for _ in range(draw(st.integers(1, 5))):
        skip = draw(st.integers(0, factor - 1))
        take = draw(st.integers(0, factor - skip))
        chunks.append((skip, draw(st.lists(st.integers(0, 19), min_size=take, max_size=take))))
    return geometry, chunks


@given(layouts())
def test_both_kinds_of_pages_have_one_layout(case: tuple[Geometry, list[tuple[int, list[int]]]]) -> None:
    """A chunk stored from a GPU may be loaded on a CPU, and vice versa: one layout, byte for byte."""
    geometry, chunks = case
    sizes = geometry.groups[0]
    rng = np.random.default_rng(3)
    tensors = [rng.integers(0, 256, (20, size), dtype=np.uint8) for size in sizes.page_bytes]
    on_host, on_device = HostPages(geometry, [tensors]), DevicePages(geometry, [list(map(torch.from_numpy, tensors))])
    ids = torch.tensor([block for _, blocks in chunks for block in blocks], dtype=torch.int64)
    staging = torch.full((len(chunks) * sizes.worker_bytes,), 0xAB, dtype=torch.uint8)
    on_device.gather(0, chunks, ids, staging)
    parts = staging.numpy().reshape(len(chunks), -1)
    for part, (skip, blocks) in zip(parts, chunks, strict=True):
        expected = np.full(sizes.worker_bytes, 0xEE, np.uint8)
        on_host.gather(0, skip, blocks, expected)
        np.testing.assert_array_equal(part, expected)
    rng.shuffle(parts.reshape(-1))
    wanted = [tensor.copy() for tensor in tensors]
    targets = HostPages(geometry, [wanted])
    unique = len(set(ids.tolist())) == len(ids)
    if unique:  # one block given twice has no answer of its own
        for part, (skip, blocks) in zip(parts, chunks, strict=True):
            targets.scatter(0, skip, blocks, part)
        on_device.scatter(0, chunks, ids, staging)
        for tensor, expected in zip(tensors, wanted, strict=True):
            np.testing.assert_array_equal(tensor, expected)


@given(layouts())
def test_direct_copies_have_the_same_layout(case: tuple[Geometry, list[tuple[int, list[int]]]]) -> None:
    """Whether pages are staged or copied directly, a part has the same bytes; runs end with their chunk and tensor."""
    geometry, chunks = case
    sizes = geometry.groups[0]
    rng = np.random.default_rng(4)
    tensors = [rng.integers(0, 256, (20, size), dtype=np.uint8) for size in sizes.page_bytes]
    on_host, on_device = HostPages(geometry, [tensors]), DevicePages(geometry, [list(map(torch.from_numpy, tensors))])
    parts, expected = np.zeros((2, len(chunks), sizes.worker_bytes), np.uint8)
    addresses = np.array([part.ctypes.data for part in parts], np.uint64)
    runs = on_device.runs(0, chunks, addresses)
    copy_all(runs.parts, runs.pages, runs.sizes)
    for part, (skip, blocks) in zip(expected, chunks, strict=True):
        on_host.gather(0, skip, blocks, part)
    np.testing.assert_array_equal(parts, expected)
    ends = sum(1 for _, ids in chunks for i in range(len(ids)) if not i or ids[i] != ids[i - 1] + 1)
    assert len(runs.sizes) == ends * len(tensors)


# -- the driver's call -------------------------------------------------------------------------------------------------

DRIVER_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int, *[ctypes.POINTER(ctypes.c_uint64)] * 3, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int * 6),
    ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p,
)  # fmt: skip
"""Type of cuMemcpyBatchAsync. Its attributes are six numbers of four bytes."""


def driver_of(function: Callable[..., int]) -> Any:
    """Return a C function without types of its own, as a library has, and what keeps it alive."""
    call = DRIVER_CALL(function)
    address = ctypes.cast(call, ctypes.c_void_p).value
    assert address
    void, size = ctypes.c_void_p, ctypes.c_size_t
    raw = ctypes.CFUNCTYPE(ctypes.c_int, void, void, void, size, void, void, size, void, void)(address)
    raw.call = call  # type: ignore[attr-defined]
    return raw


def copy_all(targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
    """Copy as the driver would."""
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def test_the_driver_gets_what_its_manual_says() -> None:
    """One set of attributes from copy 0 on, in the order of the stream; arrays of 64 bits, whatever their strides."""
    seen = []

    def driver(targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, first: Any, *rest: Any) -> int:
        seen.append((list(attributes.contents), first[0], rest[0], rest[2]))
        copy_all(*[np.array(numbers[:count], np.uint64) for numbers in (targets, sources, sizes)])
        return 0

    copy = BatchCopy(driver_of(driver))
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    rows = np.arange(0, 64, 16, dtype=np.uint64)
    copy(
        rows[::-1] + np.uint64(target.ctypes.data), rows + np.uint64(source.ctypes.data), np.full(4, 16, np.uint64), 77
    )
    np.testing.assert_array_equal(target.reshape(4, 16), source.reshape(4, 16)[::-1])
    assert seen == [([1, 0, 0, 0, 0, 0], 0, 1, 77)]
    copy(rows[:0], rows[:0], rows[:0], 77)
    assert len(seen) == 1, "no copies, no call"


def test_an_error_of_the_driver_is_an_error_of_the_batch() -> None:
    """The number that CUDA returns, and the copy that it names."""

    def driver(*arguments: Any) -> int:
        arguments[7][0] = 3
        return 1

    numbers = np.zeros(4, np.uint64)
    with pytest.raises(RuntimeError, match="CUDA error 1: 4 copies could not be enqueued, at number 3"):
        BatchCopy(driver_of(driver))(numbers, numbers, numbers, 1)


def test_drivers_without_the_call_are_used_without_it() -> None:
    """No NVIDIA driver, or one from before CUDA 12.8."""
    assert load_batch_copy("libnothing.so.1") is None
    assert load_batch_copy("libc.so.6") is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_any_dtype_is_copied_as_bytes(dtype: torch.dtype) -> None:
    """Bit patterns that are no numbers must survive: pages are copied as integers."""
    size = torch.empty(0, dtype=dtype).element_size()
    tensor = torch.randint(0, 256, (20, 2 * 8 * size), dtype=torch.uint8).view(dtype).view(20, 2, 8)
    geometry = Geometry.of(EngineSpec("m", "x", (GroupSpec(16, (16 * size,)),), 16), blocks=2)
    staging = torch.empty(32 * size, dtype=torch.uint8)
    DevicePages(geometry, [[tensor]]).gather(0, [(0, [3, 9])], torch.tensor([3, 9]), staging)
    assert torch.equal(staging, tensor[[3, 9]].reshape(-1).view(torch.uint8))


def test_an_unaligned_tensor_is_copied_too() -> None:
    """A KV pool may be a part of one allocation. Wide words need aligned addresses."""
    memory = torch.arange(20 * 64 + 3, dtype=torch.int64).to(torch.uint8)
    tensor = memory[3:].view(20, 64)
    geometry = Geometry.of(EngineSpec("m", "x", (GroupSpec(16, (64,)),), 16))
    staging = torch.empty(64, dtype=torch.uint8)
    DevicePages(geometry, [[tensor]]).gather(0, [(0, [7])], torch.tensor([7]), staging)
    assert torch.equal(staging, tensor[7])


def tensors(*sizes: int) -> list[Any]:
    """Return four blocks of each size."""
    return [torch.zeros(4, size, dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([tensors(64, 128)], "caches of 1 groups"),
        ([tensors(64), tensors(32)], "1 tensors were registered"),
        ([tensors(60, 128), tensors(32)], "60 bytes"),
        ([[tensors(128)[0][:, ::2], *tensors(128)], tensors(32)], "contiguous"),
        ([[*tensors(64), np.zeros((4, 128), np.uint8)], tensors(32)], "expected a torch tensor"),
        ([[*tensors(64), torch.zeros(4, 128, dtype=torch.uint8, device="meta")], tensors(32)], "one device"),
    ],
)
def test_wrong_tensors_are_refused_by_name(caches: list[list[Any]], message: str) -> None:
    """As in host memory, the error names the tensor and the reason, before any byte is copied."""
    with pytest.raises(EngineProtocolError, match=message):
        DevicePages(Geometry.of(SPEC, blocks=3), caches)


# -- a real one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CUDA])
def test_stores_see_what_the_engine_computed_before(device: str) -> None:
    """A store that is enqueued right after a long computation must have its result."""
    bed = Bed(device)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy.T / 4096
    bed.clear(0)  # behind all that, on the compute stream
    start(bed, stores=(job(1, [1, 2, 3], store=True),))
    bed.worker.wait([1])
    assert not bed.worker.get_finished().failed_keys
    assert not bed.arena.payload(0)[:576].any()
    bed.close()


@pytest.mark.parametrize("device", [CUDA])
def test_the_arena_is_pinned_for_cuda(device: str) -> None:
    """It is registered while the worker exists, and not after: unmapping pinned memory is an error."""
    bed = Bed(device)
    assert torch.from_numpy(bed.arena.payload(0)).is_pinned()
    bed.worker.shutdown()
    assert not torch.from_numpy(bed.arena.payload(0)).is_pinned()
    bed.close()


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("fault", ["error", "wrong bytes"])
def test_a_driver_that_fails_its_trial_is_not_asked_again(
    device: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A foreign driver may have the call and not perform it: copies go one by one then, and a warning says so."""

    def driver(*arguments: Any) -> int:
        return int(fault == "error")

    assert CudaDevice(torch.device(device), load_batch_copy()).has_batches
    with caplog.at_level(logging.WARNING):
        assert not CudaDevice(torch.device(device), BatchCopy(driver_of(driver))).has_batches
    assert "not used" in caplog.text
