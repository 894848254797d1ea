"""Chunks divided by heads: engines with one, two and four workers use the same ones (``chunk.parts``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worker_ranks import BLOCK_TOKENS, NUM_BLOCKS, Driver, LocalRank, config_of

import tierkv
from tierkv.errors import ConfigError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.stack.opening import open_staged_stack
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.worker.cuda.pages import DevicePages
from tierkv.worker.pages import HostPages
from tierkv.worker.worker import Worker

PROMPT = range(64)
SOURCE, TARGET = [1, 2, 3, 4], [9, 8, 7, 6]
HEADS, HEAD_BYTES = 4, (8, 24)
"""Of the whole model: heads, and bytes of a head in a row of each of two tensors."""

ROWS = [1, 16]
"""Heads outside tokens, and tokens outside heads."""


def spec_of(workers: int, rows: int = 1, **changes: Any) -> EngineSpec:
    """A model with four heads, divided among workers."""
    heads = HEADS // workers
    pages = tuple(rows * heads * size for size in HEAD_BYTES)
    group = replace(GroupSpec(BLOCK_TOKENS, pages, heads=heads, head_rows=rows), **changes)
    return EngineSpec("m", "float32", (group,), BLOCK_TOKENS, num_workers=workers)


def whole_pages(rows: int, seed: int) -> list[np.ndarray]:
    """Tensors of the whole model: blocks, rows, heads, bytes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (NUM_BLOCKS, rows, HEADS, size), dtype=np.uint8) for size in HEAD_BYTES]


def pages_of(whole: Sequence[np.ndarray], rank: int, workers: int) -> list[np.ndarray]:
    """Pages of one rank: consecutive heads of each tensor."""
    heads = HEADS // workers
    own = slice(rank * heads, (rank + 1) * heads)
    return [np.ascontiguousarray(tensor[:, :, own]).reshape(NUM_BLOCKS, -1) for tensor in whole]


class DividedRank(LocalRank):
    """Worker in this process with given pages."""

    def __init__(self, worker: Worker, pages: Sequence[np.ndarray]) -> None:
        self.worker, self.pages = worker, list(pages)
        worker.register_kv_caches([self.pages])


def joined(ranks: Sequence[DividedRank], rows: int) -> list[np.ndarray]:
    """Tensors of the whole model, from the pages of all ranks."""
    return [
        np.concatenate([rank.pages[i].reshape(NUM_BLOCKS, rows, -1, size) for rank in ranks], axis=2)
        for i, size in enumerate(HEAD_BYTES)
    ]


@contextmanager
def opened(
    place: Path, workers: int, parts: int | None, *, rows: int = 1, seed: int = 1
) -> Iterator[tuple[list[DividedRank], Driver]]:
    """Workers of this process over a disk, with the pages of the whole model divided among them."""
    disk = {"backend": "disk", "path": str(place), "capacity": "8MiB", "min_free_bytes": 0}
    config = config_of(tiers=[disk])
    config["chunk"] = {"blocks": 2, **({} if parts is None else {"parts": parts})}
    with tierkv.open_stack(config, spec_of(workers, rows)) as stack:
        whole = whole_pages(rows, seed)
        ranks = [DividedRank(worker, pages_of(whole, worker.rank, workers)) for worker in stack.workers]
        yield ranks, Driver(stack, ranks)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("stored", "loaded"),
    [
        ((2, None), (1, 2)),
        ((1, 2), (2, None)),
        ((2, 4), (1, 4)),
        ((2, 4), (4, None)),
        ((4, 4), (2, 4)),
        ((1, 4), (1, 4)),
    ],
    ids=str,
)
def test_another_number_of_workers_loads_the_chunks(
    tmp_path: Path, stored: tuple[int, int | None], loaded: tuple[int, int | None], rows: int
) -> None:
    """Heads are divided and joined on the way: each worker gets its own."""
    with opened(tmp_path, *stored, rows=rows) as (_, driver):
        driver.store(driver.request(PROMPT), SOURCE)
        assert driver.stack.flush()
    with opened(tmp_path, *loaded, rows=rows, seed=2) as (ranks, driver):
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())
        found = joined(ranks, rows)
        assert not driver.stack.metrics.counters.chunks_corrupt
    for tensor, right, other in zip(found, whole_pages(rows, 1), whole_pages(rows, 2), strict=True):
        np.testing.assert_array_equal(tensor[TARGET], right[SOURCE])
        rest = [block for block in range(NUM_BLOCKS) if block not in TARGET]
        np.testing.assert_array_equal(tensor[rest], other[rest])


@pytest.mark.parametrize("workers", [1, 2])
def test_each_number_of_parts_has_its_own_namespace(tmp_path: Path, workers: int) -> None:
    """Parts of another length hold other bytes at each place. So they are never found, and never mixed."""
    with opened(tmp_path, 2, None) as (_, driver):
        driver.store(driver.request(PROMPT), SOURCE)
        assert driver.stack.flush()
    with opened(tmp_path, workers, 4) as (_, driver):
        assert driver.load(driver.request(PROMPT), TARGET) == (0, frozenset())


def test_chunks_of_another_number_of_workers_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An operator who changes the number sees an empty cache: once, a warning names the old one and the setting."""
    told = []
    for workers, parts in [(2, None), (1, None), (1, None), (1, 2), (4, None)]:
        caplog.clear()
        with opened(tmp_path, workers, parts):
            pass
        told.append([record.getMessage() for record in caplog.records if "chunk.parts" in record.getMessage()])
    assert [len(messages) for messages in told] == [0, 1, 0, 0, 1]
    assert str(tmp_path) in told[1][0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_checks_all_of_its_parts(workers: int, tmp_path: Path) -> None:
    """Damage in the second part of a worker is found by it before its blocks change."""
    with opened(tmp_path, workers, 4) as (ranks, driver):
        driver.store(driver.request(PROMPT), SOURCE)
        part_bytes = 2 * sum(HEAD_BYTES)
        driver.stack._core.wiring.arena.slot(0)[HEADER_BYTES + part_bytes + 5] ^= 1
        before = ranks[0].block(9)
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset(TARGET[:2]))
        assert ranks[0].block(9) == before


@pytest.mark.parametrize(
    ("engine", "parts", "words"),
    [
        (spec_of(4), 2, ["chunk.parts = 2", "not a multiple of the 4 workers"]),
        (spec_of(2), 3, ["chunk.parts = 3", "not a multiple of the 2 workers"]),
        (spec_of(2), 8, ["chunk.parts = 8", "a worker has 2 heads", "remove chunk.parts"]),
        (spec_of(1, heads=0), 2, ["chunk.parts = 2", "cannot be divided by heads"]),
        (spec_of(1, page_bytes=(8, 30)), 2, ["(8, 30) bytes", "heads of one length"]),
    ],
    ids=str,
)
def test_chunks_that_cannot_be_divided_are_refused(engine: EngineSpec, parts: int, words: list[str]) -> None:
    """The error names the option, the reason and the fix."""
    config = config_of(chunk={"blocks": 2, "parts": parts})
    for open_either in (tierkv.open_stack, open_staged_stack):
        with pytest.raises(ConfigError) as caught:
            open_either(config, engine)
        assert all(word in str(caught.value) for word in words), caught.value


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(ROWS), st.sampled_from([1, 3]), st.data())
def test_pages_on_a_device_are_divided_alike(
    parts: int, workers: int, rows: int, blocks: int, data: st.DataObject
) -> None:
    """Chunks stored from a GPU can be loaded without one: the same bytes, in both directions."""
    geometry = Geometry.of(spec_of(workers, rows), blocks=blocks, parts=max(parts, workers))
    ids = data.draw(st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=1, max_size=blocks, unique=True))
    skip = data.draw(st.integers(0, blocks - len(ids)))
    own = pages_of(whole_pages(rows, 1), 0, workers)
    host, device = HostPages(geometry, [own]), DevicePages(geometry, [[torch.from_numpy(page.copy()) for page in own]])
    size = geometry.groups[0].worker_bytes
    gathered, staged = np.full(size, 0xEE, np.uint8), torch.full((size,), 0xDD, dtype=torch.uint8)
    host.gather(0, skip, ids, gathered)
    device.gather(0, [(skip, ids)], torch.tensor(ids), staged)
    np.testing.assert_array_equal(gathered, staged.numpy())
    emptied = [np.zeros_like(page) for page in own]
    on_device = [torch.from_numpy(page.copy()) for page in emptied]
    HostPages(geometry, [emptied]).scatter(0, skip, ids, gathered)
    DevicePages(geometry, [on_device]).scatter(0, [(skip, ids)], torch.tensor(ids), staged)
    for old, new, other in zip(own, emptied, on_device, strict=True):
        np.testing.assert_array_equal(new[ids], old[ids])
        np.testing.assert_array_equal(new, other.numpy())
        assert not np.delete(new, ids, axis=0).any()
