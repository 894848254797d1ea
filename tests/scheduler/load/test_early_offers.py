"""Hits that are offered while their last chunks are being read: the first ones are copied meanwhile.

The engine of the bed looks at every byte that it computes from, so a block that is used before it was filled is found.
"""

from __future__ import annotations

import pytest
from core_bed import Bed
from group_parts import full, window
from simulation.engine.engine import EngineBehaviour
from stream_parts import FAILURES, arrive, computed, finish, stream_bed, streams, turn

from tierkv.manager.passages.passage import FRONT_CHUNKS_MIN
from tierkv.scheduler.lookup.first_segment import EARLY_S
from tierkv.types.tier_ops import OutcomeKind

CHUNKS = 64
"""Of a prompt; the disk of the bed reads four in an operation."""
HALF = CHUNKS // 8
"""Operations that read half of them."""


def read(bed: Bed, count: int, kind: OutcomeKind | None = None) -> None:
    """End the oldest reads under way, and take a step. kind: fault of their first key; None: they end well."""
    for op_id in sorted(bed.tiers.pending)[:count]:
        bed.tiers.complete(op_id, [kind])
    turn(bed, io=False, transfers=False)


def half_read(**changes: object) -> Bed:
    """A prompt that is alone, and half of whose chunks have been read, from the front."""
    bed = stream_bed(2 * CHUNKS, **changes)
    arrive(bed, CHUNKS)
    turn(bed, io=False, transfers=False)
    read(bed, HALF - 1)
    assert not bed.engine.loading
    read(bed, 1)
    return bed


def half_arrived() -> Bed:
    """The same before the next step, in which it would be offered."""
    bed = stream_bed(2 * CHUNKS)
    arrive(bed, CHUNKS)
    turn(bed, io=False, transfers=False)
    for op_id in sorted(bed.tiers.pending)[:HALF]:
        bed.tiers.complete(op_id)
    return bed


def jobs_sent(bed: Bed) -> list[int]:
    """Number of chunks of each load job under way."""
    return [len(job.keys) for job in bed.worker.running.values() if not job.is_store]


def test_the_front_is_copied_while_the_rest_is_read() -> None:
    """The engine waits for the copy of the last chunks only. Every chunk is read and copied once."""
    bed = half_read()
    assert len(bed.tiers.pending) == HALF
    assert jobs_sent(bed) == [CHUNKS // 2]
    for count in (HALF // 2, HALF // 2):
        bed.run_transfers()
        turn(bed, io=False, transfers=False)
        assert jobs_sent(bed) == []
        read(bed, count)
        assert jobs_sent(bed) == [CHUNKS // 4]
    finish(bed)
    assert bed.core.counters.tokens_loaded == {"disk": 4 * CHUNKS}
    assert set(bed.tiers.reads.values()) == {1}
    assert computed(bed) == 1
    assert (bed.core.counters.loads_streamed, bed.core.counters.deadlines_expired) == (1, 0)


def test_the_rest_does_not_wait_for_the_copy_of_the_front() -> None:
    """Once all of it has arrived, it is the last job beside the first."""
    bed = half_read()
    read(bed, HALF - 1)
    assert jobs_sent(bed) == [CHUNKS // 2]  # with chunks to come, one more job would not be the last
    read(bed, 1)
    assert jobs_sent(bed) == [CHUNKS // 2, CHUNKS // 2]
    assert not bed.tiers.pending
    finish(bed)
    assert bed.core.counters.tokens_loaded == {"disk": 4 * CHUNKS}
    assert computed(bed) == 1


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["in order", "the rest first"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_that_fails_beside_the_other(order: list[int], failing: int) -> None:
    """Whichever job ends first, the engine computes from the first chunk that failed."""
    bed = half_read()
    read(bed, HALF)
    jobs = sorted(bed.worker.running)
    assert jobs_sent(bed) == [CHUNKS // 2, CHUNKS // 2]
    for number in order:
        bed.worker.run(jobs[number], [False, False, number == failing])
        turn(bed, io=False, transfers=False)
    finish(bed)
    assert computed(bed) == 4 * (CHUNKS - failing * CHUNKS // 2 - 2) + 1


@pytest.mark.parametrize("how", ["abort", "reset"])
@pytest.mark.parametrize("first", [0, 1])
def test_an_end_while_both_are_copied(how: str, first: int) -> None:
    """Whichever ends first, nothing leaks, and a reset voids all of it."""
    bed = half_read()
    read(bed, HALF)
    jobs = sorted(bed.worker.running)
    if how == "abort":
        bed.engine.abort(bed.engine.sequences[0])
    else:
        bed.reset()
    bed.worker.run(jobs.pop(first))
    turn(bed, io=False, transfers=False)
    finish(bed)
    if how == "reset":
        assert computed(bed) == 4 * CHUNKS + 1


def test_chunks_that_arrive_out_of_order_wait_for_the_front() -> None:
    """The second half is here first: nothing can be copied ahead of the first chunk."""
    bed = stream_bed(2 * CHUNKS)
    arrive(bed, CHUNKS)
    turn(bed, io=False, transfers=False)
    for op_id in sorted(bed.tiers.pending)[1:]:
        bed.tiers.complete(op_id)
    turn(bed, io=False, transfers=False)
    assert not bed.engine.loading
    finish(bed)
    assert bed.core.counters.loads_streamed == 0


@pytest.mark.parametrize("chunks", [FRONT_CHUNKS_MIN - 1, FRONT_CHUNKS_MIN, FRONT_CHUNKS_MIN + 4])
def test_a_few_chunks_are_one_job(chunks: int) -> None:
    """A job for a part of so few gains nothing."""
    bed = stream_bed(2 * CHUNKS)
    arrive(bed, chunks)
    turn(bed, io=False, transfers=False)
    while len(bed.tiers.pending) > 1:
        read(bed, 1)
        assert bool(bed.engine.loading) == (chunks > FRONT_CHUNKS_MIN and len(bed.tiers.pending) == 1)
    finish(bed)
    assert bed.core.counters.tokens_loaded == {"disk": 4 * chunks}


def test_beside_another_request_all_chunks_are_awaited() -> None:
    """Blocks that wait for a tier would be missing for the other one, whose reads these copies overlap with anyway."""
    bed = stream_bed(4 * CHUNKS)
    arrive(bed, CHUNKS, 0)
    arrive(bed, CHUNKS, 1)
    turn(bed, io=False, transfers=False)
    read(bed, 2 * HALF - 1)
    assert not bed.engine.loading
    finish(bed)


@pytest.mark.parametrize("groups", [(full(4), window(4, 8)), (full(4), full(4))], ids=["window", "two groups"])
def test_other_layouts_await_all_chunks(groups: tuple[object, ...]) -> None:
    """One lost chunk of a window costs the whole hit, and several groups are copied in another order."""
    bed = stream_bed(8 * CHUNKS, groups=groups)
    arrive(bed, CHUNKS)
    turn(bed, io=False, transfers=False)
    while len(bed.tiers.pending) > 1:
        read(bed, 1)
        assert not bed.engine.loading
    finish(bed)
    assert bed.core.counters.loads_streamed == 0


def test_blocks_do_not_wait_for_a_slow_tier() -> None:
    """A slow tier would hold GPU blocks for as long as it reads, and the copy takes a small part of that."""
    bed = stream_bed(2 * CHUNKS)
    arrive(bed, CHUNKS)
    turn(bed, io=False, transfers=False)
    turn(bed, io=False, transfers=False, seconds=EARLY_S)
    read(bed, 2 * HALF - 1)
    assert not bed.engine.loading
    finish(bed)


@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: kind.value)
@pytest.mark.parametrize("between", [False, True], ids=["while it is copied", "before the copy"])
def test_a_chunk_that_is_lost_after_the_offer(kind: OutcomeKind, between: bool) -> None:
    """The engine computes from there: the chunks before it count, those behind it do not."""
    bed = half_arrived() if between else half_read()
    if between:
        bed.step(EngineBehaviour(budget=100_000, refuses_first=True))
    read(bed, 1, kind)
    finish(bed)
    assert computed(bed) == 4 * CHUNKS // 2 + 1
    assert bed.core.counters.deadlines_expired == 0


def test_a_tier_that_hangs_after_the_offer() -> None:
    """After the deadline the stream is cut, and the engine computes the second half."""
    bed = half_read(deadline_s=0.5)
    bed.run_transfers()
    for _ in range(100):
        turn(bed, io=False)
    assert not streams(bed)
    assert bed.core.counters.loads_given_up == 1
    assert computed(bed) == 4 * CHUNKS // 2 + 1
    finish(bed)


def test_chunks_that_arrive_before_the_engine_has_blocks_is_one_job() -> None:
    """The engine has been offered half of it, and allocates when all has arrived."""
    bed = half_arrived()
    bed.step(EngineBehaviour(budget=100_000, refuses_first=True))
    assert bed.offers == 1
    assert not bed.engine.loading
    bed.run_io()
    turn(bed, io=False, transfers=False)
    assert jobs_sent(bed) == [CHUNKS]
    finish(bed)
    assert bed.core.counters.loads_streamed == 0


@pytest.mark.parametrize("accepts", [0.25, 0.75])
def test_an_engine_that_takes_less(accepts: float) -> None:
    """A part of the offer: what it does not take is given back, also what is still being read."""
    bed = half_arrived()
    bed.step(EngineBehaviour(budget=100_000, accepts=accepts))
    bed.check()
    assert bed.engine.loading
    finish(bed)
    assert sum(bed.core.counters.tokens_loaded.values()) == 4 * CHUNKS * accepts


@pytest.mark.parametrize("how", ["abort", "reset"])
@pytest.mark.parametrize("copied", [False, True])
def test_an_end_while_the_rest_is_read(how: str, copied: bool) -> None:
    """Nothing leaks, and a reset voids what was copied."""
    bed = half_read()
    if copied:
        bed.run_transfers()
    if how == "abort":
        bed.engine.abort(bed.engine.sequences[0])
    else:
        bed.reset()
    turn(bed, io=False)
    finish(bed)
