"""Stack for an engine that schedules itself: real memory, workers and disk. This file plays the engine."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierkv.errors import ConfigError, EngineProtocolError, InvariantError
from tierkv.stack.opening import open_staged_stack
from tierkv.stack.remote_worker import open_worker
from tierkv.stack.staged import StagedStack
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.transfers import NO_REQUEST, StagedTransfer, TransferJob

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.PENDING
PAGE, BLOCKS, TOKENS = 512, 32, 16
SLOT_BYTES = 8192
STEPS_MAX = 500
BROKEN = 999
"""A block that there is not: copying it fails."""


def keys(count: int, family: str = "a", group: int = 0) -> list[Key]:
    """Return the first chunks of a prompt."""
    return [make_key(f"{family} {i}".encode().rjust(16), group) for i in range(count)]


class Rank:
    """One worker with its own KV tensor, driven as an engine drives it."""

    def __init__(self, stack: StagedStack, rank: int) -> None:
        setup = stack.worker_setup(rank)
        rng = np.random.default_rng(rank // setup.geometry.groups[0].copies)
        self.cache = rng.integers(0, 255, (BLOCKS, PAGE), dtype=np.uint8)
        self.worker = open_worker(pickle.loads(pickle.dumps(setup)))
        self.worker.register_kv_caches([[self.cache]])

    def run(self, transfer: StagedTransfer, blocks: Sequence[int], *, is_store: bool) -> bool:
        """Run a job to its end, and flag it. Returns whether all of it was copied."""
        job = TransferJob(
            job_id=transfer.number, request_id=NO_REQUEST, is_store=is_store, keys=transfer.keys, slots=transfer.slots,
            chunk_groups=transfer.groups, block_ids=tuple(blocks), group_sizes=(len(blocks),), block_indices=(0,),
        )  # fmt: skip
        self.worker.start(job)
        self.worker.wait([job.job_id])
        failed = self.worker.get_finished().failed_keys
        self.worker.mark_ended(transfer.number)
        return not failed


class Bed:
    """An open stack and all of its workers."""

    def __init__(self, stack: StagedStack, ranks: list[Rank]) -> None:
        self.stack = stack
        self.ranks = ranks

    def store(self, chunks: Sequence[Key], blocks: Sequence[int]) -> None:
        """Store chunks of one block each, and report it."""
        granted = self.stack.prepare_store("writer", [(key, TOKENS * (i + 1)) for i, key in enumerate(chunks)])
        assert granted is not None
        taken = [blocks[list(chunks).index(key)] for key in granted.transfer.keys]
        for rank in self.ranks:
            rank.run(granted.transfer, taken, is_store=True)
        self.stack.complete_store(granted.transfer.keys)

    def ask(self, chunks: Sequence[Key], request_id: str = "reader") -> list[LookupResult]:
        """Look up a run of chunks."""
        return [self.stack.lookup(request_id, key, TOKENS * (i + 1)) for i, key in enumerate(chunks)]

    def ask_until_known(self, chunks: Sequence[Key], request_id: str = "reader") -> list[LookupResult]:
        """Look up in step after step, as an engine does."""
        for _ in range(STEPS_MAX):
            answers = self.ask(chunks, request_id)
            if set(answers) <= {HIT, MISS}:
                return answers
            self.stack.end_step()
            time.sleep(0.005)
        raise AssertionError(f"still {answers}")

    def load(self, chunks: Sequence[Key], blocks: Sequence[int], request_id: str = "reader") -> None:
        """Load a hit, and report it."""
        transfer = self.stack.prepare_load(request_id, chunks)
        self.stack.end_step()
        assert all(rank.run(transfer, blocks, is_store=False) for rank in self.ranks)
        self.stack.complete_load(request_id, chunks)


@contextmanager
def opened(
    place: Path | None = None, *, slots: int = 8, workers: int = 1, copies: int = 1, **changes: Any
) -> Iterator[Bed]:
    """A bed that is closed in any case. copies: workers with equal pages."""
    disk = {"backend": "disk", "path": str(place), "capacity": "8MiB", "min_free_bytes": 0}
    host = {"capacity": slots * SLOT_BYTES, "reserved_share": 1.0}
    config = {"host": host, "tiers": [] if place is None else [disk], **changes}
    engine = EngineSpec("model", "float32", (GroupSpec(TOKENS, (PAGE,), copies=copies),), TOKENS, num_workers=workers)
    with ExitStack() as undo:
        stack = open_staged_stack(config, engine)
        undo.callback(stack.close, 5.0)
        ranks = [Rank(stack, rank) for rank in range(workers)]
        for rank in ranks:
            undo.callback(rank.worker.close)
        yield Bed(stack, ranks)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_gets_its_own_bytes_back(workers: int) -> None:
    """Chunks are stored, looked up and loaded: from the host tier at once, into other blocks."""
    with opened(workers=workers) as bed:
        chunks = keys(3)
        bed.store(chunks, [1, 2, 3])
        assert bed.ask(chunks) == [HIT, HIT, HIT]
        bed.load(chunks, [9, 8, 7])
        for rank in bed.ranks:
            assert (rank.cache[[9, 8, 7]] == rank.cache[[1, 2, 3]]).all()
        assert not bed.stack.has_pending_work()
        counters = bed.stack.metrics.counters
        assert (counters.tokens_stored, dict(counters.tokens_loaded)) == (3 * TOKENS, {"host": 3 * TOKENS})
        assert (counters.chunks_stored, dict(counters.chunks_hit)) == (3, {"host": 3})


def test_a_refused_close_leaves_the_stack_open(tmp_path: Path) -> None:
    """It closed the flags of the workers, and nothing else."""
    with opened(tmp_path, workers=2) as bed:
        with pytest.raises(EngineProtocolError, match="close: timeout_s = inf: give a finite number of seconds"):
            bed.stack.close(float("inf"))
        bed.ranks[1] = Rank(bed.stack, 1)  # a worker that starts again
        bed.store(keys(2), [1, 2])
        bed.load(keys(2), [9, 8])
        assert bed.stack.close()


@pytest.mark.parametrize(("workers", "copies"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_a_restart_finds_what_was_stored(tmp_path: Path, workers: int, copies: int) -> None:
    """Chunks on the disk are read by the next process, verified, and loaded; copies are stored once."""
    chunks = keys(3)
    with opened(tmp_path, workers=workers, copies=copies) as bed:
        bed.store(chunks, [1, 2, 3])
        expected = [rank.cache[[1, 2, 3]].copy() for rank in bed.ranks]
        assert sum(rank.worker.bytes_stored for rank in bed.ranks) == 3 * PAGE * workers // copies
        assert bed.stack.close()
    with opened(tmp_path, workers=workers, copies=copies) as bed:
        assert bed.ask(chunks) == [PENDING, PENDING, PENDING]
        assert bed.ask_until_known(chunks) == [HIT, HIT, HIT]
        bed.load(chunks, [9, 8, 7])
        assert [bed.stack.load_source("reader", key) for key in chunks] == ["disk"] * 3
        for rank, bytes_ in zip(bed.ranks, expected, strict=True):
            assert (rank.cache[[9, 8, 7]] == bytes_).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_that_failed_is_never_read(workers: int) -> None:
    """The engine reports success in any case. The slot held the chunk before, so it has an old seal: the chunk is still
    a miss, and counted. Its neighbour in the job is valid.
    """
    with opened(slots=2, workers=workers) as bed:
        good, bad = chunks = keys(2)
        bed.store(chunks, [1, 2])
        bed.store(keys(2, "other"), [3, 4])
        granted = bed.stack.prepare_store("writer", [(good, 16), (bad, 32)])
        assert granted is not None
        for rank in bed.ranks[:-1]:
            assert rank.run(granted.transfer, [1, 2], is_store=True)
        assert not bed.ranks[-1].run(granted.transfer, [1, BROKEN], is_store=True)
        bed.stack.complete_store(chunks)
        assert bed.ask([good, bad]) == [HIT, MISS]
        assert bed.stack.metrics.counters.stores_failed == 1


def test_a_load_that_one_worker_gave_up_is_no_success() -> None:
    """The engine learns it from the stack: one rank's blocks are right, and the other's are not."""
    with opened(workers=2) as bed:
        chunks = keys(2)
        bed.store(chunks, [1, 2])
        for gives_up in (True, False):
            assert bed.ask(chunks) == [HIT, HIT]
            transfer = bed.stack.prepare_load("reader", chunks)
            bed.stack.end_step()
            assert all(rank.run(transfer, [8, 9], is_store=False) for rank in bed.ranks)
            bed.ranks[1].worker.mark_ended(transfer.number, success=not gives_up)
            assert bed.stack.complete_load("reader", chunks) is not gives_up
            assert not bed.stack.has_pending_work()


@pytest.mark.parametrize("close", [False, True])
def test_a_store_that_a_worker_gave_up_is_never_read(tmp_path: Path, *, close: bool) -> None:
    """Its slots may have their seals: the copy ran, but perhaps after the engine had written to the blocks."""
    chunks = keys(2)
    with opened(tmp_path) as bed:
        granted = bed.stack.prepare_store("writer", [(key, TOKENS * (i + 1)) for i, key in enumerate(chunks)])
        assert granted is not None
        assert bed.ranks[0].run(granted.transfer, [1, 2], is_store=True)
        bed.ranks[0].worker.mark_ended(granted.transfer.number, success=False)
        if not close:
            bed.stack.complete_store(chunks)
            assert bed.ask(chunks) == [MISS, MISS]
            assert bed.stack.metrics.counters.stores_failed == len(chunks)
        assert bed.stack.close()
    with opened(tmp_path) as bed:
        assert bed.ask(chunks) == [MISS, MISS]


@pytest.mark.parametrize("flushed", ["marks", "engine"])
@pytest.mark.parametrize("is_store", [True, False])
def test_slots_of_a_reset_wait_for_the_workers(flushed: str, *, is_store: bool) -> None:
    """A reset overtakes a transfer, and the engine never reports it. Its slots are reused when both workers have
    flagged its end, or the engine states that all is flushed; not before, and they do not leak.
    """
    with opened(slots=2, workers=2) as bed:
        chunks = keys(2)
        if is_store:
            granted = bed.stack.prepare_store("writer", [(key, 16) for key in chunks])
            assert granted is not None
            transfer = granted.transfer
        else:
            bed.store(chunks, [1, 2])
            assert bed.ask(chunks) == [HIT, HIT]
            transfer = bed.stack.prepare_load("reader", chunks)
        bed.stack.end_step()
        bed.stack.reset_cache()
        assert bed.stack.has_pending_work()
        others = [(key, 16) for key in keys(2, "other")]
        bed.ranks[0].worker.mark_ended(transfer.number)
        bed.stack.end_step()
        assert bed.stack.prepare_store("writer", others) is None
        if flushed == "marks":
            bed.ranks[1].worker.mark_ended(transfer.number)
        else:
            bed.stack.workers_flushed()
        bed.stack.end_step()
        assert not bed.stack.has_pending_work()
        bed.store(keys(2, "other"), [3, 4])
        assert bed.ask(keys(2, "other")) == [HIT, HIT]
        assert bed.ask(chunks) == [MISS, MISS]


@pytest.mark.parametrize(
    ("scope", "why"),
    [("al", "reset_cache: scope = 'al': give 'host', or 'all'"), ("all", "tier 'disk' is never written")],
)
def test_a_refused_reset_changes_nothing(tmp_path: Path, scope: Any, why: str) -> None:
    """A misspelt scope would empty the host tier alone, and a request would lose the chunks that are held for it."""
    with opened(tmp_path) as bed:
        bed.store(keys(3), [1, 2, 3])
        assert bed.stack.close()
    disk = {"backend": "disk", "path": str(tmp_path), "capacity": "8MiB", "min_free_bytes": 0, "write": "read_only"}
    with opened(slots=3, tiers=[disk]) as bed:
        assert bed.ask_until_known(keys(3)) == [HIT] * 3
        with pytest.raises(EngineProtocolError, match=why):
            bed.stack.reset_cache(scope)
        granted = bed.stack.prepare_store("writer", [(keys(1, "b")[0], TOKENS)])
        assert granted is None or not granted.transfer.keys, "the reader's chunks are held"
        bed.load(keys(3), [9, 8, 7])


def test_a_worker_is_closed_at_the_end_of_its_block() -> None:
    """An engine may use it as a context manager: the memory that all workers share is released with it."""
    with opened() as bed:
        with open_worker(bed.stack.worker_setup(0)) as worker:
            worker.register_kv_caches([[np.zeros((BLOCKS, PAGE), np.uint8)]])
        with pytest.raises(ValueError, match="the arena is closed"):
            worker._arena.payload(0)


def test_invariants_of_lookups_are_checked_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """TIERKV_VALIDATE=1 is for reports of bugs: chunks that are held for ever must show there."""
    monkeypatch.setenv("TIERKV_VALIDATE", "1")
    with opened() as bed:
        bed.store(keys(2), [1, 2])
        assert bed.ask(keys(2)) == [HIT, HIT]
        requests, bed.stack._lookups._open = bed.stack._lookups._open, {}
        with pytest.raises(InvariantError, match="request 'reader' holds chunks without an open lookup"):
            bed.stack.end_step()
        bed.stack._lookups._open = requests


def test_late_reports_after_a_reset_change_nothing() -> None:
    """A chunk is stored again after the reset while its old job still runs: the report of one job must not end the
    other.
    """
    with opened(slots=4) as bed:
        (key,) = keys(1)
        old = bed.stack.prepare_store("writer", [(key, 16)])
        assert old is not None
        bed.stack.reset_cache()
        new = bed.stack.prepare_store("writer", [(key, 16)])
        assert new is not None
        assert new.transfer.slots != old.transfer.slots
        bed.ranks[0].run(old.transfer, [1], is_store=True)
        bed.stack.end_step()
        assert bed.ask([key]) == [PENDING]
        bed.ranks[0].run(new.transfer, [2], is_store=True)
        bed.stack.complete_store([key])
        bed.stack.complete_store([key])
        bed.stack.end_step()
        assert bed.ask([key]) == [HIT]
        bed.load([key], [9])
        assert (bed.ranks[0].cache[9] == bed.ranks[0].cache[2]).all()


def test_what_workers_have_marked_is_kept_at_the_end(tmp_path: Path) -> None:
    """An engine that shuts down does not step any more. A flagged store without a report is written with the others; an
    unflagged one is dropped, and close returns False.
    """
    done, lost = keys(1, "done"), keys(1, "lost")
    with opened(tmp_path) as bed:
        granted = bed.stack.prepare_store("writer", [(done[0], 16)])
        assert granted is not None
        bed.ranks[0].run(granted.transfer, [1], is_store=True)
        assert bed.stack.prepare_store("writer", [(lost[0], 16)]) is not None
        assert not bed.stack.close()
    with opened(tmp_path) as bed:
        assert bed.ask_until_known(done) == [HIT]
        assert bed.ask(lost, "other") == [MISS]


def test_more_than_there_is_room_for_is_stored_from_the_front() -> None:
    """An offer of a hundred chunks to a host tier of eight would never be granted as a whole."""
    with opened(slots=8) as bed:
        granted = bed.stack.prepare_store("writer", [(key, 16) for key in keys(100)])
        assert granted is not None
        assert list(granted.transfer.keys) == keys(6), "100, 50, 25, 12, 6"
        assert bed.stack.metrics.counters.chunks_not_stored == 94
        assert bed.stack.prepare_store("writer", [(key, 16) for key in keys(4, "b")]) is None, "later"
        assert bed.stack.prepare_store("writer", [(key, 16) for key in keys(5, "b")]) is not None, "two of five"


def test_no_room_now_is_no_error() -> None:
    """All slots are being stored to: the engine gets None, and may offer the same chunks again."""
    with opened(slots=2) as bed:
        first = bed.stack.prepare_store("writer", [(key, 16) for key in keys(2)])
        assert first is not None
        assert bed.stack.prepare_store("writer", [(key, 16) for key in keys(1, "b")]) is None
        bed.ranks[0].run(first.transfer, [1, 2], is_store=True)
        bed.stack.complete_store(first.transfer.keys)
        assert bed.stack.prepare_store("writer", [(key, 16) for key in keys(1, "b")]) is not None


def test_hints_of_a_request_bound_its_stores() -> None:
    """``store = false`` and ``max_offload_tokens``: the engine gets a store without chunks."""
    with opened() as bed:
        bed.stack.on_new_request("quiet", {"tierkv": {"store": False}})
        bed.stack.on_new_request("short", {"tierkv": {"max_offload_tokens": 32}})
        chunks = [(key, TOKENS * (i + 1)) for i, key in enumerate(keys(4))]
        quiet, short = bed.stack.prepare_store("quiet", chunks), bed.stack.prepare_store("short", chunks)
        assert quiet is not None
        assert short is not None
        assert not quiet.transfer.keys
        assert list(short.transfer.keys) == keys(2)


def test_a_prefix_longer_than_the_host_tier_is_answered(tmp_path: Path) -> None:
    """G1 with a real disk: 24 stored chunks, eight slots: as many as fit are loaded, the rest are misses."""
    chunks = keys(24)
    with opened(tmp_path, slots=40) as bed:
        bed.store(chunks, list(range(24)))
        expected = bed.ranks[0].cache[:8].copy()
        assert bed.stack.close()
    with opened(tmp_path, slots=8) as bed:
        assert bed.ask_until_known(chunks) == [HIT] * 8 + [MISS] * 16
        bed.load(chunks[:8], list(range(24, 32)))
        assert (bed.ranks[0].cache[24:32] == expected).all()


def test_keys_name_groups_as_the_engine_numbers_them() -> None:
    """An engine may leave out some of its groups: keys have its group numbers, not positions in the spec."""
    engine = EngineSpec("model", "float32", (GroupSpec(TOKENS, (PAGE,)), GroupSpec(TOKENS, (PAGE,))), TOKENS)
    stack = open_staged_stack({"host": {"capacity": 4 * SLOT_BYTES}}, engine, group_ids=(1, 4))
    try:
        granted = stack.prepare_store("a", [(keys(1, group=4)[0], 16)])
        assert granted is not None
        assert granted.transfer.groups == (1,)
        with pytest.raises(EngineProtocolError, match="belongs to no group"):
            stack.lookup("a", keys(1, group=0)[0], 16)
    finally:
        stack.close()


def test_tokens_of_a_hit_are_those_of_the_longest_group() -> None:
    """The engine's first group may have a window, of which a hit loads the end only: 1,376 counted of 3,520 tokens."""
    engine = EngineSpec("model", "float32", (GroupSpec(TOKENS, (PAGE,)), GroupSpec(TOKENS, (PAGE,))), TOKENS)
    stack = open_staged_stack({"host": {"capacity": 8 * SLOT_BYTES}}, engine)
    worker = open_worker(pickle.loads(pickle.dumps(stack.worker_setup(0))))
    try:
        worker.register_kv_caches([[np.zeros((BLOCKS, PAGE), np.uint8)] for _ in range(2)])
        chunks = [keys(3)[2], *keys(3, group=1)]
        granted = stack.prepare_store("writer", [(key, 3 * TOKENS) for key in chunks])
        assert granted is not None
        stored = granted.transfer
        assert stored.groups == (0, 1, 1, 1)
        worker.start(
            TransferJob(
                job_id=stored.number, request_id=NO_REQUEST, is_store=True, keys=stored.keys, slots=stored.slots,
                chunk_groups=stored.groups, block_ids=(3, 1, 2, 3), group_sizes=(1, 3), block_indices=(0, 0),
            )
        )  # fmt: skip
        worker.wait([stored.number])
        assert not worker.get_finished().failed_keys
        worker.mark_ended(stored.number)
        stack.complete_store(stored.keys)
        assert {stack.lookup("reader", key, 3 * TOKENS) for key in chunks} == {HIT}
        worker.mark_ended(stack.prepare_load("reader", chunks).number)
        stack.complete_load("reader", chunks)
        assert dict(stack.metrics.counters.tokens_loaded) == {"host": 3 * TOKENS}
    finally:
        worker.close()
        stack.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"store": {"plan": "lazy"}},
        {"store": {"policy": "request_level"}},
        {"record": {"path": "x.jsonl"}},
        {"events": {"self_describing": True}},
        {"record": {"path": "x.jsonl", "spans": "program"}, "store": {"plan": "lazy"}},
    ],
)
def test_settings_of_the_scheduler_are_refused_by_name(changes: dict[str, Any]) -> None:
    """A setting must not be ignored silently: the error names every key, and a remedy."""
    with pytest.raises(ConfigError, match="Leave it out, or connect") as refused, opened(**changes):
        pass
    keys = {f"{section}.{key}" for section, settings in changes.items() for key in settings}
    assert set(str(refused.value).partition(":")[0].split(", ")) == keys
