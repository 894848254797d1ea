"""Reads from a tier wait for room in its queue, short loads first."""

from __future__ import annotations

from dataclasses import replace

from core_parts import disk, make_core

from tierkv.manager.lower.read_speed import READINGS_MIN, magnitude
from tierkv.manager.moves.tier_reads import FRONT_CHUNKS, TierReads, turns
from tierkv.types.keys import make_keys
from tierkv.types.tier_ops import OutcomeKind, Verb

CHUNK = 100


def put(reads: TierReads, first: int, count: int, chunks: int) -> None:
    """Add ``count`` chunks of a load of ``chunks``."""
    reads.put(range(first, first + count), magnitude(chunks), count * CHUNK, 0.0)


def slots(taken: list[tuple[object, int]]) -> list[list[int]]:
    """Slots of the reads that were taken."""
    return [list(batch) for batch, _ in taken]  # type: ignore[call-overload]  # sequences of slots


def test_short_loads_are_issued_first() -> None:
    """Whatever the order in which they were asked for. Loads of about one length share reads, in their order."""
    reads = TierReads(100)
    put(reads, 0, 8, 200)
    put(reads, 10, 2, 2)
    put(reads, 20, 2, 3)
    taken = reads.take(4)
    assert slots(taken) == [[10, 11, 20, 21], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert [chunks for _, chunks in taken] == [3, 255, 255]
    assert not reads


def test_no_more_reads_than_the_queue_takes() -> None:
    """Dispatch would refuse them, and their chunks would be misses: these wait until others have ended."""
    reads = TierReads(3)
    put(reads, 0, 10, 10)
    taken = reads.take(2)
    assert slots(taken) == [[0, 1], [2, 3], [4, 5]]
    assert len(reads) == 4
    assert reads.take(2) == []
    put(reads, 50, 1, 1)
    reads.ended(2 * CHUNK, 15)
    assert slots(reads.take(2)) == [[50]]
    reads.ended(2 * CHUNK, 15)
    reads.ended(2 * CHUNK, 15)
    assert slots(reads.take(2)) == [[6, 7], [8, 9]]
    assert reads.speed.promised_bytes == 5 * CHUNK


def test_a_tier_out_of_service_gets_all_in_a_few_steps() -> None:
    """Dispatch refuses them at once, so that no request waits for a tier that is gone: a step's keys in each step."""
    reads = TierReads(1)
    put(reads, 0, 8, 8)
    put(reads, 10, 2, 2)
    assert slots(reads.take(2, refused_max=5)) == [[10, 11], [0, 1]]
    assert slots(reads.take(2, refused_max=5)) == [[2, 3], [4, 5]]
    assert slots(reads.take(2, refused_max=1)) == [[6, 7]]
    assert not reads


def test_a_read_says_how_much_its_request_lacks() -> None:
    """Also one for the rest of a load, whose first chunks were granted in an earlier step: it stays a long load."""
    core = make_core(slots=64, tiers=[disk(write="read_only")])
    long, short = (make_keys([bytes([first + i]) * 8 for i in range(count)], 0) for first, count in ((0, 40), (100, 2)))
    core.keep_below([*long, *short])
    passages = core.manager.passages
    passages.account.chunks_max = 30
    passages.reserve("long", tuple(long))
    (first, *_) = core.manager.take_ops()
    assert first.turn_chunks == 63
    passages.account.chunks_max = 64
    core.begin()
    passages.reserve("short", tuple(short))
    ops = core.manager.take_ops()
    assert [(op.turn_chunks, op.keys[0]) for op in ops[:2]] == [(3, short[0]), (63, long[30])]


def test_the_front_of_a_long_load_does_not_wait_for_its_length() -> None:
    """Short requests may share it. The rest has the turn of the whole length, so equal loads stay in their order."""
    assert list(turns(12, 0, 12)) == [(range(12), 4)]
    assert list(turns(FRONT_CHUNKS, 0, FRONT_CHUNKS)) == [(range(FRONT_CHUNKS), 8)]
    assert list(turns(8192, 0, 8192)) == [(range(255), 8), (range(255, 8192), 14)]
    assert list(turns(300, 200, 8192)) == [(range(55), 8), (range(55, 300), 14)], "granted in a later step"
    assert list(turns(300, 255, 8192)) == [(range(300), 14)]


def test_a_request_that_shares_the_beginning_of_a_long_one_waits_for_no_more() -> None:
    """The beginning of the second long load is read before the rest of the first one."""
    core = make_core(slots=1024, tiers=[disk(write="read_only")])
    passages = core.manager.passages
    passages.account.chunks_max = 1024
    first, second = (make_keys([bytes([at, i // 256, i % 256]) * 8 for i in range(400)], 0) for at in (1, 2))
    core.keep_below([*first, *second])
    for _ in range(READINGS_MIN):
        core.manager._tier_io.reads[0].speed.measured(CHUNK, 0.001)  # otherwise few are read at once
    passages.reserve("first", tuple(first))
    passages.reserve("second", tuple(second))
    order = [key for op in core.manager.take_ops() for key in op.keys]
    assert order.index(second[0]) < order.index(first[FRONT_CHUNKS])


def test_a_tier_that_leaves_keeps_no_slot() -> None:
    """The reads that waited are issued at once, and refused: a tier is forgotten when its operations have ended."""
    one = disk(write="read_only")
    core = make_core(slots=64, tiers=[replace(one, limits=replace(one.limits, reads_max=1))])
    keys = make_keys([bytes([i]) * 8 for i in range(12)], 0)
    core.keep_below(keys)
    core.manager.passages.reserve("a", tuple(keys))
    reads = core.manager.take_ops()
    assert len(reads) == 1
    index = core.manager.detach("disk")
    reads += core.manager.take_ops()
    assert sum(len(op.keys) for op in reads) == 12
    for op in reads:
        core.finish(op, OutcomeKind.REFUSED)
    core.manager.passages.release("a")
    core.begin()
    core.manager.forget(index)
    assert core.manager.host_is_idle


def test_a_reset_ends_the_reads_that_wait() -> None:
    """Their chunks are from before it: nothing is read for them any more, and their slots are free."""
    one = disk()
    core = make_core(slots=64, tiers=[replace(one, limits=replace(one.limits, reads_max=1))])
    keys = make_keys([bytes([i]) * 8 for i in range(12)], 0)
    core.keep_below(keys)
    core.manager.passages.reserve("a", tuple(keys))
    (read,) = core.manager.take_ops()
    core.manager.reset_cache("all")
    core.finish(read)
    for _ in range(3):
        core.begin()
        assert not [op for op in core.manager.take_ops() if op.verb is Verb.READ]
    reads = core.manager._tier_io.reads[0]
    assert (len(reads), reads._in_flight, reads.speed.promised_bytes) == (0, 0, 0)
    assert core.manager.host_is_idle
