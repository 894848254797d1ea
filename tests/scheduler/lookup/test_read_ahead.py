"""Reads at arrival: the queue hides the tier, and what the engine has itself is not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from calls import CountedKey, lookups_of
from core_parts import Core, disk, make_core

from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.step_budget import KEYS_PER_LOOK
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.lookup.read_ahead import CREDIT_CHUNKS
from tierkv.types.engine import GroupKind, GroupSpec, StepOutput
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Verb


def reads(core: Core) -> list[bytes]:
    """Keys that are read, now; all reads end well."""
    return [key for op in core.finish_all() if op.verb is Verb.READ for key in op.keys]


def test_chunks_are_there_when_the_engine_asks() -> None:
    """Two requests wait in the queue: both are read in the order of arrival, and answered at the first question."""
    core = make_core(slots=64, tiers=[disk(write="read_only")])
    first, second = core.arrive(17, "a"), core.arrive(range(100, 117), "b")
    core.keep_below([*core.truth.keys(first), *core.truth.keys(second)])
    assert not reads(core), "the engine may ask in the step of the arrival"
    core.begin()
    assert reads(core) == [*core.truth.keys(first), *core.truth.keys(second)]
    assert [core.ask(first), core.ask(second)] == [16, 16]
    assert not reads(core)
    assert (core.counters.chunks_read_ahead, core.counters.chunks_read_in_vain) == (8, 0)
    assert core.counters.deferrals == 0


def test_the_engine_asks_first() -> None:
    """A request that is asked about in the step of its arrival costs nothing here."""
    core = make_core(slots=64, tiers=[disk(write="read_only")])
    request = core.arrive(17)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    core.begin()
    assert core.counters.chunks_read_ahead == 0


def test_a_quarter_of_the_slots_for_all_together() -> None:
    """Requests in the queue take no more than a quarter, and nothing from a request that was asked about."""
    core = make_core(slots=64, reserved=32, tiers=[disk(write="read_only")])
    waiting = [core.arrive(range(100 * i, 100 * i + 17), f"r{i}") for i in range(1, 9)]
    for request in waiting:
        core.keep_below(core.truth.keys(request))
    for _ in range(4):
        core.begin()
        reads(core)
    assert core.counters.chunks_read_ahead == 8
    assert core.manager.passages.account.total == 0
    assert core.host.room == 64, "none of them is held"


def test_it_goes_on_for_all_that_follow() -> None:
    """Chunks that were read for a request do not count against the bound once the request is answered."""
    core = make_core(slots=64, reserved=32, tiers=[disk(write="read_only")])
    for i in range(1, 9):
        request = core.arrive(range(100 * i, 100 * i + 17), f"r{i}")
        core.keep_below(core.truth.keys(request))
        core.begin()
        assert reads(core) == core.truth.keys(request), i
        assert core.ask(request) == 16
        core.schedule(request, computed=0, scheduled=17, ids=[list(range(1, 6))])
        core.scheduler.request_finished(request, [[]])
    assert core.counters.chunks_read_ahead == 32


def test_an_aborted_request_is_counted_and_slows_the_rest_down() -> None:
    """Requests that never run must not cost more than one read in twenty: then nothing more is read ahead."""
    core = make_core(slots=4000, tiers=[disk(write="read_only")])
    for i in range(40):
        request = core.arrive(range(1000 * i, 1000 * i + 17), f"r{i}")
        core.keep_below(core.truth.keys(request))
        core.begin()
        reads(core)
        core.scheduler.request_finished(request, [])
    assert core.counters.chunks_read_in_vain == core.counters.chunks_read_ahead
    assert core.counters.chunks_read_ahead <= CREDIT_CHUNKS


def test_what_the_engine_most_likely_has_is_not_read() -> None:
    """A second turn of a conversation: the first turn is on the GPU, so only the new chunks are read."""
    core = make_core(slots=64, tiers=[disk(write="read_only")])
    turn = core.arrive(17, "first")
    assert core.ask(turn) == 0
    meta = core.schedule(turn, computed=0, scheduled=17, ids=[list(range(1, 6))])
    core.report(*[job.job_id for job in meta.stores])
    core.scheduler.request_finished(turn, [[]])
    core.schedule(core.arrive(4, "other"), computed=0, scheduled=4, ids=[[64]])
    core.scheduler.reset_cache()
    second = core.arrive(33, "second")
    core.keep_below(core.truth.keys(second))
    core.begin()
    assert reads(core) == core.truth.keys(second)[4:]


WINDOWED = (GroupSpec(4, (64,)), GroupSpec(4, (64,), kind=GroupKind.SLIDING_WINDOW, window_tokens=8))


def test_windows_are_read_where_the_hit_ends() -> None:
    """The tier has 6 of 8 chunks of full attention: the last window before that end is read, and no other one."""
    core = make_core(slots=64, tiers=[disk(write="read_only")], groups=WINDOWED)
    request = core.arrive(33, "a")
    full, window = ([*group.keys] for group in core.record(request).search_groups)
    core.keep_below([*full[:6], *window])
    core.begin()
    read = reads(core)
    tokens = core.ask(request)
    assert tokens == 24
    assert set(read) == {*full[:6], *window[4:6]}
    assert not reads(core), "the question needs no further chunk"
    assert core.counters.chunks_read_in_vain == 0


def test_a_hit_with_a_hole_in_its_window_ends_before_it() -> None:
    """Read what the question wants, also where the longest prefix has no window."""
    core = make_core(slots=64, tiers=[disk(write="read_only")], groups=WINDOWED)
    request = core.arrive(33, "a")
    full, window = ([*group.keys] for group in core.record(request).search_groups)
    core.keep_below([*full, *window[:4]])
    core.begin()
    read = reads(core)
    assert core.ask(request) == 16
    assert read
    assert set(read) <= {*full[:4], *window[:4]}
    assert not reads(core)


def test_no_more_than_the_hints_allow_is_read() -> None:
    """A request that may load 8 tokens gets 2 chunks."""
    core = make_core(slots=64, tiers=[disk(write="read_only")])
    request = core.arrive(33, "a", tierkv={"max_load_tokens": 8})
    core.keep_below(core.truth.keys(request))
    core.begin()
    assert reads(core) == core.truth.keys(request)[:2]


@pytest.mark.parametrize("change", [{"reads_ahead": False}])
def test_it_can_be_switched_off(change: dict[str, bool]) -> None:
    """A user may prefer no read that was not asked for."""
    limits = dataclasses.replace(SchedulerLimits(), **change)
    core = make_core(slots=64, tiers=[disk(write="read_only")], limits=limits)
    request = core.arrive(17)
    core.keep_below(core.truth.keys(request))
    core.begin()
    assert not reads(core)
    assert core.scheduler.build_connector_meta(StepOutput()).loads == ()


STEP_KEYS, CHUNKS = 64, 32


def queue_of(requests: int, *, chunks: int = CHUNKS) -> Core:
    """Requests in the queue whose chunks are all in the host tier; their keys are counted when they are looked up."""
    core = make_core(slots=requests * chunks, tiers=[disk(write="read_only")], step_keys=STEP_KEYS)
    for number in range(requests):
        first = 10_000 * number
        request = core.arrive(range(first, first + 4 * chunks + 1), f"r{number}")
        keys = core.record(request).groups[0].keys
        core.put(keys)
        core.finish_all()
        keys[:] = [Key(CountedKey(key)) for key in keys]
    return core


def budget_of_a_part(core: Core) -> int:
    """Key operations that one part may do in a step."""
    return core.manager.budget.common + core.manager.budget.share_keys


def test_what_is_in_the_host_tier_costs_its_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident prompts in the queue are pinned while others are read: a bounded number per step, however many wait."""
    core = queue_of(24)
    unpinned: list[int] = []
    unpin = core.host.unpin

    def count(slots: Iterable[int]) -> None:
        some = list(slots)
        unpinned.append(len(some))
        unpin(some)

    monkeypatch.setattr(core.host, "unpin", count)
    core.manager.begin_step(1.0)
    unpinned.clear()
    keys_max = budget_of_a_part(core)
    core.scheduler.begin_step(1.0)
    assert 0 < sum(unpinned) <= SLOTS_PER_KEY * keys_max
    for _ in range(24):
        core.begin()
    assert not core.scheduler._ahead._waiting, "later steps reach all of them"


def test_what_the_engine_has_costs_its_part_of_a_step() -> None:
    """Prompts that are wholly in the engine's cache: as many chunks are looked up there as the budget allows."""
    core = queue_of(4, chunks=8 * KEYS_PER_LOOK * STEP_KEYS)
    cache = core.scheduler._ahead._cache
    for record in core.scheduler._records.values():
        cache.add(record.groups[0].keys, 1 << 20)
    cache.advance(1 << 20)
    core.manager.begin_step(1.0)
    keys_max = budget_of_a_part(core)
    assert 0 < lookups_of(core.scheduler.begin_step, 1.0) <= KEYS_PER_LOOK * keys_max
    assert not core.counters.chunks_read_ahead
