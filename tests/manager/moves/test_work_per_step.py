"""Promise 5: writes, victims and deletions of a step are bounded by its budget, and every tier proceeds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from at_rest import content_of
from calls import CountedKey, lookups_of
from core_parts import DISK, FRAME_BYTES, Core, disk, make_core, with_limits
from edge_moves import put, run, written

from tierkv.manager.contract import RequestContext
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.step_budget import KEYS_PER_LOOK
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, TierOp, Verb

STEP_KEYS = 64
SMALL = FRAME_BYTES // 64
"""Bytes of a frame at rest that was compressed well."""


def step(core: Core, verb: Verb, kind: OutcomeKind = OutcomeKind.OK) -> list[TierOp]:
    """Run one step in which everything ends alike. Returns the instructions of one kind."""
    core.begin(core.now + 0.1)
    ops = core.manager.take_ops()
    for op in ops:
        core.finish(op, kind)
    core.manager.validate()
    return [op for op in ops if op.verb is verb]


def crowded(tiers: int = 1, step_keys: int = STEP_KEYS) -> Core:
    """Disks that are full of small frames, 64 of which must leave for one chunk of the host tier."""
    core = make_core(tiers=[disk(frames=4, name=f"disk{i}") for i in range(tiers)], step_keys=step_keys)
    for tier in core.lower:
        tier.load_index(content_of([(key, SMALL) for key in run(1000, 4 * 64)]))
    put(core, run(0, 1))
    return core


def test_no_instruction_is_larger_than_a_step_can_complete() -> None:
    """A completion is applied whole, so one of a thousand keys would exceed the budget."""
    spec = replace(disk(), capabilities=replace(DISK, preferred_batch=256))
    core = make_core(slots=256, tiers=[spec], step_keys=STEP_KEYS)
    put(core, run(0, 256))
    sizes = [len(op.keys) for op in core.finish_all()]
    assert sum(sizes) == 256
    assert max(sizes) <= STEP_KEYS // 4


def test_a_step_writes_a_bounded_number_of_chunks() -> None:
    """After a long outage thousands wait. All of them are written in the end."""
    core = make_core(slots=512, tiers=[disk()], step_keys=STEP_KEYS)
    put(core, run(0, 512))
    counts = []
    while core.lower[0].write_queue:
        counts.append(sum(len(op.keys) for op in step(core, Verb.WRITE)))
    assert sum(counts) == 512
    assert max(counts) <= STEP_KEYS


def test_a_large_frame_waits_until_small_victims_are_chosen() -> None:
    """Choosing 22,000 victims in one call took 10 ms, and applying their deletions 46 ms. The frame is not dropped
    meanwhile."""
    core, counts = crowded(), [0]
    while not core.counters.cascades:
        step(core, Verb.DELETE)
        counts.append(core.counters.evictions["disk0"])
        assert len(counts) < 64
    assert counts[-1] == 64
    assert max(later - earlier for earlier, later in pairwise(counts)) < STEP_KEYS
    assert not core.counters.cascades_dropped


def test_a_frame_waits_though_another_tier_took_all_victims_of_the_step() -> None:
    """A tier that may not choose a victim in this step has one in the next: nothing is dropped for that."""
    core = crowded(tiers=8, step_keys=16)
    while len(core.counters.cascades) < 8:
        step(core, Verb.DELETE)
        assert not core.counters.cascades_dropped


def test_a_frame_that_finds_no_victims_is_dropped() -> None:
    """Waiting for victims ends when none are left: a flush must not wait for ever."""
    core = crowded()
    core.lower[0].residency.begin_read(run(1000, 4 * 64))
    for _ in range(3):
        assert not step(core, Verb.WRITE)
    assert core.counters.cascades_dropped == {"disk0": 1}


def test_a_refused_deletion_is_repeated() -> None:
    """The queue of dispatch was full. A victim that is given up keeps its bytes in the tier, and counts as absent."""
    core = crowded()
    refused = {key for op in step(core, Verb.DELETE, OutcomeKind.REFUSED) for key in op.keys}
    assert refused
    deleted: set[object] = set()
    for _ in range(100):
        deleted |= {key for op in step(core, Verb.DELETE) for key in op.keys}
    assert refused <= deleted
    assert core.counters.cascades == {"disk0": 1}
    assert not core.counters.cascades_dropped
    assert not core.lower[0].residency.num_deleting


def test_a_deletion_that_can_never_be_made_is_not_repeated() -> None:
    """A read-only tier refuses every deletion of a corrupt frame."""
    spec = with_limits(disk(), write="read_only")
    core = make_core(tiers=[replace(spec, capabilities=replace(DISK, read_only=True))])
    core.keep_below(run(0, 1))
    core.lower[0].residency.schedule_delete(run(0, 1)[0])
    assert step(core, Verb.DELETE, OutcomeKind.REFUSED)
    core.begin(100.0)
    assert not core.manager.take_ops()


def test_deletions_in_flight_are_bounded() -> None:
    """Otherwise the deletions of a slow tier fill the queue of dispatch, which then refuses reads."""
    core = make_core(tiers=[disk()], step_keys=STEP_KEYS)
    core.keep_below(run(0, 512))
    core.manager.reset_cache("all")
    ops: list[TierOp] = []
    for _ in range(32):
        core.begin()
        ops += core.manager.take_ops()
    assert 0 < sum(len(op.keys) for op in ops) <= STEP_KEYS
    for op in ops:
        core.finish(op)
    core.finish_all()
    assert not core.lower[0].phase.emptying


def test_no_tier_uses_up_the_budget_of_the_others() -> None:
    """Sixteen tiers share a few keys: after sixteen steps each of them has got some."""
    tiers = [disk(name=f"disk{i}") for i in range(16)]
    core = make_core(slots=256, tiers=tiers, step_keys=16)
    put(core, run(0, 256))
    served = {op.tier for _ in range(16) for op in step(core, Verb.WRITE)}
    assert served == set(range(16))


def test_a_deletion_is_scheduled_once() -> None:
    """Two reads of a corrupt frame each delete it. A second deletion could delete what was written after the first."""
    core = make_core(tiers=[disk()])
    core.keep_below(run(0, 1))
    for _ in range(2):
        core.lower[0].residency.schedule_delete(run(0, 1)[0])
    assert [op.keys for op in step(core, Verb.DELETE)] == [tuple(run(0, 1))]
    put(core, run(0, 1))
    assert written(core) == run(0, 1)


def many(tiers: int, write: str = "through") -> Core:
    """Core over many disks."""
    specs = [disk(name=f"disk{i}", write=write) for i in range(tiers)]
    return make_core(slots=256, tiers=specs, step_keys=STEP_KEYS)


def lookups_of_a_store(core: Core, chunks: int) -> int:
    """Lookups of keys in the call that ends a store."""
    keys = [Key(CountedKey(key)) for key in run(0, chunks)]
    grant = core.manager.prepare_store([(key, 0) for key in keys], RequestContext("writer"))
    assert grant is not None
    return lookups_of(core.manager.complete_store, grant.slots)


@pytest.mark.parametrize("write", ["through", "on_reuse"])
def test_the_end_of_a_store_costs_the_same_for_every_number_of_tiers(write: str) -> None:
    """Its chunks are offered to as many tiers as the budget allows, each to all of them. Later steps do the rest."""
    few, some = lookups_of_a_store(many(1, write), 128), lookups_of_a_store(many(8, write), 128)
    assert some <= max(few, SLOTS_PER_KEY * STEP_KEYS)
    assert lookups_of_a_store(many(32, write), 128) <= SLOTS_PER_KEY * STEP_KEYS


def test_every_chunk_of_a_store_reaches_every_tier() -> None:
    """Also the chunks for which the step that stored them had no budget."""
    core = many(24)
    put(core, run(0, 128))
    assert core.manager._tier_io.cascades.ready
    assert core.manager.has_pending_changes, "a flush waits for them"
    for _ in range(1000):
        step(core, Verb.WRITE)
        if not core.manager.has_pending_changes:
            break
    assert core.counters.cascades == {f"disk{i}": 128 for i in range(24)}
    assert not core.counters.cascades_dropped


def test_a_step_writes_fewer_chunks_where_many_tiers_have_them() -> None:
    """A chunk's row in one tier is found past those of all others, so it counts as more where there are many tiers."""
    core = many(4 * KEYS_PER_LOOK)
    put(core, run(0, 128))
    counts = [sum(len(op.keys) for op in step(core, Verb.WRITE)) for _ in range(200)]
    assert sum(counts) > STEP_KEYS, "they are written"
    assert max(counts) <= STEP_KEYS // 4
