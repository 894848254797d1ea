"""Workers that share one stack, in this process and in others: a chunk has all parts, or does not exist."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_ranks import Driver, LocalRank, RemoteRank, config_of, remote_ranks, spec_of

import tierkv
from tierkv.errors import ConfigError, EngineProtocolError, TierKVError
from tierkv.frames.frame import HEADER_BYTES, PARTS_MAX
from tierkv.memory.arena import Bytes
from tierkv.stack.stack import Stack
from tierkv.types.engine import StepOutput
from tierkv.types.transfers import WorkerOutput

PROMPT = range(64)
SOURCE, TARGET = [1, 2, 3, 4], [9, 8, 7, 6]


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(
    params=[
        "threads",
        "processes",
        pytest.param("threads, cuda", marks=CUDA),
        pytest.param("processes, cuda", marks=CUDA),
    ]
)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """An engine of two workers in both ways, with pages in host memory or on a GPU that both use."""
    where, _, device = request.param.partition(", ")
    with tierkv.open_stack(config_of(), spec_of(2, processes=where == "processes")) as stack:
        if where == "threads":
            yield Driver(stack, [LocalRank(worker, device=device) for worker in stack.workers])
            return
        with remote_ranks(stack, 2, device=device) as ranks:
            yield Driver(stack, ranks)


def assert_loaded(driver: Driver, source: list[int], target: list[int]) -> None:
    """Check that each rank has in ``target`` the content of its ``source``."""
    for rank in driver.ranks:
        for old, new in zip(source, target, strict=True):
            assert rank.block(new) == rank.block(old)


def test_s120_two_workers_store_and_load_their_own_parts(driver: Driver) -> None:
    """S120: each worker gets back its own bytes through one stack, and a job ends when both have reported."""
    before = [rank.block(9) for rank in driver.ranks]
    driver.store(driver.request(PROMPT), SOURCE)
    assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())
    assert_loaded(driver, SOURCE, TARGET)
    assert before != [rank.block(9) for rank in driver.ranks]
    assert driver.ranks[0].block(9) != driver.ranks[1].block(9)


def test_s111_a_preempted_request_is_flushed_on_every_worker(driver: Driver) -> None:
    """S110, S111: each worker submits and awaits the stores of the previous step before blocks are written."""
    request = driver.request(PROMPT)
    expected = [[rank.block(i) for i in SOURCE] for rank in driver.ranks]
    driver.compute(request, SOURCE)
    driver.step(StepOutput(preempted=frozenset({request.request_id})), written=SOURCE)
    assert not any(rank.block(SOURCE[0]).strip(b"\0") for rank in driver.ranks)
    driver.settle()
    assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())
    assert [[rank.block(i) for i in TARGET] for rank in driver.ranks] == expected


def test_chunks_of_two_workers_go_down_and_come_back(tmp_path: Path) -> None:
    """Tiers store frames of two parts: all are verified when read, and each worker gets back its own."""
    disk = {"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
    config = config_of(tiers=[disk])
    with tierkv.open_stack(config, spec_of(2)) as stack:
        first = Driver(stack, [LocalRank(worker) for worker in stack.workers])
        expected = [[rank.block(i) for i in SOURCE] for rank in first.ranks]
        first.store(first.request(PROMPT), SOURCE)
        assert stack.flush()
    with tierkv.open_stack(config, spec_of(2)) as stack:
        second = Driver(stack, [LocalRank(worker, seed=2) for worker in stack.workers])
        assert second.load(second.request(PROMPT), TARGET) == (64, frozenset())
        assert [[rank.block(i) for i in TARGET] for rank in second.ranks] == expected
        assert not stack.metrics.counters.chunks_corrupt


def two(**more: Any) -> tuple[Stack, list[LocalRank], Driver]:
    """Two workers in this process."""
    stack = tierkv.open_stack(config_of(**more), spec_of(2))
    ranks = [LocalRank(worker) for worker in stack.workers]
    return stack, ranks, Driver(stack, ranks)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_chunk_is_visible_when_the_last_part_is_in(order: tuple[int, int]) -> None:
    """Promise 1: with one of two reports the chunk is no hit; with both, in either order, it is."""
    stack, ranks, driver = two()
    with stack:
        driver.begin_store(driver.request(PROMPT), SOURCE)
        for rank in ranks:
            rank.worker.drain()
        asker = driver.request(PROMPT)
        stack.update_connector_output(ranks[order[0]].finished())
        assert stack.get_num_new_matched_tokens(asker, 0)[0] is None, "being written: known, but not readable"
        assert not any(stack._core.wiring.arena.slot(slot)[0] for slot in range(4)), "no header before the last part"
        stack.build_connector_meta(StepOutput())
        stack.update_connector_output(ranks[order[1]].finished())
        assert stack.get_num_new_matched_tokens(asker, 0) == (64, True)


def test_a_worker_that_fails_its_part_fails_the_chunk() -> None:
    """One rank's bytes are worthless without the other's: the chunk is dropped, its neighbour stays."""
    stack, ranks, driver = two()
    with stack:
        gather, calls = ranks[1].worker._copies._pages.gather_in_pieces, []  # type: ignore[union-attr]

        def failing(*arguments: Any) -> Iterator[Bytes]:
            calls.append(arguments)
            if len(calls) == 2:
                raise OSError("no more")
            return gather(*arguments)

        ranks[1].worker._copies._pages.gather_in_pieces = failing  # type: ignore[union-attr]
        driver.store(driver.request(PROMPT), SOURCE)
        assert driver.load(driver.request(PROMPT), TARGET) == (32, frozenset())
        assert_loaded(driver, SOURCE[:2], TARGET[:2])


@pytest.mark.parametrize("damaged", [0, 1])
def test_each_worker_checks_its_own_part(damaged: int) -> None:
    """Damage in one part is found by its worker alone, and the blocks are reported; the other chunk is valid."""
    stack, ranks, driver = two()
    with stack:
        driver.store(driver.request(PROMPT), SOURCE)
        stack._core.wiring.arena.slot(0)[HEADER_BYTES + damaged * 704 + 5] ^= 1
        before = [rank.block(9) for rank in ranks]
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset(TARGET[:2]))
        after = [rank.block(9) for rank in ranks]
        assert after[damaged] == before[damaged]
        assert after[1 - damaged] == ranks[1 - damaged].block(1)
        assert_loaded(driver, SOURCE[2:], TARGET[2:])


def test_transfers_of_all_workers_are_counted(driver: Driver) -> None:
    """Each worker measures its own part; the stack's statistics have both, including other processes."""
    driver.store(driver.request(PROMPT), SOURCE)
    stats = driver.stack.metrics.take_samples()
    assert stats is not None
    assert [one["op_size"] for one in stats.transfers.data["GPU_to_CPU"]] == [2 * 704, 2 * 704]


def test_a_rank_that_reports_twice_counts_once() -> None:
    """A report handed in twice must not end a job that another worker still copies for."""
    stack, ranks, driver = two()
    with stack:
        driver.begin_store(driver.request(PROMPT), SOURCE)
        ranks[0].worker.drain()
        report = ranks[0].finished()
        stack.update_connector_output(report)
        stack.update_connector_output(report)
        assert stack.has_pending_work()
        driver.settle()
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())


@pytest.mark.parametrize("checksums", [(), (b"", b""), (bytes(16),)])
def test_a_part_that_was_not_reported_fails_its_chunk(checksums: tuple[bytes, ...]) -> None:
    """A truncated report without failures must not make a chunk visible."""
    stack, ranks, driver = two()
    with stack:
        driver.begin_store(driver.request(PROMPT), SOURCE)
        for rank in ranks:
            rank.worker.drain()
        stack.update_connector_output(ranks[0].finished())
        report = ranks[1].finished()
        parts = {job: {1: checksums} for job in report.finished}
        stack.update_connector_output(WorkerOutput(report.finished, {}, parts))
        assert not stack.has_pending_work()
        hit = 32 if checksums == (bytes(16),) else 0  # wrong checksum: found when the part is loaded
        assert driver.load(driver.request(PROMPT), TARGET) == (hit, frozenset(TARGET[:2] if hit else ()))


def test_reports_without_ranks_are_refused() -> None:
    """A plain count does not identify the ranks: an engine author who sums counts gets an error at once."""
    stack, ranks, driver = two()
    with stack:
        driver.begin_store(driver.request(PROMPT), SOURCE)
        ranks[0].worker.drain()
        counts = ranks[0].finished().finished
        with pytest.raises(EngineProtocolError, match="name no worker"):
            stack.update_connector_output(WorkerOutput(counts))
        with pytest.raises(EngineProtocolError, match="worker 2: this stack has workers 0 to 1"):
            stack.update_connector_output(WorkerOutput(counts, {}, {job: {2: ()} for job in counts}))
        for rank in (None, "0", -1):
            with pytest.raises(EngineProtocolError, match="this stack has workers 0 to 1"):
                stack.worker_lost(rank)  # type: ignore[arg-type]  # bad ones, too


@pytest.mark.parametrize("copy", ["gather_in_pieces", "scatter"])
def test_s84_a_killed_worker_fails_its_jobs(copy: str) -> None:
    """S84, S120: a worker is killed in the middle of a copy. The engine reports it, the jobs fail, and no partial chunk
    becomes a hit.
    """
    with (
        tierkv.open_stack(config_of(), spec_of(2, processes=True)) as stack,
        remote_ranks(stack, 2, stall={1: copy}) as ranks,
    ):
        driver = Driver(stack, ranks)
        if copy == "gather_in_pieces":
            driver.begin_store(driver.request(PROMPT), SOURCE)
            driver.collect()
        else:
            driver.store(driver.request(PROMPT), SOURCE)
            asker = driver.request(PROMPT)
            assert driver.begin_load(asker, TARGET) == 64
            assert not driver.collect().finished
        assert stack.has_pending_work()
        ranks[1].kill()
        driver.ranks = ranks[:1]
        ranks[0].ask("drain")
        driver.collect()
        report = stack.worker_lost(1)
        assert not stack.has_pending_work()
        if copy == "gather_in_pieces":
            assert driver.stack.get_num_new_matched_tokens(driver.request(PROMPT), 0) == (0, False)
            return
        assert report.invalid_block_ids == frozenset(TARGET)
        # A failed load is a miss from then on. A new process replaces the dead one.
        successor = RemoteRank(stack.worker_setup(1), seed=3)
        driver.ranks = [ranks[0], successor]
        driver.store(driver.request(PROMPT), SOURCE)
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())
        assert_loaded(driver, SOURCE, TARGET)
        successor.close()


def test_a_late_report_of_a_lost_worker_is_ignored() -> None:
    """A report still in the pipe of a dead process must not be counted twice."""
    stack, ranks, driver = two()
    with stack:
        driver.begin_store(driver.request(PROMPT), SOURCE)
        for rank in ranks:
            rank.worker.drain()
        late = ranks[1].finished()
        stack.worker_lost(1)
        stack.update_connector_output(late)
        assert stack.has_pending_work(), "rank 0 has not reported yet"
        driver.collect()
        assert not stack.has_pending_work()
        assert stack.get_num_new_matched_tokens(driver.request(PROMPT), 0) == (0, False)


def test_s122_reset_with_parts_in_flight() -> None:
    """S122: jobs overtaken by a reset end when both workers have reported, and their chunks are not cached."""
    stack, ranks, driver = two()
    with stack:
        driver.begin_store(driver.request(PROMPT), SOURCE)
        ranks[0].worker.drain()
        driver.collect()
        stack.reset_cache()
        driver.settle()
        assert stack.get_num_new_matched_tokens(driver.request(PROMPT), 0) == (0, False)
        assert len(stack._rank_reports or ()) == 0
        driver.store(driver.request(PROMPT), SOURCE)
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())


def test_one_worker_in_a_process_of_its_own() -> None:
    """An engine core with a single worker process is the most common one; its frames equal those of a worker in
    process.
    """
    with tierkv.open_stack(config_of(), spec_of(1, processes=True)) as stack, remote_ranks(stack, 1) as ranks:
        driver = Driver(stack, ranks)
        driver.store(driver.request(PROMPT), SOURCE)
        assert driver.load(driver.request(PROMPT), TARGET) == (64, frozenset())
        assert_loaded(driver, SOURCE, TARGET)
        assert stack._core.wiring.arena.slot(0)[10] == 0, "flags: no parts"


def test_the_engine_survives_when_every_worker_is_killed() -> None:
    """Landscape G15: the jobs fail, the engine's process continues, and its shared memory has no name that could
    remain.
    """
    with tierkv.open_stack(config_of(), spec_of(2, processes=True)) as stack:
        with remote_ranks(stack, 2, stall={0: "gather_in_pieces", 1: "gather_in_pieces"}) as ranks:
            driver = Driver(stack, ranks)
            driver.begin_store(driver.request(PROMPT), SOURCE)
            shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "tierkv-arena" in line]
            assert shared
            assert all("/memfd:tierkv-arena" in line for line in shared)
            for rank in ranks:
                rank.kill()
        stack.worker_lost(0)
        stack.worker_lost(1)
        assert not stack.has_pending_work()
        assert stack.get_num_new_matched_tokens(driver.request(PROMPT), 0) == (0, False)
    assert "tierkv-arena" not in Path("/proc/self/maps").read_text()


def test_the_wrong_kind_of_worker_is_refused() -> None:
    """Asking for the wrong kind of worker raises an error that names the right call."""
    with tierkv.open_stack(config_of(), spec_of(2, processes=True)) as stack:
        assert stack.workers == ()
        with pytest.raises(EngineProtocolError, match="open_worker"):
            _ = stack.worker
        with pytest.raises(EngineProtocolError, match="workers 0 to 1"):
            stack.worker_setup(2)
        setup = pickle.loads(pickle.dumps(stack.worker_setup(1)))
        assert setup == stack.worker_setup(1)
        assert setup.rank == 1
    with pytest.raises(EngineProtocolError, match="ended or closed its stack"):
        tierkv.open_worker(setup)
    with tierkv.open_stack(config_of(), spec_of(1)) as stack:
        with pytest.raises(EngineProtocolError, match="worker_processes=True"):
            stack.worker_setup(0)
        with pytest.raises(EngineProtocolError, match="cannot be lost"):
            stack.worker_lost(0)


def test_a_failed_opening_gives_shared_memory_back(tmp_path: Path) -> None:
    """A tier that cannot be opened, and a capacity that cannot be allocated: no descriptor remains."""
    (tmp_path / "file").write_text("no directory")
    broken = {"backend": "disk", "path": str(tmp_path / "file"), "capacity": "8MiB", "min_free_bytes": 0}
    for config in (config_of(tiers=[broken]), config_of(host={"capacity": 2**45})):
        with pytest.raises(TierKVError):
            tierkv.open_stack(config, spec_of(2, processes=True))
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if "tierkv-arena" in str(link.readlink())]


def test_a_closed_worker_unmaps_what_it_shares() -> None:
    """An engine that restarts its workers would keep a host tier in memory for each of them. A staged stack also shares
    the ends of jobs."""

    def mappings() -> list[str]:
        names = [
            line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line
        ]
        return sorted(name for name in names if "tierkv" in name)

    for opening in (tierkv.open_stack, tierkv.open_staged_stack):
        with opening(config_of(), spec_of(1, processes=True)) as stack:
            before, kept = mappings(), []
            for _ in range(3):
                with tierkv.open_worker(stack.worker_setup(0)) as worker:
                    kept.append(worker)
                    assert len(mappings()) > len(before)
                assert mappings() == before


def test_more_workers_than_a_header_has_room_for() -> None:
    """The limit is checked when the stack is opened, not when the first chunk is sealed."""
    with pytest.raises(ConfigError, match=f"parts of {PARTS_MAX}"):
        tierkv.open_stack(config_of(), spec_of(PARTS_MAX + 1))
