"""Workers with equal pages, as latent attention gives them: one copy at rest, stored by one of them, loaded by all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from worker_ranks import PAGE_BYTES, Driver, LocalRank, config_of, remote_ranks, spec_of

import tierkv
from tierkv.errors import ConfigError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.stack.stack import Stack
from tierkv.types.engine import StepOutput

PROMPT = range(64)
SOURCE, TARGET = [1, 2, 3, 4], [9, 8, 7, 6]
CHUNK_BYTES = 2 * sum(PAGE_BYTES)


@contextmanager
def opened(
    place: Path | None, workers: int, *, copies: int | None = None, seed: int = 1
) -> Iterator[tuple[Stack, list[LocalRank], Driver]]:
    """Workers of this process over a disk; all of them with equal pages, or ``copies`` of them."""
    copies = workers if copies is None else copies
    disk = {"backend": "disk", "path": str(place), "capacity": "8MiB", "min_free_bytes": 0}
    config = config_of() if place is None else config_of(tiers=[disk])
    with tierkv.open_stack(config, spec_of(workers, copies=copies)) as stack:
        ranks = [LocalRank(worker, seed, copies=copies) for worker in stack.workers]
        yield stack, ranks, Driver(stack, ranks)


def data_in(place: Path) -> list[bytes]:
    """Content of the files of data, without the free space behind the chunks."""
    return [file.read_bytes().rstrip(b"\0") for file in sorted(place.rglob("*.dat"))]


def test_two_processes_store_the_bytes_of_one_and_both_load_them(tmp_path: Path) -> None:
    """The files of two workers equal those of one, byte by byte."""
    with opened(tmp_path / "one", 1) as (stack, _, driver):
        driver.store(driver.request(PROMPT), SOURCE)
        assert stack.flush()
    disk = {"backend": "disk", "path": str(tmp_path / "two"), "capacity": "8MiB", "min_free_bytes": 0}
    spec = spec_of(2, processes=True, copies=2)
    with tierkv.open_stack(config_of(tiers=[disk]), spec) as stack, remote_ranks(stack, 2) as remote:
        driver = Driver(stack, remote)
        driver.store(driver.request(PROMPT), SOURCE)
        assert stack.flush()
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())
        for rank in remote:
            assert [rank.block(i) for i in TARGET] == [rank.block(i) for i in SOURCE]
    assert data_in(tmp_path / "two") == data_in(tmp_path / "one") != []


@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers_finds_what_two_stored(tmp_path: Path, workers: int) -> None:
    """The chunk has no trace of the number of workers, so neither has its namespace."""
    with opened(tmp_path, 2) as (stack, ranks, driver):
        expected = [ranks[0].block(i) for i in SOURCE]
        driver.store(driver.request(PROMPT), SOURCE)
        assert stack.flush()
    with opened(tmp_path, workers, seed=2) as (_, ranks, driver):
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())
        assert all([rank.block(i) for i in TARGET] == expected for rank in ranks)


def test_the_workers_take_turns_to_store() -> None:
    """Each chunk crosses from a device to the host once, and each device carries an equal share."""
    with opened(None, 2) as (stack, ranks, driver):
        driver.store(driver.request(range(128)), list(range(1, 9)))
        assert stack.metrics.counters.chunks_stored == 4
        assert [rank.worker.bytes_stored for rank in ranks] == [2 * CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_two_copies_of_two_parts(tmp_path: Path) -> None:
    """Four workers of a model with two heads: two parts, each held by two neighbours."""
    with opened(tmp_path, 4, copies=2) as (stack, ranks, driver):
        expected = [[rank.block(i) for i in SOURCE] for rank in ranks]
        assert expected[0] == expected[1] != expected[2] == expected[3]
        driver.store(driver.request(PROMPT), SOURCE)
        assert stack.flush()
        assert sum(rank.worker.bytes_stored for rank in ranks) == 4 * CHUNK_BYTES
    with opened(tmp_path, 2, copies=1, seed=2) as (_, ranks, driver):
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())
        assert [[rank.block(i) for i in TARGET] for rank in ranks] == expected[::2]


def test_damage_is_found_by_every_worker() -> None:
    """No worker may go on with other bytes than its neighbour."""
    with opened(None, 2) as (stack, ranks, driver):
        driver.store(driver.request(PROMPT), SOURCE)
        before = [rank.block(9) for rank in ranks]
        stack._core.wiring.arena.slot(0)[HEADER_BYTES + 5] ^= 1
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset(TARGET[:2]))
        assert [rank.block(9) for rank in ranks] == before
        assert all(rank.block(7) == rank.block(3) for rank in ranks)


def test_a_chunk_is_visible_when_all_workers_have_reported() -> None:
    """A worker without a chunk to store may still be computing: the blocks stay fenced until it has reported."""
    with opened(None, 2) as (stack, ranks, driver):
        driver.begin_store(driver.request(PROMPT), SOURCE)
        for rank in ranks:
            rank.worker.drain()
        asker = driver.request(PROMPT)
        stack.update_connector_output(ranks[0].finished())
        assert stack.get_num_new_matched_tokens(asker, 0)[0] is None
        stack.build_connector_meta(StepOutput())
        stack.update_connector_output(ranks[1].finished())
        assert stack.get_num_new_matched_tokens(asker, 0) == (64, True)


@pytest.mark.parametrize("copies", [0, 2])
def test_copies_that_do_not_divide_the_workers_are_refused(copies: int) -> None:
    """Some part would have no worker, or one more than the others."""
    with pytest.raises(ConfigError, match=rf"copies = {copies} .* num_workers = 3"):
        tierkv.open_stack(config_of(), spec_of(3, copies=copies))
