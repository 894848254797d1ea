"""Chunks that a caller wants gone: absent at once, and deleted a bounded number per step, however many there are."""

from __future__ import annotations

import pytest
from calls import CountedKey, calls_of, lookups_of
from core_parts import Core, disk, make_core, objects
from edge_moves import put, run

from tierkv.manager.contract import RequestContext
from tierkv.manager.moves import retention as module
from tierkv.manager.step_budget import KEYS_PER_LOOK
from tierkv.types.cache_events import HOST, CacheEventKind
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import TierOp, Verb

STEP_KEYS = 64
ASKING = RequestContext("asking")


def filled(chunks: int = 256) -> Core:
    """Core over a disk that has the chunks, and a shared tier."""
    core = make_core(slots=512, tiers=[disk(), objects()], step_keys=STEP_KEYS)
    core.keep_below(run(0, chunks))
    return core


def forget(core: Core, chunks: int) -> None:
    """Forget the first chunks."""
    core.manager.forgetting.forget(run(0, chunks), chunks)


@pytest.mark.parametrize("numbers", [(1, 100, KEYS_PER_LOOK * STEP_KEYS), (1000, 8192)])
def test_forgetting_a_long_prompt_makes_as_many_calls_as_a_short_one(numbers: tuple[int, ...]) -> None:
    """Forgetting 8,192 chunks took 18 ms of the engine's thread, in one call, and counting those left 3 ms."""
    counts = []
    for chunks in numbers:
        core = filled(0)
        manager, keys = core.manager, run(0, chunks)
        calls = calls_of(manager.forgetting.forget, keys, chunks)
        counts.append((calls, calls_of(lambda some: some.num_pending, manager.forgetting)))
    assert len(set(counts)) == 1


def test_no_chunk_is_found_from_the_call_on() -> None:
    """Also those whose deletion begins many steps later."""
    core = filled()
    put(core, run(0, 64))
    forget(core, 256)
    assert core.manager.present_prefix(run(0, 256), 0, 256, ASKING) == 0
    assert core.manager.resident_prefix(run(0, 64), 0, 64, ASKING) == 0
    assert {core.manager.lookup(key, ASKING) for key in run(0, 256)} == {LookupResult.MISS}
    core.begin(1.0)
    core.manager.take_ops()
    assert {core.manager.lookup(key, ASKING) for key in run(0, 256)} == {LookupResult.MISS}


def test_chunks_behind_the_front_of_a_long_prompt_expire_in_steps() -> None:
    """To forget 100,000 chunks took 13 ms of the engine's thread, in one call. No hit begins behind the front."""
    core = filled(1200)
    keys = [Key(CountedKey(key)) for key in run(0, 1200)]
    made: list[Key] = []
    late = (made.append(key) or key for key in keys)  # type: ignore[func-returns-value]  # it notes the keys
    bound = KEYS_PER_LOOK * STEP_KEYS
    assert lookups_of(core.manager.forgetting.forget, late, 1200) <= bound
    assert len(made) <= bound
    assert core.manager.forgetting.num_pending == 1200
    assert core.manager.present_prefix(run(0, 1200), 0, 1200, ASKING) == 0
    steps, taken = 0, len(made)
    while core.manager.forgetting.num_pending:
        core.begin(0.1 * steps)
        ops: list[TierOp] = []
        assert lookups_of(lambda into: into.extend(core.manager.take_ops()), ops) <= 16 * STEP_KEYS
        assert len(made) - taken <= bound
        for op in ops:
            core.finish(op)
        steps, taken = steps + 1, len(made)
    core.manager.validate()
    assert len(made) == 1200
    assert not len(core.lower[0].residency)
    assert not core.manager.retention.any


def test_a_step_deletes_a_bounded_number_in_every_tier() -> None:
    """In the end every chunk is gone from the disk, and every one was deleted once from the shared tier."""
    core = filled()
    put(core, run(0, 64))
    core.manager.forgetting.forget([Key(CountedKey(key)) for key in run(0, 256)], 256)
    deleted: list[list[Key]] = [[], []]
    for step in range(600):
        core.begin(0.1 * step)
        ops: list[TierOp] = []
        looked_up = lookups_of(lambda into: into.extend(core.manager.take_ops()), ops)
        # Each is looked up in a few tables, when its deletion begins and when it has ended.
        assert looked_up <= 8 * STEP_KEYS
        for op in ops:
            core.finish(op)
            if op.verb is Verb.DELETE:
                deleted[op.tier] += op.keys
        core.manager.validate()
    assert not core.manager.forgetting.num_pending
    assert [sorted(keys) for keys in deleted] == [sorted(run(0, 256))] * 2
    assert not core.manager.retention.any, "nothing is remembered of deleted chunks"


def test_chunks_count_as_pending_until_their_deletion_ends() -> None:
    """A caller waits until none is left. What a slow shared tier still deletes is not gone."""
    core = filled(0)
    forget(core, 4)
    assert core.manager.forgetting.num_pending == 4
    core.begin(1.0)
    [op] = core.manager.take_ops()
    for now in (2.0, 3.0):
        core.begin(now)
        assert not core.manager.take_ops()
        assert core.manager.forgetting.num_pending == 4
    core.finish(op)
    for now in range(4, 8):
        core.begin(float(now))
        core.manager.take_ops()
    assert core.manager.forgetting.num_pending == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_chunk_that_is_stored_again_stays(*, begun: bool) -> None:
    """Whether its deletion had begun or not; the lifetime that the new request asks for holds."""
    core = make_core(slots=512, step_keys=STEP_KEYS)
    put(core, run(0, 2))
    load = core.manager.prepare_load(run(0, 2), ASKING)
    forget(core, 2)
    if begun:
        core.begin(1.0)
        core.manager.take_ops()
    for key, hints in zip(run(0, 2), (RequestHints(), RequestHints(ttl_s=10.0)), strict=True):
        core.manager.prepare_store([(key, 0)], RequestContext("again", hints=hints))
    core.manager.complete_load(load.slots)
    assert not core.manager.forgetting.num_pending
    core.begin(5.0)
    core.finish_all()
    assert [core.manager.lookup(key, ASKING) for key in run(0, 2)] == [LookupResult.HIT] * 2
    core.begin(20.0)
    core.finish_all()
    assert [core.manager.lookup(key, ASKING) for key in run(0, 2)] == [LookupResult.HIT, LookupResult.MISS]


def test_chunks_to_forget_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the number of prompts. The head of a prompt is forgotten: its tail is not found."""
    monkeypatch.setattr(module, "LIFETIMES_MAX", 10)
    core = filled(32)
    forget(core, 32)
    assert core.manager.forgetting.num_pending == 10
    assert core.manager.present_prefix(run(0, 32), 0, 32, ASKING) == 0


def test_forgotten_chunks_leave_the_host_tier_together() -> None:
    """One by one, 500 of a step took 7 ms of the engine's thread."""

    def calls(chunks: int) -> int:
        core = make_core(slots=128, tiers=[disk()])
        put(core, run(0, chunks))
        core.finish_all()
        forget(core, chunks)
        core.begin(1.0)
        taken = calls_of(core.manager.take_ops)
        core.host.validate()
        assert core.host.free == 128, "all are gone from the host tier"
        events = [event for event in core.manager.take_events() if event.kind is CacheEventKind.REMOVED]
        assert {key for event in events if event.tier == HOST for key in event.keys} == set(run(0, chunks)), "and told"
        return taken

    assert calls(96) - calls(32) < 64 * 90
