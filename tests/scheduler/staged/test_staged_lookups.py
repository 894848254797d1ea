"""Lookups of engines that ask chunk by chunk and accept no failed load: HIT means readable and held."""

from __future__ import annotations

import pytest
from calls import calls_of
from core_parts import TierSpec, disk, make_core, objects
from group_parts import full, window
from hypothesis import given
from hypothesis import strategies as st
from staged_bed import HIT, MISS, PENDING, RETRY, StagedBed, prefix

from tierkv.manager.contract import RequestContext
from tierkv.scheduler.staged.staged_lookups import group_budgets
from tierkv.types.geometry import Geometry
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, Verb


def bed(*, slots: int = 16, reserved: int | None = None, tier: TierSpec | None = None) -> StagedBed:
    """One group over a tier with an index."""
    below = disk(write="read_only") if tier is None else tier
    return StagedBed(make_core(slots=slots, reserved=reserved, tiers=[below]))


def waiting(chunks: int) -> tuple[StagedBed, tuple[Key, ...]]:
    """Request "a" has asked about its prompt, which is in the lower tier, and waits for it."""
    it, keys = bed(slots=64), prefix(chunks)
    it.core.keep_below(keys)
    it.add("a")
    assert it.ask("a", keys) is None
    it.end()
    return it, keys


def press(bed: StagedBed, count: int = 200) -> None:
    """Store far more chunks of other requests than the host tier has slots."""
    for i in range(count):
        bed.core.put(prefix(1, f"other {i}"))


def test_what_is_readable_is_a_hit_at_once_and_cannot_be_taken_away() -> None:
    """The engine gets HIT in its first step, finds no blocks, and asks again much later.

    The chunks are still there, despite many stores, and are loaded.
    """
    it = bed()
    keys = prefix(4)
    it.core.put(keys)
    it.add("a")
    assert it.ask("a", keys) == 4
    it.end()
    press(it)
    it.begin(1.0)
    assert it.ask("a", keys) == 4
    it.load("a", keys)
    it.end()
    assert it.held == 0


def test_an_id_that_is_used_again_names_another_request() -> None:
    """Its chunks are no continuation of what the first one stored (tierkv.policies.prefix_order)."""
    it = bed()
    numbers = []
    for _ in range(2):
        it.add("a")
        numbers.append(it.lookups.request_context("a").number)
        it.lookups.finish_request("a")
    assert 0 < numbers[0] != numbers[1] > 0


def test_chunks_below_are_gathered_and_then_loaded() -> None:
    """The first answer defers, and nothing is read while the engine still asks.

    Then each chunk is read once, in prefix order, and the whole prefix is a stable hit.
    """
    it = bed()
    keys = prefix(6)
    it.core.keep_below(keys)
    it.add("a")
    assert it.ask("a", keys) is None
    assert not it.core.manager.take_ops()
    it.end()
    assert it.run_io() == list(keys)
    press(it)
    it.begin(0.01)
    assert it.ask("a", keys) == 6
    it.end()
    assert not it.run_io()
    it.load("a", keys)
    assert it.held == 0


def test_a_waiting_prompt_is_asked_about_once() -> None:
    """An engine repeats its questions in every step. A long prompt that waits for a disk must not cost each step.

    The first step and the step with the answer go over all chunks; those between them stop after two.
    """
    it, keys = waiting(40)
    for _ in range(10):
        it.begin(0.01)
        it.asked.clear()
        assert it.ask("a", keys) is None
        assert it.asked.total() == 2
        it.end()
    assert it.run_io() == list(keys)
    it.begin(0.01)
    assert it.ask("a", keys) == 40
    it.end()
    it.load("a", keys)
    assert it.held == 0


def test_an_engine_that_uses_a_part_sees_what_is_readable() -> None:
    """SGLang loads what is staged when its own time is over: a tier that hangs in the middle costs the rest alone."""
    it = StagedBed(make_core(slots=64, tiers=[disk(write="read_only")]), waits_whole=False)
    keys = prefix(40)
    it.core.keep_below(keys)
    it.add("a")
    assert it.ask("a", keys) is None
    it.end()
    first, *hanging = it.core.manager.take_ops()
    assert hanging
    it.core.finish(first)
    it.begin(0.01)
    answers = [it.look("a", key, number) for number, key in enumerate(keys)]
    assert answers == [HIT] * len(first.keys) + [PENDING] * (40 - len(first.keys))
    it.end()


def test_a_waiting_prompt_that_loses_a_chunk_is_asked_about_anew() -> None:
    """The read of a chunk fails while the engine waits: the next questions find out where the prefix ends now."""
    it, keys = waiting(6)
    it.begin(0.01)
    assert it.ask("a", keys) is None
    it.end()
    it.run_io(OutcomeKind.ABSENT)
    assert it.answer("a", keys) == 0


@pytest.mark.parametrize("chunks", [65, 100])
@pytest.mark.parametrize("tier", [disk(), objects(), objects(probe_keys_max=10)], ids=["disk", "objects", "probes"])
@pytest.mark.parametrize("reserved", [64, 51])
def test_g1_a_prefix_longer_than_the_host_tier(chunks: int, tier: TierSpec, reserved: int) -> None:
    """G1: 64 slots, a prefix of 65 (or 100) chunks below. Other systems defer forever.

    Here the part that one request can have gathered is the answer, in a few steps.
    """
    it = bed(slots=64, reserved=reserved, tier=tier)
    keys = prefix(chunks)
    if tier.capabilities.authoritative_index:
        it.core.keep_below(keys)
    it.add("a")
    assert it.answer("a", keys, steps_max=12) == reserved
    it.load("a", keys[:reserved])
    assert it.held == 0


@given(
    places=st.lists(st.sampled_from(["host", "disk", "both", "nowhere"]), max_size=24),
    reserved=st.integers(1, 16),
    start=st.integers(0, 3),
)
def test_a_deferred_answer_is_the_immediate_one(places: list[str], reserved: int, start: int) -> None:
    """Wherever the chunks are, the engine gets the same prefix as if all were in the host tier.

    It is limited to the chunks that one request can have gathered, and all of it can be loaded.
    """
    it = bed(slots=40, reserved=reserved)
    keys = prefix(len(places))
    it.core.put([key for key, place in zip(keys, places, strict=True) if place in {"host", "both"}])
    it.core.keep_below([key for key, place in zip(keys, places, strict=True) if place in {"disk", "both"}])
    there = [place != "nowhere" for place in places[start:]]
    expected = min(reserved, [*there, False].index(False))
    it.add("a")
    for _ in range(6):
        it.begin(0.01)
        answer = it.ask("a", keys, start)
        it.end()
        if answer is not None:
            break
        it.run_io()
    assert answer == expected
    it.load("a", keys[start : start + expected])
    assert it.held == 0


def test_a_hung_tier_costs_the_deadline() -> None:
    """No I/O ever ends: after the deadline the readable, held chunks are the answer, the rest is a miss.

    The request is not deferred again before it runs (S47).
    """
    it = bed()
    keys = prefix(6)
    it.core.put(keys[:2])
    it.core.keep_below(keys[2:])
    it.add("a")
    for _ in range(4):
        assert it.ask("a", keys) is None
        it.end()
        it.core.manager.take_ops()
        it.begin(1.0)
    it.begin(1.0)
    assert it.ask("a", keys) == 2
    it.end()
    it.begin(0.01)
    assert it.ask("a", keys) == 2
    it.end()
    it.lookups.finish_request("a")
    assert it.core.counters.deadlines_expired == 1
    assert it.core.counters.deferrals == 4
    assert it.core.counters.deferred_tier_ms == 5000


def test_a_tier_that_never_answers_costs_the_deadline() -> None:
    """The probe itself hangs: RETRY until the deadline; only chunks present before are held meanwhile."""
    it = bed(tier=objects())
    keys = prefix(4)
    it.core.put(keys[:1])
    it.add("a")
    assert [it.look("a", key, i) for i, key in enumerate(keys)] == [HIT, RETRY, RETRY, RETRY]
    it.end()
    it.begin(5.0)
    it.lookups.lookup("a", keys[0], 0, 4)
    assert it.ask("a", keys) == 1


def test_existence_comes_before_movement() -> None:
    """One group is known to be below, the other is still being probed: nothing is read before both are known.

    If one turns out to be absent, nothing is read at all.
    """
    it = StagedBed(make_core(groups=(full(4), full(4)), slots=16, tiers=[disk(write="read_only"), objects()]))
    first, second = prefix(4, group=0), prefix(4, group=1)
    it.core.keep_below(first)
    it.add("a")
    assert it.ask("a", first) is None
    assert it.ask("a", second) is None
    it.end()
    (probe,) = it.core.manager.take_ops()
    assert probe.verb is Verb.PROBE
    assert set(probe.keys) == set(second)
    it.core.finish(probe, OutcomeKind.ABSENT)
    it.begin(0.01)
    assert it.ask("a", second) == 0
    it.end()
    assert not it.core.manager.take_ops()


def test_a_chunk_lost_on_the_way_is_a_miss() -> None:
    """The third of five cannot be read: the answer is two, without endless deferral."""
    it = bed()
    keys = prefix(5)
    it.core.keep_below(keys)
    it.add("a")
    assert it.ask("a", keys) is None
    it.end()
    for op in it.core.manager.take_ops():
        it.core.finish(op, [OutcomeKind.CORRUPT if key == keys[2] else OutcomeKind.OK for key in op.keys])
    assert it.answer("a", keys) == 2
    it.load("a", keys[:2])
    assert it.held == 0


def test_what_is_being_stored_is_waited_for() -> None:
    """Another request's store of the second chunk is in flight: deferred, then a hit, or a miss if it fails."""
    for fails in (False, True):
        it = bed()
        keys = prefix(2)
        it.core.put(keys[:1])
        grant = it.core.manager.prepare_store([(keys[1], 0)], it.lookups.request_context("writer"))
        assert grant is not None
        it.add("a")
        assert [it.look("a", key, i) for i, key in enumerate(keys)] == [HIT, PENDING]
        it.end()
        it.core.manager.complete_store(grant.slots, frozenset(keys[1:]) if fails else frozenset())
        assert it.answer("a", keys) == (1 if fails else 2)


def test_a_step_asks_the_manager_once_per_chunk() -> None:
    """Engines ask the same in every pass: within a step the second answer equals the first."""
    it = bed(tier=objects())
    (key,) = prefix(1)
    it.add("a")
    assert it.look("a", key, 0) is RETRY
    it.core.put([key])
    assert it.look("a", key, 0) is RETRY
    it.end()
    it.begin(0.01)
    assert it.look("a", key, 0) is HIT


@pytest.mark.parametrize("how", ["finish", "settle", "silence"])
def test_nothing_stays_held(how: str) -> None:
    """A request that ends, runs without its hit, or is no longer asked about, holds nothing.

    Neither pinned chunks nor chunks in flight.
    """
    it = bed()
    keys = prefix(6)
    it.core.put(keys[:3])
    it.core.keep_below(keys[3:])
    it.add("a")
    assert it.ask("a", keys) is None
    it.add("b")
    assert it.ask("b", keys[:3]) == 3
    it.end()
    assert it.held == 6
    for request_id in ("a", "b"):
        if how == "finish":
            it.lookups.finish_request(request_id)
        elif how == "settle":
            it.lookups.close_lookup(request_id)
        elif how == "silence":  # the engine asks about another one, which finds no slot
            it.core.manager.passages.note_shortage()
    it.begin(5.0)
    it.add("c")
    assert it.ask("c", prefix(1, "unknown")) == 0
    it.run_io()
    it.core.manager.passages.note_shortage()
    it.begin(0.01)
    assert it.held == 0
    it.end()


def test_a_hit_that_is_asked_for_again_and_again_stays() -> None:
    """No blocks are free for minutes: the hit stays as long as the engine asks."""
    it = bed()
    keys = prefix(3)
    it.core.keep_below(keys)
    it.add("a")
    assert it.answer("a", keys) == 3
    for _ in range(20):
        press(it, 20)
        it.begin(4.0)
        assert it.ask("a", keys) == 3
        it.end()
    assert it.core.counters.deadlines_expired == 0


def test_a_new_question_has_a_deadline_of_its_own() -> None:
    """Preempted long after its first lookup, a request may wait a whole deadline for a tier again."""
    it = bed()
    keys = prefix(3)
    it.core.keep_below(keys)
    it.add("a")
    assert it.answer("a", keys) == 3
    assert it.core.counters.deferred_queue_ms == 10
    it.load("a", keys)
    press(it)
    it.lookups.close_lookup("a")
    it.begin(100.0)
    assert it.ask("a", keys) is None
    it.end()
    assert it.core.counters.deadlines_expired == 0


def test_the_oldest_gets_its_slots_first_and_the_others_after() -> None:
    """Three prefixes of eight over twelve slots: all are answered whole, in order of arrival, none is read twice."""
    it = bed(slots=12)
    prompts = {name: prefix(8, name) for name in "abc"}
    for name, keys in prompts.items():
        it.core.keep_below(keys)
        it.add(name)
    done: list[str] = []
    reads: list[Key] = []
    for _ in range(12):
        it.begin(0.01)
        for name, keys in prompts.items():
            if name not in done and it.ask(name, keys) == 8:
                it.load(name, keys)
                done.append(name)
        it.end()
        reads += it.run_io()
    assert done == ["a", "b", "c"]
    assert sorted(reads) == sorted(key for keys in prompts.values() for key in keys)


def test_a_younger_one_does_not_hold_what_the_oldest_needs() -> None:
    """The younger request has half of its prompt in the host tier; the older one needs every slot.

    It gets them in its first step, not after the deadline of the younger one, which keeps asking.
    """
    it = bed(slots=8)
    old, young = prefix(8, "old"), prefix(6, "young")
    it.core.put(young[:4])
    it.core.put(prefix(4, "others"))
    it.core.keep_below([*old, *young])
    it.add("old")
    it.add("young")
    for _ in range(2):
        assert it.ask("old", old) is None
        assert it.ask("young", young) is None
        it.end()
        it.begin(0.01)
    assert set(it.run_io()) == set(old)
    assert it.ask("old", old) == 8


def test_a_second_pass_gets_the_same_answers() -> None:
    """An engine goes over the whole prefix twice for one answer: the budget of a request is counted anew."""
    it = bed(slots=8, reserved=4)
    keys = prefix(6)
    it.core.put(keys)
    it.add("a")
    assert it.ask("a", keys) == 4
    assert it.ask("a", keys) == 4
    assert it.ask("a", keys[:3]) == 3
    it.end()
    assert it.held == 3


def test_a_hit_outlives_the_time_of_its_chunk() -> None:
    """A chunk with a TTL of a second was answered as HIT, and expires before the engine has blocks for it.

    It can still be loaded; a later question gets a miss.
    """
    it = bed()
    keys = prefix(2)
    it.lookups.add_request(RequestContext("writer", hints=RequestHints(ttl_s=1.0)))
    grant = it.core.manager.prepare_store([(key, 0) for key in keys], it.lookups.request_context("writer"))
    assert grant is not None
    it.core.manager.complete_store(grant.slots)
    it.add("a")
    it.add("b")
    assert it.ask("a", keys) == 2
    it.end()
    it.begin(2.0)
    assert it.ask("b", keys) == 0
    assert it.ask("a", keys) == 2
    it.load("a", keys)
    it.end()
    assert it.held == 0


def test_what_others_hold_is_waited_for() -> None:
    """All slots that may be held are held for another request, which waits for the engine: deferred, never a hit that
    could be evicted, and never a miss, since no operation is late.
    """
    it = bed(slots=8, reserved=4)
    mine, theirs = prefix(2, "mine"), prefix(4, "theirs")
    it.core.put([*mine, *theirs])
    it.add("them")
    it.add("me")
    for _ in range(5):
        assert it.ask("them", theirs) == 4
        assert it.ask("me", mine) is None
        it.end()
        it.begin(1.0)
    assert it.ask("them", theirs) == 4
    it.load("them", theirs)
    assert it.ask("me", mine) == 2
    it.end()


def test_only_what_the_last_pass_wanted_is_gathered() -> None:
    """The window group has chunks for a short prefix only: the chunks of the long one are not read.

    They were asked about first, but the last pass counts. A run before a gap is not wanted either.
    """
    it = StagedBed(make_core(groups=(full(4), window(8)), slots=40, tiers=[disk(write="read_only")]))
    whole, windowed = prefix(10, group=0), prefix(10, group=1)
    it.core.keep_below([*whole, windowed[2], windowed[3], windowed[8]])
    it.add("a")
    assert it.ask_both("a", whole, windowed, 2) is None
    it.end()
    it.run_io()
    it.begin(0.01)
    assert it.ask_both("a", whole, windowed, 2) == 4
    it.end()
    ready = it.core.ready()
    assert ready == {*whole[:4], windowed[2], windowed[3]}


def test_windows_find_room_beside_a_long_prefix() -> None:
    """If a prefix could take the whole budget of a request, its windows would be misses, and the hit empty.

    So each group has its share.
    """
    it = StagedBed(make_core(groups=(full(4), window(8)), slots=16, tiers=[disk(write="read_only")]))
    whole, windowed = prefix(40, group=0), prefix(40, group=1)
    it.core.keep_below([*whole, *windowed])
    it.add("a")
    for _ in range(6):
        it.begin(0.01)
        end = it.ask_both("a", whole, windowed, 2)
        it.end()
        it.run_io()
    assert end == 13, "of 16 chunks the window may want three"
    it.load("a", [*whole[:13], windowed[11], windowed[12]])
    assert it.held == 0


def test_budgets_of_groups_fit_together() -> None:
    """Windows get the chunks that they need, other groups an equal share, and each at least one chunk."""

    def budgets(*groups: object, chunks_max: int) -> tuple[int, ...]:
        core = make_core(groups=groups, slots=4)  # type: ignore[arg-type]  # groups of two makers
        geometry: Geometry = core.geometry
        return group_budgets(geometry, chunks_max)

    assert budgets(full(4), chunks_max=51) == (51,)
    assert budgets(full(4), window(8), window(8), chunks_max=51) == (45, 3, 3)
    assert budgets(full(4), full(4), full(4), chunks_max=50) == (16, 16, 16)
    assert budgets(full(4), window(400), chunks_max=20) == (10, 10)
    assert budgets(full(4), window(8), chunks_max=1) == (1, 1)


def test_a_reset_makes_every_question_new() -> None:
    """No earlier question is answered, nothing stays held, and deadlines of deferred requests continue."""
    it = bed(tier=disk())
    keys = prefix(4)
    it.core.put(keys[:2])
    it.run_io()
    it.core.keep_below(keys[2:])
    it.add("a")
    assert it.ask("a", keys) is None
    it.end()
    it.lookups.reset()
    it.core.manager.reset_cache("all")
    it.run_io()
    it.begin(0.01)
    assert it.ask("a", keys) == 0
    it.end()
    assert it.held == 0


def test_hints_bound_what_is_loaded() -> None:
    """``max_load_tokens`` counts from the first absent chunk; 0 asks no tier; ``load_tiers`` names the tiers to ask."""
    it = bed(tier=objects())
    keys = prefix(6)
    it.core.put(keys)
    it.add("eight", max_load_tokens=8)
    it.add("none", max_load_tokens=0)
    it.add("no host", load_tiers=frozenset({"objects"}))
    assert it.ask("eight", keys, 2) == 2
    assert it.ask("none", keys) == 0
    assert it.look("no host", keys[0], 0) is RETRY
    it.end()


def test_unasked_chunks_are_released() -> None:
    """The engine's own cache has the front of the prompt now: chunks no longer asked about are released."""
    it = bed()
    keys = prefix(6)
    it.core.put(keys)
    it.add("a")
    assert it.ask("a", keys) == 6
    it.end()
    assert it.held == 6
    it.begin(0.01)
    assert it.ask("a", keys, 4) == 2
    it.end()
    assert it.held == 2


def test_misses_are_cheap_to_ask_for() -> None:
    """A prompt without any chunk: one miss ends the scan, and nothing is remembered for it."""
    it = bed()
    it.add("a")
    assert it.look("a", prefix(1)[0], 0) is MISS
    it.end()
    assert it.held == 0


CALLS_PER_HIT = 14
"""Calls of functions, Python and C, for one chunk that is readable: an engine asks about every chunk of a prompt."""


def calls_of_a_prompt(chunks: int) -> tuple[int, int]:
    """Calls of functions in the questions about a readable prompt, and in the preparation of its load."""
    it, keys = bed(slots=64), prefix(chunks)
    it.core.put(keys)
    it.add("a")
    it.begin(1.0)
    asking = calls_of(it.ask, "a", keys)
    ctx = it.lookups.request_context("a")
    return asking, calls_of(it.core.manager.prepare_load, keys, ctx)


def test_a_readable_chunk_costs_few_calls() -> None:
    """Promise 5. vLLM's own tiering makes about as many; each call beyond that slows every step with a prompt down."""
    (short, first), (long, second) = calls_of_a_prompt(16), calls_of_a_prompt(48)
    assert long - short <= 32 * CALLS_PER_HIT
    assert first == second, "held chunks become a load without a call per chunk"


def test_a_load_of_what_was_answered_keeps_its_chunks() -> None:
    """The holds of the questions become those of the load, however its keys are ordered, and end with it once."""
    it, keys = bed(), prefix(6)
    it.core.put(keys)
    it.add("a")
    assert it.ask("a", keys) == 6
    manager = it.core.manager
    grant = manager.prepare_load(keys[::-1], it.lookups.request_context("a"))
    it.lookups.close_lookup("a")
    it.end()
    slots = it.core.host.slots
    assert [slots.key(ref.slot) for ref in grant.slots] == list(keys[::-1])
    assert [slots.pins[ref.slot] for ref in grant.slots] == [1] * 6
    manager.passages.validate()
    press(it)
    assert it.core.ready() >= set(keys), "pinned by the load"
    manager.complete_load(grant.slots)
    assert [slots.pins[ref.slot] for ref in grant.slots] == [0] * 6
    assert manager.passages.account.total == 0
    manager.passages.validate()
