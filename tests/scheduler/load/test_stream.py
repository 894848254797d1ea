"""Loads that stream: a prefix of any length passes a host tier of any size, segment by segment, each chunk read once.

The engine of the bed looks at every byte that it computes from, its worker at the order of a load's jobs.
"""

from __future__ import annotations

import pytest
from core_blocks import blocks
from core_parts import TierSpec, disk, make_core, objects
from group_parts import full, window
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.engine.engine import EngineBehaviour
from stream_parts import (
    ALL,
    FAILURES,
    arrive,
    computed,
    finish,
    lose,
    stream_bed,
    the_stream,
    turn,
    until,
    until_stream,
)

from tierkv.errors import IllegalTransitionError
from tierkv.manager.lower.read_speed import READINGS_MIN
from tierkv.scheduler.load.stream_state import STREAM_STATES, STREAM_TRANSITIONS, StreamEvent, StreamState
from tierkv.scheduler.requests.observations import sources_of_hit
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.types.engine import StepOutput
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, Verb
from tierkv.types.transfers import VOID_SLOT

# -- any length through any size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [64, 8, 3, 2, 1])
@pytest.mark.parametrize("tier", [disk(write="read_only"), objects(write="read_only")], ids=["disk", "objects"])
def test_g1_a_hundred_chunks_pass(slots: int, tier: TierSpec) -> None:
    """G1, the livelock of vLLM 0.33: 100 chunks through a host tier of 64 slots, of 8, and of one.

    Each chunk is loaded and read once, the engine computes one token, and no deadline passes.
    """
    bed = stream_bed(slots, tiers=(tier,))
    request = arrive(bed, 100)
    finish(bed)
    counters = bed.core.counters
    assert counters.tokens_loaded == {tier.name: 400}
    assert (counters.loads_streamed, counters.loads_given_up, counters.deadlines_expired) == (1, 0, 0)
    assert bed.tiers.reads == dict.fromkeys(bed.core.truth.keys(request), 1)
    assert computed(bed) == 1


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("slots", [64, 8, 3, 1])
def test_several_streams_at_once(count: int, slots: int) -> None:
    """Streams that share a host tier do not block each other, and read no chunk twice."""
    bed = stream_bed(slots, deadline_s=50.0)
    for family in range(count):
        arrive(bed, 70, family)
    finish(bed, 3000)
    assert bed.core.counters.tokens_loaded == {"disk": count * 280}
    assert bed.core.counters.loads_streamed == count
    assert bed.core.counters.loads_given_up == 0
    assert len(bed.tiers.reads) == count * 70
    assert set(bed.tiers.reads.values()) == {1}


@pytest.mark.parametrize("count", [1, 3, 6])
def test_streams_from_a_tier_whose_answers_are_soon_forgotten(count: int) -> None:
    """A search that waited for a tier is repeated before its stream begins: once, not for ever."""
    bed = stream_bed(8, tiers=(objects(write="read_only", probe_keys_max=2, presence_keys_max=4),), deadline_s=50.0)
    for family in range(count):
        arrive(bed, 24, family)
    finish(bed, 3000)
    assert sum(bed.core.counters.tokens_loaded.values()) == count * 96


def test_small_hits_do_not_wait_for_a_long_stream() -> None:
    """Fairness: while a thousand chunks stream, requests with two chunks each are answered within a few steps."""
    bed = stream_bed(8)
    arrive(bed, 1000, 0)
    until(bed, lambda: bool(bed.engine.loading))
    for family in range(1, 6):
        arrive(bed, 2, family)
        steps = until(bed, lambda: not bed.engine.waiting)
        assert steps <= 4
        assert the_stream(bed).num_pending > 500
    finish(bed, 2000)
    assert bed.core.counters.tokens_loaded == {"disk": 4040}


def test_what_was_offered_waits_for_blocks_and_the_stream_for_slots() -> None:
    """An offered hit holds slots until the GPU has blocks; a stream holds blocks until it gets slots.

    Half of the slots are reserved for streams, so this resolves without any deadline.
    """
    bed = stream_bed(8, gpu_blocks=104)
    arrive(bed, 100, 0)
    until(bed, lambda: bool(bed.engine.loading))
    for family in range(1, 4):
        arrive(bed, 4, family)
    finish(bed)
    assert bed.core.counters.loads_given_up == 0
    assert bed.core.counters.deadlines_expired == 0


def test_what_fits_is_loaded_by_one_job() -> None:
    """A hit up to the bound is loaded by one job, which ends the load."""
    bed = stream_bed(8)
    arrive(bed, 8)
    turn(bed)
    bed.step(ALL)
    (job,) = bed.worker.running.values()
    assert (len(job.keys), job.ends_load) == (8, True)
    finish(bed)
    assert bed.core.counters.loads_streamed == 0


def test_segments_follow_each_other() -> None:
    """The first segment is half of the slots that may be reserved; the next one is read while it is copied.

    It is sent when the copy has ended, and the last job is marked. Between two segments the engine keeps stepping.
    """
    bed = stream_bed(8)
    request = arrive(bed, 10)
    keys = bed.core.truth.keys(request)
    turn(bed)
    sent: list[tuple[tuple[Key, ...], bool]] = []
    while bed.engine.waiting or bed.engine.loading:
        bed.step(ALL)
        sent += [(job.keys, job.ends_load) for job in bed.worker.running.values()]
        assert bed.core.scheduler.has_pending_work or not bed.engine.loading
        bed.run_io()
        bed.run_transfers()
    assert sent == [(tuple(keys[:4]), False), (tuple(keys[4:8]), False), (tuple(keys[8:]), True)]


def test_a_segment_is_sent_with_the_slots_that_there_are() -> None:
    """A hung tier keeps slots of reads in flight forever. A stream uses the one that is left."""
    bed = stream_bed(4, tiers=(disk(write="read_only"), disk(name="hung", queue=3)))
    arrive(bed, 40)
    while bed.engine.sequences:
        bed.step(ALL)
        bed.check()
        for op in [op for op in bed.tiers.pending.values() if op.verb is not Verb.WRITE]:
            bed.tiers.complete(op.op_id)
        bed.run_transfers()
    assert sum(len(op.keys) for op in bed.tiers.pending.values()) == 3
    assert bed.core.counters.tokens_loaded == {"disk": 160}
    assert bed.core.counters.loads_given_up == 0


# -- what is there already -------------------------------------------------------------------------------------------


def test_what_the_host_tier_has_goes_first() -> None:
    """A prefix that is loaded repeatedly: chunks in the host tier are loaded before later segments evict them.

    So only the rest is read. In the order of the prefix each chunk would be evicted just before its turn, every time.
    """
    bed = stream_bed(64, reserved=51)
    arrive(bed, 100)
    finish(bed)
    reads = dict(bed.tiers.reads)
    request = arrive(bed, 100)
    here = bed.core.ready() & set(bed.core.truth.keys(request))
    assert len(here) == 64
    finish(bed)
    again = {key for key, count in bed.tiers.reads.items() if count > reads.get(key, 0)}
    assert len(again) <= 100 - 51
    account = bed.core.scheduler.request_account(request.request_id)
    assert account is not None
    assert account.loaded_tokens["host"] >= 51 * 4


def test_a_hit_with_enough_in_the_host_tier_is_offered_at_once() -> None:
    """Half of the slots that may be reserved hold wanted chunks: no deferral, the rest is read during the copy."""
    core = make_core(slots=16, tiers=[disk(write="read_only")])
    request = core.arrive(121)
    keys = core.truth.keys(request)
    core.keep_below(keys)
    core.put(keys[5:13])
    assert core.ask(request) == 120
    assert core.manager.passages.granted("a").keys() == set(keys[5:13])


def test_two_with_one_prefix_wait_for_each_other() -> None:
    """S49 for all segments: a second request that wants any chunk of the stream waits for the load.

    It then finds the chunks on the GPU, and does not read them again.
    """
    bed = stream_bed(8, gpu_caching=True, deadline_s=500.0)
    arrive(bed, 40)
    until(bed, lambda: bool(bed.engine.loading))
    twin = arrive(bed, 40)
    finish(bed)
    assert set(bed.tiers.reads.values()) == {1}
    account = bed.core.scheduler.request_account(twin.request_id)
    assert account is not None
    assert account.local_tokens == 160


def test_the_account_counts_all_segments() -> None:
    """Tokens and bytes per tier add up over all jobs of a load, and so do those reported to policies."""
    bed = stream_bed(8, tiers=(disk(write="read_only"), objects(write="read_only")))
    request = arrive(bed, 30, below=False)
    bed.fill_below(request, 0, range(20))
    bed.fill_below(request, 1, range(20, 30))
    finish(bed)
    account = bed.core.scheduler.request_account(request.request_id)
    assert account is not None
    assert account.loaded_tokens == {"disk": 80, "objects": 40}
    assert account.loaded_bytes == {"disk": 320, "objects": 160}
    assert bed.core.counters.chunks_hit == {"disk": 20, "objects": 10}


def test_sources_of_a_hit_that_streams() -> None:
    """A policy's observation of the arrival counts every chunk of the hit, gathered or not."""
    core = make_core(slots=8, tiers=[disk(write="read_only"), disk(write="read_only", name="second")])
    request = core.arrive(81)
    keys = core.truth.keys(request)
    core.put(keys[:6])
    core.keep_below(keys[:12], 0)
    core.keep_below(keys[12:], 1)
    assert core.ask(request) == 80
    record = core.record(request)
    assert record.lookup.will_stream
    assert sources_of_hit(record, core.manager) == {"host": 6, "disk": 6, "second": 8}


def test_an_answer_of_a_shared_tier_need_not_be_fresh() -> None:
    """A stream may outlast the validity of a shared tier's answer: its chunks are read all the same."""
    bed = stream_bed(4, tiers=(objects(write="read_only"),))
    arrive(bed, 60)
    until(bed, lambda: bool(bed.engine.loading))
    until(bed, lambda: the_stream(bed).num_pending < 50)
    turn(bed, seconds=40.0)
    finish(bed)
    assert bed.core.counters.tokens_loaded == {"objects": 240}
    assert bed.core.counters.loads_given_up == 0


# -- what the engine and its users want ------------------------------------------------------------------------------


def test_hints_hold_for_streams() -> None:
    """Hints on the length of a hit and on tiers hold for all segments."""
    bed = stream_bed(4, tiers=(disk(write="read_only"), disk(write="read_only", name="second")))
    most = arrive(bed, 30, 0, tierkv={"max_load_tokens": 60})
    bed.fill_below(most, 1)
    second = arrive(bed, 30, 1, tierkv={"load_tiers": ["second"]})
    bed.fill_below(second, 1)
    finish(bed)
    accounts = [bed.core.scheduler.request_account(request.request_id) for request in (most, second)]
    assert [account and account.loaded_tokens for account in accounts] == [{"disk": 60}, {"second": 120}]


def test_a_slow_tier_is_judged_by_the_whole_length() -> None:
    """Load or recompute weighs the whole hit, not its first segment: 100 chunks take longer than computing them."""
    bed = stream_bed(8, prefill_tokens_per_s=1000.0)
    bed.tiers.elapsed_s[0] = 5.0
    arrive(bed, 4 * READINGS_MIN, 1)
    finish(bed)
    arrive(bed, 100, 0)
    finish(bed)
    assert bed.core.counters.hits_shortened == 1
    assert bed.core.counters.tokens_shortened > 300


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_stream_whose_tier_becomes_slower_than_computing_is_cut(shared: bool, windows: bool) -> None:
    """No chunk is late. What was read is kept, and the rest is computed; with a window, all of it is computed."""
    groups = (full(), window(8)) if windows else (full(),)
    tier = objects() if shared else disk(write="read_only")
    bed = stream_bed(8, tiers=(tier,), prefill_tokens_per_s=1000.0, groups=groups)
    for number in range(READINGS_MIN):
        arrive(bed, 1, number)
        finish(bed)
    bed.tiers.elapsed_s[0] = 0.001
    arrive(bed, 100, READINGS_MIN)
    for _ in range(6):
        turn(bed)
    bed.tiers.elapsed_s[0] = 5.0
    finish(bed)
    assert bed.core.counters.loads_given_up == 1
    assert 0 < bed.core.counters.tokens_given_up < 400
    if windows:
        assert computed(bed) == 401 + READINGS_MIN
    bed.core.manager.validate()


@pytest.mark.parametrize(("accepts", "jobs"), [(3, 1), (50, 0)])
def test_a_part_of_an_offer(accepts: int, jobs: int) -> None:
    """An engine that takes less than was gathered gets one job; with more, the load streams that far."""
    bed = stream_bed(8)
    arrive(bed, 100)
    turn(bed)
    bed.step(EngineBehaviour(budget=100_000, accepts=accepts / 100))
    assert bed.core.counters.loads_streamed == 1 - jobs
    finish(bed)
    assert bed.core.counters.tokens_loaded == {"disk": 4 * accepts}


def test_the_engine_has_computed_the_first_segment() -> None:
    """Blocks of the first segment are on the GPU by the time of the allocation: the load begins with the second."""
    core = make_core(slots=4, tiers=[disk(write="read_only")])
    request = core.arrive(41)
    keys = core.truth.keys(request)
    core.keep_below(keys)
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 40
    core.scheduler.update_state_after_alloc(request, [blocks(range(1, 12), filled=2)], 40)
    assert not core.scheduler.build_connector_meta(StepOutput()).loads
    core.scheduler.validate()
    assert core.scheduler.has_pending_work
    core.finish_all()
    (job,) = core.scheduler.build_connector_meta(StepOutput()).loads
    assert (job.keys, job.block_indices) == (tuple(keys[2:4]), (2,))


def test_a_shared_tier_that_answers_slowly_is_asked_about_the_whole_length() -> None:
    """A shared tier that answers about few chunks at a time costs a request none of its hit, however long it takes."""
    core = make_core(slots=8, tiers=[objects(write="read_only", probe_keys_max=10)])
    request = core.arrive(401)
    assert core.ask(request) is None
    for number in range(1, 6):
        for probe in core.manager.take_ops():
            core.finish(probe)
        core.begin(2.5 * number)
        assert core.ask(request) is None, "a fifth more is known; with the last one its first segment is read"
    core.finish_all()
    assert core.ask(request) == 400
    assert core.counters.deadlines_expired == 0


def test_chunks_lost_during_the_first_segment_are_not_offered() -> None:
    """Only the first segment is held before the answer: the rest is looked up again when it has arrived."""
    core = make_core(slots=8, tiers=[disk(write="read_only")])
    request = core.arrive(161)
    keys = core.truth.keys(request)
    core.keep_below(keys)
    assert core.ask(request) is None
    core.finish_all()
    core.lower[0].forget(keys[20], core.now)
    assert core.ask(request) == 80


# -- groups and workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_tokens", "factor"), [((4,), 2), ((4, 8), 1), ((2, 3), 2), ((8, 2, 4), 1)])
def test_several_groups(block_tokens: tuple[int, ...], factor: int) -> None:
    """Groups with chunks of any size: all chunks are loaded, in the order in which they end."""
    bed = stream_bed(8, block_tokens=block_tokens, factor=factor, hash_block_tokens=1)
    request = arrive(bed, 60)
    finish(bed)
    truth, groups = bed.core.truth, bed.core.geometry.groups
    assert bed.core.counters.loads_streamed == 1
    assert bed.core.counters.loads_given_up == 0
    loaded = sum(bed.core.counters.tokens_loaded.values())
    assert loaded > 240 - 4 * max(group.chunk_tokens for group in groups)
    wanted = {key for group in groups for key in truth.keys(request, group.index)[: -(-loaded // group.chunk_tokens)]}
    assert bed.tiers.reads == dict.fromkeys(wanted, 1)


def test_windows_come_first() -> None:
    """A hit with windows is useful only as a whole, so their chunks are in the first segment.

    Then the prefix follows.
    """
    bed = stream_bed(16, groups=(full(), window(8)))
    request = arrive(bed, 60)
    recent = set(bed.core.truth.keys(request, 1)[-2:])
    turn(bed)
    bed.step(ALL)
    (job,) = bed.worker.running.values()
    assert recent < set(job.keys)
    finish(bed)
    assert bed.core.counters.tokens_loaded == {"disk": 240}
    assert len(bed.tiers.reads) == 62


def test_with_windows_a_failure_costs_the_whole_load() -> None:
    """The load served one end only: the engine continues from the tokens before it."""
    bed = stream_bed(16, groups=(full(), window(8)))
    request = arrive(bed, 60)
    bad = bed.core.truth.keys(request, 0)[30]
    while bed.engine.sequences:
        bed.step(ALL)
        bed.check()
        for op in list(bed.tiers.pending.values()):
            bed.tiers.complete(op.op_id, lose(op.keys, bad, OutcomeKind.FAILED))
        bed.run_transfers()
    assert computed(bed) == 241
    bed.settle()
    bed.check_end()


def test_a_segment_ends_when_all_workers_have_reported() -> None:
    """Three ranks report at different times: the next segment waits for the last of them."""
    bed = stream_bed(8, num_workers=3)
    arrive(bed, 40)
    while bed.engine.sequences:
        bed.step(ALL, reports_max=1)
        bed.check()
        bed.run_io()
        bed.run_transfers()
    assert bed.core.counters.tokens_loaded == {"disk": 160}
    bed.settle()
    bed.check_end()


# -- all of it at random ---------------------------------------------------------------------------------------------


@given(
    slots=st.integers(1, 12), chunks=st.integers(2, 40), count=st.integers(1, 4),
    resident=st.sets(st.integers(0, 39), max_size=6), bad=st.none() | st.integers(0, 39),
    kind=st.sampled_from(FAILURES),
)  # fmt: skip
@settings(deadline=None)
def test_whatever_the_sizes(
    slots: int, chunks: int, count: int, resident: set[int], bad: int | None, kind: OutcomeKind
) -> None:
    """Any number of chunks, some in the host tier, one possibly corrupt, for several requests at once.

    All are answered, no chunk is read twice for lack of slots, and valid chunks need not be computed.
    """
    bed = stream_bed(slots, deadline_s=1000.0)
    requests = [arrive(bed, chunks, family) for family in range(count)]
    keys = bed.core.truth.keys(requests[0])
    for i in sorted(resident)[: min(slots, chunks)]:
        if i < chunks:
            bed.core.put([keys[i]])
            chunk = bed.core.host.slots.get(keys[i])
            assert chunk is not None
            bed.memory[chunk.slot] = bed.core.truth.payloads[keys[i]]
    for _ in range(20 * chunks * count + 20):
        bed.step(ALL)
        bed.check()
        for op in list(bed.tiers.pending.values()):
            faults = [kind if bad is not None and bad < chunks and key == keys[bad] else None for key in op.keys]
            bed.tiers.complete(op.op_id, faults)
        bed.run_transfers()
        if not bed.engine.sequences:
            break
    assert not bed.engine.sequences
    good = 4 * min(chunks, chunks if bad is None else bad)
    assert computed(bed) <= count + 4 * chunks - good
    for request in requests[1:]:
        assert all(bed.tiers.reads.get(key) == 1 for key in bed.core.truth.keys(request))
    bed.settle()
    bed.check_end()


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_whole() -> None:
    """Every state can be reached, and left except the last; other events raise with the log."""
    assert set(STREAM_TRANSITIONS.values()) | {StreamState.GATHERING} == set(StreamState)
    assert {before for before, _ in STREAM_TRANSITIONS} == set(StreamState) - {StreamState.ENDED}
    for state in StreamState:
        for event in StreamEvent:
            if (state, event) in STREAM_TRANSITIONS:
                assert STREAM_STATES.next(state, event, "r", str) is STREAM_TRANSITIONS[state, event]
            else:
                with pytest.raises(IllegalTransitionError, match="what it did"):
                    STREAM_STATES.next(state, event, "r", lambda: "what it did")


def test_a_void_chunk_touches_no_slot() -> None:
    """A job with void chunks touches no slot of the host tier for them."""
    core = make_core(slots=2)
    core.put([Key(b"one" + bytes(6)), Key(b"two" + bytes(6))])
    assert core.host.slots.leased([VOID_SLOT]) == []
    core.manager.complete_load([VOID_SLOT], [VOID_SLOT])
    core.manager.validate()
    assert len(core.ready()) == 2


def test_the_request_stays_loading_between_segments() -> None:
    """The request stays LOADING between segments: it is asked about and scheduled only after the load."""
    bed = stream_bed(8)
    request = arrive(bed, 40)
    until_stream(bed, StreamState.GATHERING)
    assert bed.states() == {RequestState.LOADING: 1}
    assert bed.core.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    finish(bed)
