"""Lookups: answered, deferred, offered, and ended by their deadline (spec, sections 6 and 7; decision 4)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from core_bed import Bed, BedSpec
from core_blocks import blocks
from core_parts import Core, disk, make_core, objects
from core_truth import BedRequest
from simulation.engine.engine import EngineBehaviour
from stream_parts import FAILURES

from tierkv.manager.contract import RequestContext
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.requests import record
from tierkv.types.engine import StepOutput
from tierkv.types.tier_ops import OutcomeKind, TierHealth, Verb
from tierkv.types.transfers import TransferJob


def take(core: Core, request: BedRequest, tokens: int, first_block: int = 1) -> TransferJob:
    """Allocate for an offer and start its load."""
    core.scheduler.update_state_after_alloc(request, [blocks(range(first_block, first_block + tokens // 4))], tokens)
    return core.scheduler.build_connector_meta(StepOutput()).loads[0]


def test_a_hot_hit_is_answered_inline() -> None:
    """Chunks in the host tier are never deferred, and no lower tier is asked."""
    core = make_core(tiers=[objects(), disk()])
    request = core.arrive(16)
    core.put(core.truth.keys(request))
    core.finish_all()
    assert core.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
    assert core.counters.deferrals == 0
    assert not core.manager.take_ops()


def test_a_cold_miss_below_is_answered_inline() -> None:
    """A tier with an index knows at once that it has no chunk."""
    core = make_core(tiers=[disk()])
    assert core.scheduler.get_num_new_matched_tokens(core.arrive(16), 0) == (0, False)


def test_s15_a_hit_is_counted_in_each_groups_chunks() -> None:
    """S15: 16 tokens are four chunks of one group and two of another: exactly those are held for the offer."""
    core = make_core(block_tokens=(4, 8), hash_block_tokens=4)
    request = core.arrive(20)
    fine, coarse = core.truth.keys(request, 0), core.truth.keys(request, 1)
    core.put([*fine, *coarse])
    assert core.ask(request) == 16
    assert core.manager.passages.granted("a").keys() == {*fine[:4], *coarse}


def test_s48_a_request_with_jobs_of_its_own() -> None:
    """S48: while its own stores are in flight a request is deferred, without a single lookup."""
    core = make_core(tiers=[objects()])
    request = core.arrive(16)
    core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]])
    core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    assert core.ask(request) is None
    assert not core.manager.take_ops()


def test_s47_asking_twice_answers_twice_the_same() -> None:
    """S47: an offer stays while nothing changes, and costs no second search."""
    core = make_core()
    request = core.arrive(16)
    core.put(core.truth.keys(request))
    room = core.host.room
    assert [core.ask(request) for _ in range(3)] == [16, 16, 16]
    assert core.host.room == room - 4
    miss = core.arrive(range(100, 116), "miss")
    assert [core.ask(miss) for _ in range(3)] == [0, 0, 0]


def test_d8_what_is_offered_is_pinned() -> None:
    """D8: any number of stores may happen between answer and allocation: offered chunks stay."""
    core = make_core(slots=8)
    request = core.arrive(16)
    core.put(core.truth.keys(request))
    assert core.ask(request) == 16
    for i in range(10):
        core.put(core.truth.keys(core.request(range(100 * i + 100, 100 * i + 116), "x")))
    assert take(core, request, 16).keys == tuple(core.truth.keys(request))


def test_what_is_being_stored_is_waited_for() -> None:
    """PENDING: another request's store of these chunks is in flight: a hit, offered when they are readable."""
    core = make_core()
    writer = core.arrive(16, "w")
    (store,) = core.schedule(writer, computed=0, scheduled=16, ids=[[1, 2, 3, 4]]).stores
    reader = core.arrive(20, "r")
    assert core.ask(reader) is None
    core.report(store.job_id)
    assert core.ask(reader) == 16


def test_what_was_being_stored_and_failed() -> None:
    """A failed store gives a shorter hit, at once."""
    core = make_core()
    writer = core.arrive(16, "w")
    (store,) = core.schedule(writer, computed=0, scheduled=16, ids=[[1, 2, 3, 4]]).stores
    reader = core.arrive(16, "r")
    assert core.ask(reader) is None
    core.report(store.job_id, failed={store.job_id: frozenset({store.keys[2]})})
    assert core.ask(reader) == 8


def test_s49_a_prefix_that_is_being_loaded_is_waited_for() -> None:
    """S49: the second request waits until the load of the first one has ended, then is answered.

    The GPU may have the blocks by then, and they are loaded once.
    """
    core = make_core()
    first, second = core.arrive(16, "f"), core.arrive(20, "s")
    core.put(core.truth.keys(first))
    assert core.ask(first) == 16
    load = take(core, first, 16)
    assert core.ask(second) is None
    core.report(load.job_id)
    assert core.ask(second, computed=16) == 0


def test_s49_only_an_overlap_delays() -> None:
    """S49: a load of other chunks delays no request."""
    core = make_core()
    first, second = core.arrive(16, "f"), core.arrive(range(100, 116), "s")
    core.put(core.truth.keys(first) + core.truth.keys(second))
    core.ask(first)
    take(core, first, 16)
    assert core.ask(second) == 16


def test_s51_without_gpu_prefix_caching_no_request_waits() -> None:
    """S51: blocks of another request could not be shared: both load."""
    core = make_core(limits=SchedulerLimits(gpu_prefix_caching=False))
    first, second = core.arrive(16, "f"), core.arrive(20, "s")
    core.put(core.truth.keys(first))
    core.ask(first)
    take(core, first, 16)
    assert core.ask(second) == 16
    assert len(take(core, second, 16, first_block=11).keys) == 4


def test_s52_completion_empties_the_set() -> None:
    """S52: the end of a load, also of an abandoned one, lets all other requests continue."""
    core = make_core()
    first, second = core.arrive(16, "f"), core.arrive(16, "s")
    core.put(core.truth.keys(first))
    core.ask(first)
    load = take(core, first, 16)
    core.scheduler.request_finished(first, [])
    assert core.ask(second) is None
    core.report(load.job_id)
    assert core.ask(second) == 16
    assert not len(core.scheduler._lookups._loads)


def test_promotion_from_a_tier_with_an_index() -> None:
    """Presence is known at once, the bytes need a read: one deferral, one batch of reads, then the offer."""
    core = make_core(tiers=[disk()])
    request = core.arrive(16)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    (read,) = core.manager.take_ops()
    assert (read.verb, read.keys) == (Verb.READ, tuple(core.truth.keys(request)))
    assert core.ask(request) is None
    assert not core.manager.take_ops(), "asking again must not read again"
    core.finish(read)
    assert core.ask(request) == 16
    assert core.counters.deferrals == 2


def test_promotion_from_a_shared_tier() -> None:
    """First one probe for the whole prefix, then the reads."""
    core = make_core(tiers=[objects()])
    request = core.arrive(16)
    keys = core.truth.keys(request)
    assert core.ask(request) is None
    (probe,) = core.manager.take_ops()
    assert (probe.verb, probe.keys) == (Verb.PROBE, tuple(keys))
    core.finish(probe, [OutcomeKind.OK] * 3 + [OutcomeKind.ABSENT])
    assert core.ask(request) is None
    (read,) = core.manager.take_ops()
    assert read.keys == tuple(keys[:3]), "only what the answer needs is moved"
    core.finish(read)
    assert core.ask(request) == 12


def test_nothing_is_moved_before_the_length_is_known() -> None:
    """Two groups, the second has less: chunks behind the common end are never read (landscape, cause of G3)."""
    core = make_core(block_tokens=(4, 4), tiers=[disk()])
    request = core.arrive(16)
    core.keep_below([*core.truth.keys(request, 0), *core.truth.keys(request, 1)[:2]])
    assert core.ask(request) is None
    assert {key for op in core.manager.take_ops() for key in op.keys} == {
        *core.truth.keys(request, 0)[:2],
        *core.truth.keys(request, 1)[:2],
    }


@pytest.mark.parametrize("kind", FAILURES)
def test_a_read_that_fails_shortens_the_hit(kind: OutcomeKind) -> None:
    """Whatever the result of a read, the answer is the readable part before it: no error, no endless deferral."""
    core = make_core(tiers=[disk()])
    request = core.arrive(16)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    (read,) = core.manager.take_ops()
    core.finish(read, [OutcomeKind.OK, OutcomeKind.OK, kind, OutcomeKind.OK])
    assert core.ask(request) == 8
    core.scheduler.validate()


def test_a_read_that_fails_here_is_tried_there() -> None:
    """The chunk is in two tiers: if the copy of the first one is corrupt, the second one is read."""
    core = make_core(tiers=[disk(name="fast"), disk(name="slow")])
    request = core.arrive(8)
    keys = core.truth.keys(request)
    core.keep_below(keys, 0)
    core.keep_below(keys, 1)
    assert core.ask(request) is None
    (read,) = core.manager.take_ops()
    core.finish(read, [OutcomeKind.OK, OutcomeKind.CORRUPT])
    assert core.ask(request) is None
    reads = [op for op in core.manager.take_ops() if op.verb is Verb.READ]
    assert [(op.tier, op.keys) for op in reads] == [(1, (keys[1],))]
    core.finish(reads[0])
    assert core.ask(request) == 8


def test_a_tier_that_goes_out_of_service() -> None:
    """Its chunks are misses at once, also for a request that waits for its probe."""
    core = make_core(tiers=[objects()])
    request = core.arrive(16)
    assert core.ask(request) is None
    core.manager.on_completion(TierHealth(0, usable=False))
    assert core.ask(request) == 0


@pytest.mark.parametrize("state", ["asking", "gathering", "offered"])
def test_an_engine_may_go_ahead_without_the_answer(state: str) -> None:
    """Scheduled while deferred, or with an offer ignored: all chunks held for the request are released."""
    core = make_core(tiers=[objects() if state == "asking" else disk()])
    request = core.arrive(16)
    if state != "asking":
        core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    if state == "offered":
        core.finish_all()
        assert core.ask(request) == 16
    (store,) = core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]]).stores or (None,)
    core.finish_all()
    if store is not None:
        core.report(store.job_id)
    assert core.host.room == core.host.num_slots
    core.scheduler.validate()


@pytest.mark.parametrize("state", ["asking", "gathering", "offered"])
def test_abort_in_every_state_of_a_lookup(state: str) -> None:
    """Promise 3: an aborted request leaks nothing, in any state of its lookup."""
    core = make_core(tiers=[objects() if state == "asking" else disk()])
    request = core.arrive(16)
    if state != "asking":
        core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    if state == "offered":
        core.finish_all()
        assert core.ask(request) == 16
    core.scheduler.request_finished(request, [])
    core.finish_all()
    assert not core.scheduler._records
    assert not core.scheduler._lookups._open
    assert core.host.room == core.host.num_slots


def test_the_gpus_share_changes_while_gathering() -> None:
    """The GPU has more, or less, of the prefix from step to step: chunks still wanted stay held.

    Their reads are not repeated, and the answer fits the new start.
    """
    core = make_core(tiers=[disk()])
    request = core.arrive(32)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    reads = core.manager.take_ops()
    for computed in (8, 16, 4, 12):
        assert core.ask(request, computed) is None
        assert not core.manager.take_ops()
    for read in reads:
        core.finish(read)
    assert core.ask(request, 12) == 20


def test_a_waiting_request_costs_little_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 2: asked every step, a deferred request is searched again only when something became known."""
    core = make_core(tiers=[objects()])
    request = core.arrive(16)
    assert core.ask(request) is None
    monkeypatch.setattr(core.manager, "lookup", None)
    assert core.ask(request) is None


def test_a_request_that_finds_no_budget_left_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand requests wait, and a step's budget is enough for some of them: the others cost a comparison each."""
    core = make_core(tiers=[disk()], step_keys=2)
    request = core.arrive(400)
    core.keep_below(core.truth.keys(request))
    core.record(request)  # makes all keys
    core.begin(1.0)
    assert core.ask(request) is None
    with monkeypatch.context() as patch:
        patch.setattr(core.manager, "present_prefix", None)
        assert core.ask(request) is None
    core.begin(2.0)
    searches: list[object] = []
    look = core.manager.present_prefix
    monkeypatch.setattr(core.manager, "present_prefix", lambda *args: searches.append(args[0]) or look(*args))
    assert core.ask(request) is None
    assert searches, "the next step searches on"


def test_a_waiting_request_is_not_searched_anew_when_others_store_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 2: in every busy step a transfer or write of other requests ends.

    None of that answers a question to a tier, so a long waiting prompt is not searched again.
    """
    core = make_core(tiers=[objects()])
    other = core.arrive([7] * 4, "other")
    request = core.arrive(16)
    assert core.ask(request) is None
    (probe,) = core.manager.take_ops()
    searches: list[object] = []
    look = core.manager.present_prefix
    monkeypatch.setattr(core.manager, "present_prefix", lambda *args: searches.append(args[0]) or look(*args))
    key = core.truth.keys(other)[0]
    grant = core.manager.prepare_store([(key, 0)], RequestContext("other"))
    assert grant is not None
    core.manager.complete_store(grant.slots)
    (write,) = core.manager.take_ops()
    core.finish(write)
    load = core.manager.prepare_load([key], RequestContext("other"))
    core.manager.complete_load(load.slots)
    assert core.ask(request) is None
    assert not searches
    core.finish(probe)
    assert core.ask(request) is None
    assert searches, "the answer is looked at"


def test_engine_that_accepts_half_of_every_offer() -> None:
    """Over a whole engine: offers taken in part, from two tiers, with real bytes."""
    bed = Bed(BedSpec(tiers=(disk(), objects()), gpu_caching=False, slots=16, reserved=12))
    for _ in range(2):
        for family in range(3):
            bed.add([family * 100 + i for i in range(24)], 2)
        for _ in range(60):
            bed.step(EngineBehaviour(accepts=0.5))
            bed.run_transfers()
            bed.run_io()
            bed.check()
    assert bed.offers
    bed.settle()
    bed.check_end()


def test_the_budget_of_a_step_pays_for_the_keys_of_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of two groups with 400 chunks each are asked for in one step, before and after the budget is used up:
    only the first one gets its keys. The other one gets them a part at a time, and then its answer."""
    monkeypatch.setattr(record, "KEYS_MADE_PER_KEY", 1)
    core = make_core(block_tokens=(4, 4), slots=2048)
    first, second = core.arrive(1601, "first"), core.arrive(range(5000, 6601), "second")
    for request in (first, second):
        core.put([*core.truth.keys(request, 0), *core.truth.keys(request, 1)])
    made: list[tuple[int, int]] = []
    answers = {}
    for _ in range(6):
        core.begin()
        for request in (first, second):
            answers[request.request_id] = core.ask(request)
        records = [core.scheduler._record("record", request) for request in (first, second)]
        made.append(tuple(sum(len(group.keys) for group in record.groups) for record in records))
    assert 0 < made[0][0] < 800
    assert made[0][1] == 0
    assert max(after - before for each in zip(*made, strict=True) for before, after in pairwise((0, *each))) < 1024
    assert answers == {"first": 1600, "second": 1600}


def test_requests_that_arrive_together_get_their_keys_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of long prompts arrive in one step, and no tier has any of them: the next step does not make the keys of
    them all to find that out. What is left of a prompt is made when the engine asks about it."""
    monkeypatch.setattr(record, "KEYS_MADE_PER_KEY", 8)
    core = make_core(tiers=[disk()], slots=512, reserved=400)
    requests = [core.arrive(range(n * 10_000, n * 10_000 + 4000), f"r{n}") for n in range(100)]
    made = [0]
    for _ in range(40):
        core.begin()
        made.append(sum(len(core.scheduler._record("record", request).groups[0].keys) for request in requests))
    assert max(after - before for before, after in pairwise(made)) <= 8 * core.manager.budget.keys_max
    assert made[-1] > made[1]
