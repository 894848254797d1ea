"""Worker: its copies are exact, verified and bounded, and a failed copy is a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Timer

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_bed import DEVICES, GEOMETRY, NUM_BLOCKS, SPEC, Bed, job

from tierkv.errors import EngineProtocolError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.frames.sealer import FrameSealer
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key
from tierkv.types.transfers import VOID_SLOT, ConnectorMeta, SlotRef, TransferJob
from tierkv.worker.transfers import Transfer


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Device of the KV tensors."""
    name: str = request.param
    return name


@pytest.fixture
def bed(device: str) -> Iterator[Bed]:
    """Worker for one test."""
    made = Bed(device)
    yield made
    made.close()


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(
    source=st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=6, max_size=6, unique=True),
    target=st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=6, max_size=6, unique=True),
    skip=st.integers(0, 2),
    take=st.integers(1, 6),
    group=st.integers(0, 1),
)
def test_a_load_restores_exactly_the_stored_blocks(
    device: str, source: list[int], target: list[int], skip: int, take: int, group: int
) -> None:
    """Promise 1: any loaded part of a chunk equals the stored blocks."""
    bed = Bed(device)
    before = bed.snapshot()
    assert not bed.run(stores=(job(1, source, store=True, group=group),))
    part = target[skip : skip + take]
    chunks = -(-(skip + len(part)) // 3)
    keys = tuple(make_key(b"%08d" % i, group) for i in range(chunks))
    load = job(2, part, store=False, group=group, first_block=skip, keys=keys)
    bed.clear(group)
    assert not bed.run(loads=(load,))
    for tensor, old in zip(bed.snapshot()[group], before[group], strict=True):
        expected = np.zeros_like(tensor)
        for offset, block in enumerate(part):
            expected[block] = old[source[skip + offset]]
        np.testing.assert_array_equal(tensor, expected)
    bed.close()


def test_chunks_of_one_block_are_restored(device: str) -> None:
    """Chunks of one block have their own code path, which must be as exact."""
    geometry = Geometry.of(SPEC, blocks=1)
    bed = Bed(device, geometry=geometry)
    before = bed.snapshot()
    source, target = [4, 9], [20, 3]
    keys = (make_key(b"%08d" % 0, 0), make_key(b"%08d" % 1, 1))

    def both(job_id: int, blocks: list[int], *, store: bool) -> TransferJob:
        return TransferJob(
            job_id, "r", store, keys, (SlotRef(0, 0), SlotRef(1, 0)), (0, 1), tuple(blocks), (1, 1), (0, 0)
        )

    assert not bed.run(stores=(both(1, source, store=True),))
    assert not bed.run(loads=(both(2, target, store=False),))
    after = bed.snapshot()
    for group in (0, 1):
        for tensor, old in zip(after[group], before[group], strict=True):
            np.testing.assert_array_equal(tensor[target[group]], old[source[group]])
            assert (np.delete(tensor, target[group], axis=0) == np.delete(old, target[group], axis=0)).all()
    bed.close()


def test_a_worker_stores_its_share_of_equal_pages(device: str) -> None:
    """Of two workers with equal pages, the first stores even slots. It loads from all of them."""
    spec = replace(SPEC, groups=tuple(replace(group, copies=2) for group in SPEC.groups), num_workers=2)
    bed = Bed(device, geometry=Geometry.of(spec, blocks=3))
    before = bed.arena.slot(1).tobytes()
    stored = job(1, list(range(1, 10)), store=True)
    assert not bed.run(stores=(stored,))
    assert bed.arena.slot(1).tobytes() == before
    for slot in (0, 2):
        bed.sealer.check_slot(bed.arena.slot(slot), stored.keys[slot])
    assert bed.worker.bytes_stored == 2 * bed.geometry.groups[0].worker_bytes
    loaded = job(2, list(range(11, 20)), store=False)
    assert bed.run(loads=(loaded,)) == {2: frozenset({stored.keys[1]})}
    bed.close()


@pytest.mark.parametrize("void", [{0}, {1}, {0, 1, 2}])
def test_void_slots_are_reported_and_their_blocks_unchanged(
    bed: Bed, caplog: pytest.LogCaptureFixture, void: set[int]
) -> None:
    """The last job of a load that was given up has void slots. Their chunks fail and the others load.

    The blocks of void slots may belong to another request by now, so they keep their bytes. The last slot of the arena,
    which a slot of -1 would be, keeps its bytes too. Nothing is logged.
    """
    ids = list(range(1, 10))
    stored = job(1, ids, store=True)
    bed.run(stores=(stored,))
    before = bed.snapshot()
    arena = bed.arena.slot(bed.arena.num_slots - 1).tobytes()
    target = list(range(11, 20))
    slots = tuple(VOID_SLOT if i in void else ref for i, ref in enumerate(stored.slots))
    load = replace(job(2, target, store=False), slots=slots)
    assert bed.run(loads=(load,)) == {2: frozenset(load.keys[i] for i in void)}
    after = bed.snapshot()
    for tensor, old in zip(after[0], before[0], strict=True):
        for i in range(3):
            here, there = slice(target[3 * i], target[3 * i] + 3), slice(ids[3 * i], ids[3 * i] + 3)
            np.testing.assert_array_equal(tensor[here], old[here] if i in void else old[there])
    assert bed.arena.slot(bed.arena.num_slots - 1).tobytes() == arena
    assert not caplog.records


def test_a_damaged_chunk_never_reaches_the_gpu(bed: Bed) -> None:
    """Promise 1 in host memory: a flipped bit in a slot fails that chunk, keeps its blocks, and loads the other."""
    bed.run(stores=(job(1, [1, 2, 3, 4, 5, 6], store=True),))
    bed.arena.slot(0)[HEADER_BYTES + 5] ^= 1
    before = bed.snapshot()
    load = job(2, [11, 12, 13, 14, 15, 16], store=False)
    assert bed.run(loads=(load,)) == {2: frozenset({load.keys[0]})}
    after = bed.snapshot()
    np.testing.assert_array_equal(after[0][0][11:14], before[0][0][11:14])
    np.testing.assert_array_equal(after[0][0][14:17], before[0][0][4:7])


def test_without_verification_damage_passes(device: str) -> None:
    """Shows that the check makes the previous test pass."""
    bed = Bed(device, verify_loads=False)
    bed.run(stores=(job(1, [1, 2, 3], store=True),))
    bed.arena.slot(0)[HEADER_BYTES + 5] ^= 1
    assert bed.run(loads=(job(2, [11, 12, 13], store=False),)) == {}
    after = bed.snapshot()
    assert (after[0][0][11] != after[0][0][1]).any()
    bed.close()


@pytest.mark.parametrize("what", ["key", "namespace", "group"])
def test_a_foreign_chunk_is_refused(bed: Bed, what: str) -> None:
    """A slot with another key, another namespace or another group's chunk fails, whatever its checksum."""
    bed.run(stores=(job(1, [1, 2, 3], store=True, group=1 if what == "group" else 0),))
    load = job(2, [11, 12, 13], store=False)
    if what == "namespace":
        FrameSealer(bytes(16)).seal(bed.arena.slot(0), load.keys[0], GEOMETRY.groups[0].payload_bytes)
    elif what == "group":
        bed.sealer.seal(bed.arena.slot(0), load.keys[0], GEOMETRY.groups[1].payload_bytes)
    else:
        load = job(2, [11, 12, 13], store=False, keys=(make_key(b"another", 0),))
    before = bed.snapshot()
    assert bed.run(loads=(load,)) == {2: frozenset(load.keys)}
    np.testing.assert_array_equal(bed.snapshot()[0][0], before[0][0])


def test_s110_stores_wait_for_the_next_step_and_go_first(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """S110: a store queued in step k is submitted in step k + 1, before that step's loads."""
    bed.run(stores=(job(9, [7, 8, 9], store=True, slot=5, keys=(make_key(b"old", 0),)),))
    copies = bed.worker._copies
    assert copies is not None
    begin, begun = copies.start, []
    monkeypatch.setattr(copies, "start", lambda job: begun.append(job.job_id) or begin(job))
    store = job(1, [1, 2, 3], store=True)
    bed.worker.start_step(ConnectorMeta(stores=(store,)))
    bed.worker.queue_stores(ConnectorMeta(stores=(store,)))
    assert bed.worker.get_finished().is_empty
    assert not begun
    load = job(2, [11, 12, 13], store=False, slot=5, keys=(make_key(b"old", 0),))
    bed.worker.start_step(ConnectorMeta(loads=(load,)))
    assert begun == [1, 2]
    bed.worker.wait([1, 2])
    output = bed.worker.get_finished()
    assert list(output.finished) == [1, 2]
    assert not output.failed_keys


def test_s111_a_load_that_was_given_up_ends_before_another_load_of_its_step(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S111: blocks of an aborted load may be the target of another load in the same step.

    The valid load begins when the aborted one has ended, also if copies run concurrently. Otherwise the bytes of the
    wrong chunk may remain.
    """
    old, new = make_key(b"old", 0), make_key(b"new", 0)
    stores = (job(8, [1, 2, 3], store=True, slot=5, keys=(old,)), job(9, [4, 5, 6], store=True, slot=6, keys=(new,)))
    bed.run(stores=stores)
    wanted = bed.snapshot()[0][0][4:7]
    copies = bed.worker._copies
    assert copies is not None
    begin, seen = copies.start, []
    begun: dict[int, Transfer] = {}

    def start(job: TransferJob) -> Transfer:
        seen.append((job.job_id, [job_id for job_id, transfer in begun.items() if not transfer.done()]))
        begun[job.job_id] = begin(job)
        return begun[job.job_id]

    monkeypatch.setattr(copies, "start", start)
    loads = (
        job(1, [11, 12, 13], store=False, slot=6, keys=(new,)),
        job(2, [11, 12, 13], store=False, slot=5, keys=(old,)),
    )
    bed.worker.start_step(ConnectorMeta(loads=loads, jobs_to_flush=frozenset({2})))
    bed.worker.wait([1])
    assert seen == [(2, []), (1, [])]
    np.testing.assert_array_equal(bed.snapshot()[0][0][11:14], wanted)


def test_s111_a_store_of_this_step_can_be_flushed(bed: Bed) -> None:
    """S111: a flush of a store created in this very step submits it and waits: its blocks are overwritten next."""
    store = job(1, [1, 2, 3], store=True)
    stored = bed.snapshot()[0][0][1:4]
    bed.gate.clear()
    Timer(0.05, bed.gate.set).start()  # until then nothing is copied: who does not wait overwrites the blocks first
    bed.worker.start_step(ConnectorMeta(stores=(store,), jobs_to_flush=frozenset({1})))
    bed.clear(0, slice(1, 4))  # the forward pass of this step
    bed.worker.queue_stores(ConnectorMeta(stores=(store,), jobs_to_flush=frozenset({1})))
    assert bed.worker.get_finished().finished == {1: 1}
    before = bed.snapshot()
    bed.run(loads=(job(2, [11, 12, 13], store=False),))
    np.testing.assert_array_equal(bed.snapshot()[0][0][11:14], stored)
    assert (stored != before[0][0][1:4]).any()


def test_s112_waiting_for_unknown_and_ended_jobs_returns(bed: Bed) -> None:
    """S112: unknown and ended jobs are not waited for."""
    bed.run(stores=(job(1, [1, 2, 3], store=True),))
    bed.worker.wait([1, 2, 99])


def test_s114_a_failing_copy_is_a_report(bed: Bed) -> None:
    """S114, D4: a copy that raises fails its chunks only; the worker stays usable."""
    bad = job(1, [1, 2, NUM_BLOCKS + 5], store=True)
    assert bed.run(stores=(bad,)) == {1: frozenset(bad.keys)}
    assert not bed.run(stores=(job(2, [1, 2, 3], store=True),))


def test_d4_a_failed_load_is_not_the_end_of_the_worker(bed: Bed) -> None:
    """D4: loads of an empty slot and to missing blocks fail; the next load and store succeed."""
    bed.run(stores=(job(1, [1, 2, 3], store=True),))
    empty = job(2, [4, 5, 6], store=False, slot=7)
    outside = job(3, [4, 5, NUM_BLOCKS], store=False)
    assert bed.run(loads=(empty, outside)) == {2: frozenset(empty.keys), 3: frozenset(outside.keys)}
    assert not bed.run(loads=(job(4, [4, 5, 6], store=False),), stores=(job(5, [1, 2, 3], store=True, slot=9),))


def test_s115_shutdown_drops_queued_stores_and_drains_running_ones(bed: Bed) -> None:
    """S115: running jobs end, queued jobs are dropped; a second shutdown does nothing."""
    bed.gate.clear()
    bed.worker.start_step(ConnectorMeta(loads=(job(1, [1, 2, 3], store=False),)))
    bed.worker.queue_stores(ConnectorMeta(stores=(job(2, [4, 5, 6], store=True, slot=5),)))
    bed.gate.set()
    bed.worker.shutdown()
    bed.worker.shutdown()
    assert set(bed.worker.get_finished().finished) == {1}
    assert bed.arena.slot(5)[0] == 0


def test_drain_finishes_queued_stores(bed: Bed) -> None:
    """An orderly shutdown loses no accepted job (landscape G15)."""
    bed.worker.queue_stores(ConnectorMeta(stores=(job(2, [4, 5, 6], store=True, slot=5),)))
    bed.worker.drain()
    assert bed.worker.get_finished().finished == {2: 1}


def test_blocks_outside_a_partial_chunk_are_zero_at_rest(bed: Bed) -> None:
    """A chunk whose first blocks are placeholders holds zeros there, not the slot's previous bytes."""
    bed.arena.slot(0)[HEADER_BYTES:] = b"\xff" * (bed.arena.slot_bytes - HEADER_BYTES)
    bed.run(stores=(job(1, [9], store=True, first_block=2, keys=(make_key(b"x", 0),)),))
    payload = bed.arena.payload(0)[: GEOMETRY.groups[0].payload_bytes]
    assert not payload[: 2 * 64].any()
    assert payload[2 * 64 : 3 * 64].tolist() == bed.snapshot()[0][0][9].tolist()


def pages(width: int) -> np.ndarray:
    """Return four blocks of ``width`` bytes."""
    return np.zeros((4, width), np.uint8)


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([[pages(64)]], "caches of 1 groups"),
        ([[pages(64)], [pages(32)]], "1 tensors were registered"),
        ([[pages(60), pages(128)], [pages(32)]], "60 bytes"),
        ([[pages(128)[:, ::2], pages(128)], [pages(32)]], "contiguous"),
        ([["tensor", pages(128)], [pages(32)]], "expected a torch tensor"),
        ([[pages(64)[:0], pages(128)], [pages(32)]], r"tensor 0: shape \(0, 64\) has no blocks"),
        (None, "caches = NoneType: give a list"),
    ],
)
def test_wrong_caches_are_refused_by_name(bed: Bed, caches: list[list[object]], message: str) -> None:
    """The error names the wrong tensor and the reason, before any byte is copied."""
    with pytest.raises(EngineProtocolError, match=message):
        bed.worker.register_kv_caches(caches)


def test_torch_tensors_are_used_in_place(bed: Bed) -> None:
    """Numpy has no bfloat16: its bytes are copied to and from the tensor's own memory."""
    caches = [
        [torch.randn(NUM_BLOCKS, 2, size // 4, dtype=torch.bfloat16) for size in group.page_bytes]
        for group in SPEC.groups
    ]
    bed.worker.register_kv_caches(caches)
    expected = caches[0][0][1:4].clone()
    bed.run(stores=(job(1, [1, 2, 3], store=True),))
    bed.run(loads=(job(2, [11, 12, 13], store=False),))
    assert torch.equal(caches[0][0][11:14], expected)
