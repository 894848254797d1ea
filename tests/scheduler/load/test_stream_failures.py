"""Failures while a load streams: arrived chunks are used, and no request waits for lost ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_blocks import blocks
from core_parts import Core, disk, make_core
from core_truth import BedRequest
from group_parts import full, window
from stream_parts import (
    ALL,
    FAILURES,
    arrive,
    computed,
    finish,
    lose,
    stream_bed,
    turn,
    until,
    until_stream,
)

from tierkv.scheduler.load.stream_state import StreamState
from tierkv.types.engine import StepOutput
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, Verb
from tierkv.types.transfers import VOID_SLOT, TransferJob


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("chunk", [9, 40, 99])
def test_a_chunk_that_fails_below(chunk: int, kind: OutcomeKind) -> None:
    """Chunk k fails in the tier: the engine gets the chunks before it, and computes from there.

    Only reads already in flight continue behind it.
    """
    bed = stream_bed(8)
    request = arrive(bed, 100)
    keys = bed.core.truth.keys(request)
    while bed.engine.sequences:
        bed.step(ALL)
        bed.check()
        for op in list(bed.tiers.pending.values()):
            bed.tiers.complete(op.op_id, lose(op.keys, keys[chunk], kind))
        bed.run_transfers()
    assert bed.core.counters.tokens_loaded == {"disk": 4 * chunk}
    assert bed.core.counters.tokens_given_up == 400 - 4 * chunk
    assert bed.core.counters.loads_given_up == 1
    assert computed(bed) == bed.core.counters.tokens_computed == 401 - 4 * chunk
    assert set(bed.tiers.reads) <= set(keys[: chunk + 4])
    assert set(bed.tiers.reads.values()) == {1}
    bed.settle()
    bed.check_end()
    assert 0 < bed.core.counters.chunks_stored <= 100 - chunk, "what was computed is stored again, and nothing else"


def test_a_chunk_that_fails_in_one_tier_is_had_from_another() -> None:
    """As in every lookup: a bad frame on the disk costs nothing while a bucket has the chunk."""
    bed = stream_bed(8, tiers=(disk(write="read_only"), disk(write="read_only", name="second")))
    request = arrive(bed, 40)
    bed.fill_below(request, 1)
    bad = bed.core.truth.keys(request)[21]
    while bed.engine.sequences:
        bed.step(ALL)
        bed.check()
        for op in list(bed.tiers.pending.values()):
            kind = OutcomeKind.CORRUPT if op.tier == 0 and op.verb is Verb.READ else None
            bed.tiers.complete(op.op_id, [kind if key == bad else None for key in op.keys])
        bed.run_transfers()
    assert bed.core.counters.tokens_loaded == {"disk": 156, "second": 4}
    assert bed.core.counters.loads_given_up == 0
    bed.settle()
    bed.check_end()


def cut_stream(core: Core, request: BedRequest, lost: Sequence[Key]) -> TransferJob:
    """Lose chunks of the third segment of a stream: ten chunks, four slots. Returns its last job."""
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request)
    tables = [blocks(range(1 + 50 * group, 12 + 50 * group)) for group in range(len(core.geometry.groups))]
    for group, table in zip(core.geometry.groups, tables, strict=True):
        if group.window_chunks is not None:
            table[: 10 - group.window_chunks] = blocks([0] * (10 - group.window_chunks))
    core.scheduler.update_state_after_alloc(request, tables, 40)
    jobs = list(core.scheduler.build_connector_meta(StepOutput()).loads)
    while not jobs[-1].ends_load:
        for op in core.manager.take_ops():
            core.finish(op, [OutcomeKind.FAILED if key in lost else OutcomeKind.OK for key in op.keys])
        assert not core.report(jobs[-1].job_id).finished
        core.begin(core.now)
        jobs += core.scheduler.build_connector_meta(StepOutput()).loads
        core.scheduler.validate()
    return jobs[-1]


def test_the_last_job_names_what_does_not_come() -> None:
    """A job with an arrived front of the segment and void slots for the rest: its end alone is the load's end."""
    core = make_core(slots=8, reserved=4, tiers=[disk(write="read_only")])
    request = core.arrive(41)
    keys = core.truth.keys(request)
    core.keep_below(keys)
    job = cut_stream(core, request, [keys[5]])
    assert job.keys == tuple(keys[4:])
    assert [ref == VOID_SLOT for ref in job.slots] == [False, *[True] * 5]
    assert job.block_ids == tuple(range(5, 11))
    report = core.report(job.job_id)  # as from a worker that says nothing of what it did not get
    assert report.finished == {"a"}
    assert report.invalid_block_ids == set(range(6, 11))


def test_with_windows_nothing_more_is_copied() -> None:
    """With windows the chunks before the lost one are useless: the last job is void, all blocks are invalid."""
    core = make_core(groups=[full(), window(8)], slots=12, reserved=8, tiers=[disk(write="read_only")])
    request = core.arrive(41)
    prefix, recent = core.truth.keys(request, 0), core.truth.keys(request, 1)
    core.keep_below([*prefix, *recent])
    job = cut_stream(core, request, [prefix[7]])
    assert job.keys == tuple(prefix[6:])
    assert set(job.slots) == {VOID_SLOT}
    report = core.report(job.job_id)
    assert report.invalid_block_ids == {*range(1, 11), 59, 60}


def test_the_blocks_of_an_aborted_stream_are_not_invalid() -> None:
    """They may belong to another request when the load ends: it is reported as ended, with no invalid block."""
    core = make_core(slots=8, reserved=4, tiers=[disk(write="read_only")])
    request = core.arrive(41)
    keys = core.truth.keys(request)
    core.keep_below(keys)
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 40
    core.scheduler.update_state_after_alloc(request, [blocks(range(1, 12))], 40)
    (segment,) = core.scheduler.build_connector_meta(StepOutput()).loads
    core.scheduler.request_finished(request, [[]])
    core.report(segment.job_id)
    (last,) = core.scheduler.build_connector_meta(StepOutput()).loads
    assert set(last.slots) == {VOID_SLOT}
    report = core.report(last.job_id, failed={last.job_id: frozenset(last.keys)})
    assert (report.finished, report.invalid_block_ids) == ({"a"}, frozenset())
    core.scheduler.validate()
    assert not core.scheduler.has_pending_work


def test_a_request_for_a_later_segment_waits_too() -> None:
    """S49: a second request with the front on the GPU wants only the last chunks of the stream, and waits."""
    core = make_core(slots=8, reserved=4, tiers=[disk(write="read_only")])
    first, second = core.arrive(41, "first"), core.arrive(41, "second")
    core.keep_below(core.truth.keys(first))
    assert core.ask(first) is None
    core.finish_all()
    assert core.ask(first) == 40
    core.scheduler.update_state_after_alloc(first, [blocks(range(1, 12))], 40)
    core.finish_all()
    assert core.ask(second, computed=32) is None
    core.finish_all()
    assert core.ask(second, computed=32) is None, "its two chunks are in the host tier, and are being loaded"


def test_groups_pass_side_by_side() -> None:
    """A segment has the chunks that end next, over all groups: otherwise a cut would keep a front of one group only."""
    bed = stream_bed(16, block_tokens=(4, 4))
    arrive(bed, 40)
    segments = 0
    while bed.engine.waiting or bed.engine.loading:
        bed.step(ALL)
        for job in bed.worker.running.values():
            assert job.group_sizes[0] == job.group_sizes[1]
            segments += 1
        bed.run_io()
        bed.run_transfers()
    assert segments >= 10


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("to_come", [1000, 20])
def test_a_chunk_that_fails_on_its_way_to_the_gpu(at: int, to_come: int) -> None:
    """A worker refuses a chunk of a segment: the rest of the stream is given up, the engine computes from there."""
    bed = stream_bed(8)
    arrive(bed, 100)
    stream = until_stream(bed, StreamState.COPYING, to_come)
    (job_id,) = stream.jobs
    job = bed.worker.running[job_id]
    first = stream.plan.keys.index(job.keys[0])
    bed.worker.run(job_id, [i == at for i in range(4)])
    reads = len(bed.tiers.reads)
    finish(bed)
    assert computed(bed) == 401 - 4 * (first + at)
    assert bed.core.counters.loads_failed == 1
    assert len(bed.tiers.reads) <= reads + 4, "what was being read, and no more"
    assert bed.core.counters.loads_given_up == 1


def test_a_late_chunk_that_fails_does_not_cost_what_is_before_it() -> None:
    """Chunks in the host tier are sent first. If one of them is corrupt, pending chunks before it are still loaded."""
    bed = stream_bed(16)
    request = arrive(bed, 30)
    keys = bed.core.truth.keys(request)
    bed.core.put(keys[10:20])
    for key in keys[10:20]:
        chunk = bed.core.host.slots.get(key)
        assert chunk is not None
        bed.memory[chunk.slot] = bed.core.truth.payloads[key]
    bed.step(ALL)
    (job,) = bed.worker.running.values()
    assert job.keys == tuple(keys[10:20])
    bed.worker.run(job.job_id, [False] * 6 + [True])
    finish(bed)
    assert computed(bed) == 121 - 4 * 16
    assert set(bed.tiers.reads) <= set(keys[:10])


def test_a_tier_hangs_in_the_middle() -> None:
    """No read ends any more: after the deadline, counted from the last arrival, the stream ends.

    The engine computes the rest. The hung reads keep their slots, and nothing else.
    """
    bed = stream_bed(8)
    arrive(bed, 100)
    until_stream(bed, StreamState.GATHERING, 60)
    reads = len(bed.tiers.reads)
    began = bed.core.now
    while bed.engine.sequences:
        turn(bed, io=False, seconds=0.1)
    assert bed.core.now - began < bed.spec.deadline_s + 1.0
    assert len(bed.tiers.reads) == reads
    assert bed.core.counters.tokens_loaded["disk"] == 4 * reads
    assert computed(bed) == 401 - 4 * reads
    bed.settle()
    bed.check_end()


def test_a_slow_tier_is_waited_for_while_chunks_come() -> None:
    """Single arrivals are progress: a stream, or one segment of it, may take far longer than the deadline."""
    bed = stream_bed(8, tiers=tuple(disk(write="read_only", name=f"disk{i}") for i in range(4)))
    request = arrive(bed, 20, below=False)
    for tier in range(4):
        bed.fill_below(request, tier, range(tier, 20, 4))
    until(bed, lambda: bool(bed.engine.loading))
    while bed.engine.sequences:
        for op_id in list(bed.tiers.pending)[:1]:
            bed.tiers.complete(op_id)
        turn(bed, io=False, seconds=4.0)
    assert bed.core.counters.tokens_loaded.total() == 80
    assert bed.core.counters.loads_given_up == 0


def test_waiting_for_a_turn_is_not_hanging() -> None:
    """A fifth stream waits for slots behind four others for longer than the deadline.

    It is not cut while the others make progress.
    """
    bed = stream_bed(2, deadline_s=2.0)
    for family in range(5):
        arrive(bed, 40, family)
    until(bed, lambda: len(bed.engine.loading) == 5)
    while bed.engine.sequences:
        for op_id in list(bed.tiers.pending)[:1]:
            bed.tiers.complete(op_id)
        turn(bed, io=False, seconds=0.9)
    assert bed.core.counters.loads_given_up == 0
    assert bed.core.counters.tokens_loaded == {"disk": 5 * 160}


def test_late_completions() -> None:
    """A read misses its deadline and ends later: its chunk is lost for the stream, its slot not reused before."""
    bed = stream_bed(8)
    request = arrive(bed, 100)
    until_stream(bed, StreamState.GATHERING, 60)
    bed.step(ALL)
    (op_id,) = [op.op_id for op in bed.tiers.pending.values() if op.verb is Verb.READ]
    lost = bed.core.truth.keys(request).index(bed.tiers.pending[op_id].keys[0])
    bed.tiers.announce_late(op_id)
    while bed.engine.sequences:
        turn(bed, io=False)
    assert computed(bed) == 401 - 4 * lost
    bed.tiers.complete(op_id)
    bed.settle()
    bed.check_end()


@pytest.mark.parametrize("state", [StreamState.GATHERING, StreamState.COPYING])
def test_a_tier_that_is_detached(state: StreamState) -> None:
    """The tier is detached during a stream: reads in flight still count, the rest is computed."""
    bed = stream_bed(8)
    arrive(bed, 100)
    stream = until_stream(bed, state, 60)
    had = 100 - stream.num_pending
    bed.core.manager.detach("disk")
    while bed.engine.sequences:
        turn(bed)
    assert computed(bed) in range(401 - 4 * (had + 8), 401 - 4 * had + 1)
    assert bed.core.counters.loads_given_up == 1
    assert not bed.core.manager.passages.owners
    assert not bed.worker.open_loads


@pytest.mark.parametrize("state", [StreamState.GATHERING, StreamState.COPYING, StreamState.ENDING])
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_abort_in_each_state(state: StreamState, holds: bool, alone: bool) -> None:
    """The request ends while its load streams: nothing more is read, and the end is reported once.

    Its blocks are not overwritten before jobs in flight have ended, and nothing leaks.
    """
    bed = stream_bed(8, holds_finished=holds, gpu_blocks=120)
    request = arrive(bed, 100)
    stream = until_stream(bed, state)
    if not alone:
        arrive(bed, 40, 1)
    reads = sum(bed.tiers.reads.values()) + sum(len(op.keys) for op in bed.tiers.pending.values())
    keys = set(stream.plan.keys)
    (sequence,) = bed.engine.loading.values()
    assert sequence.request is request
    bed.engine.abort(sequence)
    assert bed.core.scheduler.has_pending_work
    reported = 0
    for _ in range(200):
        orphans = len(bed.engine.orphans)
        turn(bed)
        reported += orphans - len(bed.engine.orphans)
        if not bed.engine.sequences and not bed.core.scheduler.has_pending_work:
            break
    assert reported == 1
    assert sum(count for key, count in bed.tiers.reads.items() if key in keys) <= reads
    bed.settle()
    bed.check_end()


def test_the_last_request_is_aborted_and_no_step_may_follow() -> None:
    """S81: with no request left, jobs in flight are flushed.

    The job that ends the load is in the same instructions, behind them.
    """
    bed = stream_bed(8)
    arrive(bed, 100)
    stream = until_stream(bed, StreamState.COPYING)
    (segment,) = stream.jobs
    (sequence,) = bed.engine.loading.values()
    bed.engine.abort(sequence)
    bed.step(ALL)
    bed.check()
    assert not bed.worker.open_loads
    assert not bed.worker.running
    assert not bed.engine.orphans
    assert segment not in bed.core.scheduler._jobs.live_ids()
    bed.settle()
    bed.check_end()


@pytest.mark.parametrize("state", [StreamState.GATHERING, StreamState.COPYING, StreamState.ENDING])
def test_a_reset_in_the_middle(state: StreamState) -> None:
    """After a reset nothing loaded before counts, not even by jobs that had ended.

    The engine computes all of it, and nothing more is read for the load.
    """
    bed = stream_bed(8)
    request = arrive(bed, 100)
    until_stream(bed, state, 60)
    reads = len(bed.tiers.reads) + sum(len(op.keys) for op in bed.tiers.pending.values() if op.verb is Verb.READ)
    bed.reset()
    before = computed(bed)
    until(bed, lambda: not bed.engine.loading)
    assert len(bed.tiers.reads) <= reads
    finish(bed)
    assert computed(bed, before) == 401
    assert bed.core.scheduler.request_account(request.request_id) is not None
