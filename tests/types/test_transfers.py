"""Messages between scheduler and worker."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from tierkv.types.keys import Key
from tierkv.types.transfers import ConnectorMeta, SlotRef, TransferJob, WorkerOutput, chunk_blocks

KEYS = [Key(b"k" + bytes([i])) for i in range(8)]


def job(groups: list[int], block_ids: list[int], sizes: list[int], indices: list[int]) -> TransferJob:
    """Job with one chunk per entry of ``groups``."""
    count = len(groups)
    slots = tuple(SlotRef(i, 0) for i in range(count))
    return TransferJob(
        1, "r", False, tuple(KEYS[:count]), slots, tuple(groups), tuple(block_ids), tuple(sizes), tuple(indices)
    )


def test_s57_the_first_chunk_is_entered_in_its_middle() -> None:
    """S57: F=4, first block 6: chunk 1 is loaded from its third block on, what is before it is on the GPU already."""
    assert chunk_blocks(job([0, 0], [60, 70, 80, 90, 100], [5], [6]), 4) == [(2, (60, 70)), (0, (80, 90, 100))]


def test_s56_a_group_without_blocks() -> None:
    """S56: a group that has everything takes part with no chunk and size 0; its neighbours keep their blocks."""
    assert chunk_blocks(job([1, 1], [5, 6, 7], [0, 3], [0, 2]), 2) == [(0, (5, 6)), (0, (7,))]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=4))
def test_s63_every_block_belongs_to_the_chunk_that_covers_it(factor: int, spans: list[tuple[int, int]]) -> None:
    """S63: whatever blocks each group loads, block i lands in chunk i // F at place i % F, groups never mix."""
    groups: list[int] = []
    ids: list[int] = []
    expected: list[list[tuple[int, int]]] = []
    for group, (first, count) in enumerate(spans):
        run = range(first, first + count)
        chunks = sorted({i // factor for i in run})
        groups += [group] * len(chunks)
        ids += [100 * group + i + 1 for i in run]
        expected += [[(i % factor, 100 * group + i + 1) for i in run if i // factor == chunk] for chunk in chunks]
    parts = chunk_blocks(
        TransferJob(
            1, "r", False, tuple(Key(bytes([i])) for i in range(len(groups))), (), tuple(groups), tuple(ids),
            tuple(count for _, count in spans), tuple(first if count else 0 for first, count in spans),
        ),
        factor,
    )  # fmt: skip
    assert [[(skip + i, block) for i, block in enumerate(blocks)] for skip, blocks in parts] == expected


def test_s89_aggregate_sums_and_leaves_its_sources() -> None:
    """S89: outputs of several workers are summed; D9: none of them is changed by that, though they share a mapping."""
    first = WorkerOutput({1: 1, 2: 1}, {1: frozenset({KEYS[0]})})
    second = WorkerOutput({1: 2}, {1: frozenset({KEYS[1]})})
    joined = WorkerOutput.aggregate([first, second, WorkerOutput()])
    assert joined == WorkerOutput({1: 3, 2: 1}, {1: frozenset({KEYS[0], KEYS[1]})})
    assert first == WorkerOutput({1: 1, 2: 1}, {1: frozenset({KEYS[0]})})
    assert WorkerOutput.aggregate([]).is_empty
    parts = [WorkerOutput({1: 1}, {}, {1: {rank: (bytes([rank]) * 16,)}}) for rank in (1, 0)]
    both = WorkerOutput.aggregate(parts)
    assert both.parts == {1: {0: (bytes(16),), 1: (b"\x01" * 16,)}}
    assert parts[0].parts == {1: {1: (b"\x01" * 16,)}}
    assert not joined.is_empty


def test_instructions_pickle() -> None:
    """Workers may be other processes: instructions must survive pickling."""
    meta = ConnectorMeta((job([0], [1], [1], [0]),), (), frozenset({1, 2}))
    assert pickle.loads(pickle.dumps(meta)) == meta
    output = WorkerOutput({1: 1}, {1: frozenset(KEYS[:1])}, {1: {0: (bytes(16), b"")}})
    assert pickle.loads(pickle.dumps(output)) == output
