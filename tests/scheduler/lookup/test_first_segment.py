"""First segment of a hit longer than what can be gathered at once, and the parts of a load plan."""

from __future__ import annotations

import pytest
from core_truth import engine_spec
from hypothesis import given
from hypothesis import strategies as st

from tierkv.scheduler.load.load_plan import ChunksOfPlan, LoadPlan
from tierkv.scheduler.lookup.first_segment import first_segment, window_chunks_max, window_keys
from tierkv.scheduler.lookup.search import SearchGroup
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.keys import Key, make_key
from tierkv.types.transfers import SlotRef, chunk_blocks

KEYS = tuple(make_key(b"%04d" % i, 0) for i in range(40))


@pytest.mark.parametrize(
    ("readable", "always", "segment"),
    [
        ("", "", [0, 1, 2, 3]),
        ("7 9", "", [0, 1, 7, 9]),
        ("0 1 2 3 4 5", "", [0, 1, 2, 3, 4, 5]),
        ("1 5 9 13 17 21 25 29 33 37", "", [1, 5, 9, 13, 17, 21]),
        ("", "38 39", [0, 1, 38, 39]),
        ("2 39", "38 39", [0, 2, 38, 39]),
        ("1 2 3 4 5 6 7", "38 39", [1, 2, 3, 4, 38, 39]),
    ],
)
def test_what_goes_first(readable: str, always: str, segment: list[int]) -> None:
    """Window chunks, then chunks in the host tier, up to the limit of six; below four chunks, the front of the rest.

    In the order of the hit, so that the tail is evicted first.
    """
    there = {KEYS[int(i)] for i in readable.split()}
    first = first_segment(KEYS, {KEYS[int(i)] for i in always.split()}, there, 4, 6)
    assert first == tuple(KEYS[i] for i in segment)


def test_windows_of_a_hit() -> None:
    """The last chunks of windows, and none of full attention."""
    full = SearchGroup(4, list(KEYS[:10]))
    window = SearchGroup(4, list(KEYS[10:20]), 3)
    state = SearchGroup(8, list(KEYS[20:25]), 1)
    assert window_chunks_max([full, window, state]) == 4
    assert window_keys([full, window, state], 0, 32) == {*KEYS[15:18], KEYS[23]}
    assert window_keys([full, window, state], 28, 4) == {KEYS[17], KEYS[23]}
    assert not window_keys([full], 0, 32)


@given(
    sizes=st.sampled_from([(4,), (4, 8), (2, 3), (6, 4, 2)]), factor=st.integers(1, 3), start=st.integers(0, 20),
    tokens=st.integers(1, 60), data=st.data(),
)  # fmt: skip
def test_parts_of_a_plan_are_the_plan(
    sizes: tuple[int, ...], factor: int, start: int, tokens: int, data: st.DataObject
) -> None:
    """For any partition of a plan, each chunk goes into the blocks that the whole plan gives it.

    As many blocks are skipped at its front, also if it begins in the middle of a chunk, or a group loads nothing.
    """
    geometry = Geometry.of(engine_spec(sizes, 1), blocks=factor)
    keys: list[Key] = []
    groups: list[int] = []
    blocks: list[int] = []
    counts: list[int] = []
    firsts: list[int] = []
    for group in geometry.groups:
        stop = cdiv(start + tokens, group.block_tokens)
        first = data.draw(st.integers(start // group.block_tokens, stop))
        counts.append(stop - first)
        firsts.append(first if stop > first else 0)
        if stop > first:
            run = range(first // factor, cdiv(start + tokens, group.chunk_tokens))
            keys += [make_key(b"%04d" % i, group.index) for i in run]
            groups += [group.index] * len(run)
            blocks += range(len(blocks) + 1, len(blocks) + 1 + stop - first)
    plan = LoadPlan(tuple(keys), tuple(groups), tuple(blocks), tuple(counts), tuple(firsts))
    whole = dict(zip(plan.keys, chunk_blocks(plan, factor), strict=True))
    chunks = ChunksOfPlan(plan, geometry)
    segments = data.draw(st.lists(st.integers(0, 3), min_size=len(keys), max_size=len(keys)))
    seen: list[Key] = []
    for segment in range(4):
        part = chunks.part([i for i in range(len(keys)) if segments[i] == segment])
        job = part.job(1, "r", tuple(SlotRef(0, 0) for _ in part.keys), ends_load=segment == 3)
        assert sum(job.group_sizes) == len(job.block_ids)
        assert len(job.group_sizes) == len(geometry.groups)
        assert job.ends_load == (segment == 3)
        for key, found in zip(job.keys, chunk_blocks(job, factor), strict=True):
            assert found == whole[key]
        seen += job.keys
    assert sorted(seen) == sorted(plan.keys)
    for group, key, first, end in zip(plan.chunk_groups, plan.keys, chunks.starts, chunks.ends, strict=True):
        size = geometry.groups[group].chunk_tokens
        assert (first, end) == (int(key[:4]) * size, (int(key[:4]) + 1) * size)
