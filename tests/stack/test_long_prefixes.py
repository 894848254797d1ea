"""Prefixes that are longer than the host tier, over a real model, a real disk and real worker processes.

A streamed load has many jobs. Each of them may meet a hung disk, a bad frame, a reset or an abort. The engine must
return the same tokens in every case, and without faults no chunk is read twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from stack_bed import ANSWER, CHUNK_TOKENS, ENGINE, SLOT_BYTES, Faults, opened, prompts_of, serve, stack_config
from worker_ranks import Driver, LocalRank, RemoteRank, config_of, remote_ranks, spec_of

import tierkv
from tierkv.reference.engine import Engine
from tierkv.stack.stack import Stack
from tierkv.testing.faults import Inner, corrupt
from tierkv.types.keys import Key

Expected = Callable[..., list[list[int]]]

CHUNKS = 60
LONG = replace(ENGINE, num_blocks=420, max_batched_tokens=256)
"""A pool for three prompts of sixty chunks."""
PROMPT = prompts_of(71, 1, length=CHUNKS * CHUNK_TOKENS + 5)
TWO = prompts_of(72, 2, length=CHUNKS * CHUNK_TOKENS + 5, shared=0)


class Reads:
    """Recorder of the keys that a backend is asked to read; from some key on reads may hang."""

    def __init__(self, hang_after: int = 10**9) -> None:
        self.keys: Counter[Key] = Counter()
        self.gate = threading.Event()
        self._hang_after = hang_after

    def __call__(self, batch: Sequence[Any], inner: Inner) -> object:
        """Act as a fault without effect, until reads hang."""
        self.keys.update(request.key for request in batch)
        if self.keys.total() > self._hang_after:
            self.gate.wait(30.0)
        return inner(batch)


@pytest.fixture
def reads() -> Iterator[Reads]:
    """A recorder of reads; hanging reads end with the test."""
    made = Reads()
    yield made
    made.gate.set()


def config(place: Path, host_slots: int = 8, **changes: Any) -> dict[str, Any]:
    """A host tier of ``slots`` slots over a disk with fault injection; all slots may be reserved."""
    tier = {"name": "disk", "backend": "faulty", "path": str(place / "disk"), "capacity": "32MiB", "min_free_bytes": 0}
    host = {"capacity": host_slots * SLOT_BYTES, "reserved_share": 1.0}
    return stack_config(place, tiers=[{**tier, **changes.pop("tier", {})}], host=host, **changes)


def fill(place: Path, faults: Faults, prompts: list[list[int]] = PROMPT) -> None:
    """Store the prompts in a first process."""
    with opened(config(place, 200), LONG, plugins=faults.registry()) as stack:
        serve(stack, prompts, LONG)
        assert stack.close()


@pytest.mark.parametrize("host_slots", [64, 8, 3, 1])
def test_sixty_chunks_through_any_host_tier(
    tmp_path: Path, faults: Faults, expected: Expected, reads: Reads, host_slots: int
) -> None:
    """G1 over real I/O: 60 chunks pass 64 slots at once, 8 and 3 slots in segments, and a single slot one by one. Each
    is read once, and the tokens are those of an engine without tierkv.
    """
    fill(tmp_path, faults)
    with opened(config(tmp_path, host_slots), LONG, plugins=faults.registry()) as stack:
        faults.last.add("read_into", reads)
        assert serve(stack, PROMPT, LONG) == expected(PROMPT, LONG)
        assert stack.metrics.counters.tokens_loaded == {"disk": CHUNKS * CHUNK_TOKENS}
        if host_slots < CHUNKS:  # a hit that fits streams, too, if the disk takes its time over the second half
            assert stack.metrics.counters.loads_streamed == 1
        assert stack.metrics.counters.loads_given_up == stack.metrics.counters.deadlines_expired == 0
        assert set(reads.keys.values()) == {1}
        assert len(reads.keys) == CHUNKS


def test_two_at_once(tmp_path: Path, faults: Faults, expected: Expected, reads: Reads) -> None:
    """Two long and two short prompts together, over eight slots: all are served from the disk."""
    short = prompts_of(73, 2, length=40, shared=0)
    fill(tmp_path, faults, [*TWO, *short])
    with opened(config(tmp_path), LONG, plugins=faults.registry()) as stack:
        faults.last.add("read_into", reads)
        assert serve(stack, [*TWO, *short], LONG) == expected([*TWO, *short], LONG)
        assert stack.metrics.counters.tokens_loaded["disk"] >= 2 * CHUNKS * CHUNK_TOKENS
        assert stack.metrics.counters.loads_given_up == 0
        assert set(reads.keys.values()) == {1}


@pytest.mark.parametrize("call", [4, 9])
def test_a_bad_frame_in_the_middle(tmp_path: Path, faults: Faults, expected: Expected, call: int) -> None:
    """Never wrong bytes: one bit in a segment is flipped; chunks before it are used, the rest is computed."""
    fill(tmp_path, faults)
    with opened(config(tmp_path), LONG, plugins=faults.registry()) as stack:
        calls = iter(range(1000))

        def spoil(batch: Sequence[Any], inner: Inner) -> object:
            return corrupt(offset=9000)(batch, inner) if next(calls) == call else inner(batch)

        faults.last.add("read_into", spoil)
        assert serve(stack, PROMPT, LONG) == expected(PROMPT, LONG)
        assert stack.metrics.counters.chunks_corrupt["disk"] >= 1
        loaded, lost = stack.metrics.counters.tokens_loaded["disk"], stack.metrics.counters.tokens_given_up
        assert stack.metrics.counters.loads_given_up == 1
        assert loaded >= 4 * CHUNK_TOKENS
        assert lost >= CHUNK_TOKENS
        assert loaded + lost == CHUNKS * CHUNK_TOKENS


def test_the_disk_hangs_in_the_middle(tmp_path: Path, faults: Faults, expected: Expected) -> None:
    """Always progress: after twenty chunks no read ends any more. The load ends at its deadline, the rest is computed,
    and the engine's steps never wait.
    """
    fill(tmp_path, faults)
    hanging = Reads(hang_after=20)
    try:
        tight = config(tmp_path, lookup={"deadline_s": 0.3}, tier={"read_deadline_s": 5.0})
        with opened(tight, LONG, plugins=faults.registry()) as stack:
            faults.last.add("read_into", hanging)
            assert serve(stack, PROMPT, LONG) == expected(PROMPT, LONG)
            assert stack.metrics.counters.loads_given_up == 1
            assert 0 < stack.metrics.counters.tokens_loaded["disk"] <= 20 * CHUNK_TOKENS
            assert len(hanging.keys) <= 20 + 8
            hanging.gate.set()
    finally:
        hanging.gate.set()


def until_streaming(engine: Engine, stack: Stack) -> None:
    """Step until a load streams, and some of its segments are done."""
    for _ in range(100_000):
        if stack.metrics.counters.loads_streamed and stack.metrics.counters.chunks_loaded >= 8:
            return
        engine.step()
    raise AssertionError("no load streams")


@pytest.mark.parametrize("what", ["abort", "reset", "reset all", "detach"])
def test_something_happens_in_the_middle(tmp_path: Path, faults: Faults, expected: Expected, what: str) -> None:
    """The request is aborted, the cache is reset, or the tier is detached: stale chunks are not used, nothing leaks,
    and later requests are served.
    """
    fill(tmp_path, faults)
    with opened(config(tmp_path), LONG, plugins=faults.registry()) as stack:
        engine = Engine(LONG, connector=stack)
        engine.add_request(PROMPT[0], ANSWER, request_id="first")
        until_streaming(engine, stack)
        if what == "abort":
            engine.abort("first")
        elif what == "detach":
            stack.tiers.detach("disk", timeout_s=1.0)
        else:
            stack.reset_cache("all" if what == "reset all" else "host")
        engine.add_request(PROMPT[0], ANSWER, request_id="second")
        engine.drain()
        answer = expected(PROMPT, LONG)[0]
        assert list(engine.record("second").output_tokens) == answer
        if what != "abort":
            assert list(engine.record("first").output_tokens) == answer
        assert stack.metrics.counters.loads_given_up >= 1
        assert not stack.has_pending_work()


def test_a_stack_is_closed_in_the_middle(tmp_path: Path, faults: Faults) -> None:
    """The engine stops while a prefix streams: nothing waits for the rest, and no stored chunk is missing."""
    fill(tmp_path, faults)
    with opened(config(tmp_path), LONG, plugins=faults.registry()) as stack:
        engine = Engine(LONG, connector=stack)
        engine.add_request(PROMPT[0], ANSWER, request_id="first")
        until_streaming(engine, stack)
        assert stack.has_pending_work()
        assert stack.close()


def test_several_groups(tmp_path: Path, expected: Expected) -> None:
    """Two groups share twelve slots: their chunks stream side by side."""
    engine = replace(LONG, num_groups=2, num_blocks=500)
    plain = stack_config(tmp_path, host_slots=400)
    with opened(plain, engine) as stack:
        serve(stack, PROMPT, engine)
    plain["tiers"] = plain["tiers"][:1]
    with opened({**plain, "host": {"capacity": 12 * SLOT_BYTES}}, engine) as stack:
        assert serve(stack, PROMPT, engine) == expected(PROMPT, engine) == expected(PROMPT, LONG)
        assert stack.metrics.counters.loads_streamed == 1
        assert stack.metrics.counters.tokens_loaded == {"disk": CHUNKS * CHUNK_TOKENS}
        assert stack.metrics.counters.promotions["disk"] == 2 * CHUNKS


# -- several workers -------------------------------------------------------------------------------------------------

TOKENS = range(14 * 16)
SOURCE, TARGET = range(1, 15), range(15, 29)
"""Fourteen blocks, seven chunks."""


def small(place: Path, slots_kib: int) -> dict[str, Any]:
    """A host tier of ``kib`` KiB over a disk; a slot takes eight."""
    tier = {"backend": "disk", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
    return config_of(tiers=[tier], host={"capacity": f"{slots_kib}KiB", "reserved_share": 1.0})


def await_ranks(ranks: Sequence[RemoteRank]) -> None:
    """Wait until the processes run: their start takes seconds, in which a lookup's deadline must not pass."""
    for rank in ranks:
        rank.ask("drain")


@pytest.mark.parametrize("processes", [False, True])
def test_several_workers(tmp_path: Path, processes: bool) -> None:
    """Two ranks, in one process or in their own: each gets its part of every segment, byte for byte."""
    with tierkv.open_stack(small(tmp_path, 256), spec_of(2)) as stack:
        first = Driver(stack, [LocalRank(worker) for worker in stack.workers])
        first.store(first.request(TOKENS), SOURCE)
        pages = [[rank.block(block) for block in SOURCE] for rank in first.ranks]
        assert stack.close()
    with tierkv.open_stack(small(tmp_path, 24), spec_of(2, processes=processes)) as stack:
        if not processes:
            driver = Driver(stack, [LocalRank(worker, seed=9) for worker in stack.workers])
            assert driver.load(driver.request(TOKENS), TARGET) == (len(TOKENS), frozenset())
            assert [[rank.block(block) for block in TARGET] for rank in driver.ranks] == pages
        else:
            with remote_ranks(stack, 2) as ranks:
                await_ranks(ranks)
                driver = Driver(stack, ranks)
                assert driver.load(driver.request(TOKENS), TARGET) == (len(TOKENS), frozenset())
                assert [[rank.block(block) for block in TARGET] for rank in ranks] == pages
        assert stack.metrics.counters.loads_streamed == 1
        assert stack.metrics.counters.promotions["disk"] == 7


def test_a_worker_is_lost_in_the_middle(tmp_path: Path) -> None:
    """A rank's process dies while it copies a segment. The segment fails, and the load ends with the job that names the
    void chunks. Both are reported in place of the dead rank.
    """
    with tierkv.open_stack(small(tmp_path, 256), spec_of(2)) as stack:
        first = Driver(stack, [LocalRank(worker) for worker in stack.workers])
        first.store(first.request(TOKENS), SOURCE)
        assert stack.close()
    with (
        tierkv.open_stack(small(tmp_path, 24), spec_of(2, processes=True)) as stack,
        remote_ranks(stack, 2, stall={1: "scatter"}) as ranks,
    ):
        await_ranks(ranks)
        driver = Driver(stack, ranks)
        request = driver.request(TOKENS)
        assert driver.begin_load(request, TARGET) == len(TOKENS)
        ranks[1].kill()
        driver.ranks = ranks[:1]
        ranks[0].ask("drain")
        driver.collect()
        invalid: set[int] = set()
        finished: set[str] = set()
        while stack.has_pending_work():
            report = stack.worker_lost(1)
            invalid |= report.invalid_block_ids
            finished |= report.finished
            report = driver.step()
            invalid |= report.invalid_block_ids
            finished |= report.finished
        assert finished == {request.request_id}
        assert invalid == set(TARGET)
