"""A tier that writes slowly: the head of a prompt may be evicted while its tail is on its way, and none of it stays."""

from __future__ import annotations

from random import Random

import pytest
from core_parts import Core, disk, make_core

from tierkv.manager.contract import RequestContext
from tierkv.types.keys import Key, make_key
from tierkv.types.tier_ops import TierOp, Verb

ROOM, CHUNKS = 26, 40


def keys_of(prompt: str) -> list[Key]:
    """Key per chunk of a prompt."""
    return [make_key(b"%s %8d" % (prompt.encode(), number), 0) for number in range(CHUNKS)]


def offer(core: Core, prompt: str, start: int, stop: int) -> None:
    """Store some chunks of a prompt in the host tier."""
    offered = [(key, start + i + 1) for i, key in enumerate(keys_of(prompt)[start:stop])]
    grant = core.manager.prepare_store(offered, RequestContext(prompt))
    assert grant is not None
    core.manager.complete_store(grant.slots)


def start(core: Core) -> list[TierOp]:
    """Begin a step, and return the operations that it starts."""
    core.begin(core.now + 0.1)
    return core.manager.take_ops()


def settle(core: Core, rng: Random, pending: list[TierOp], ends: float = 1.0) -> None:
    """Run a step, and end each pending operation with that probability, in any order."""
    pending += start(core)
    for op in rng.sample(pending, len(pending)):
        if rng.random() < ends:
            pending.remove(op)
            core.finish(op)
    core.manager.validate()


def heads(core: Core) -> list[int]:
    """Chunks of each prompt that are found from its start, in the disk."""
    stored = set(core.lower[0].residency)
    return [next(i for i, key in enumerate(keys_of(prompt)) if key not in stored) for prompt in ("first", "second")]


def test_what_a_tier_has_already_is_kept_for_the_tail_that_needs_it() -> None:
    """A request computes chunks again that are in the disk behind a lost one. Its tail must not displace them."""
    core = make_core(slots=2 * CHUNKS, tiers=[disk(frames=ROOM)])
    core.keep_below(keys_of("first")[4:10])  # of an earlier process: no request is known that used them
    core.keep_below(keys_of("second")[: ROOM - 10])
    rng, pending = Random(2), list[TierOp]()
    for first in range(0, CHUNKS, 5):
        offer(core, "first", first, first + 5)
        settle(core, rng, pending)
    while core.manager.has_pending_changes or pending or core.lower[0].residency.num_deleting:
        settle(core, rng, pending)
    assert heads(core)[0] >= 10


def test_a_tail_whose_head_was_evicted_meanwhile_leaves() -> None:
    """It serves no request. It kept its place, and the next prompt's tail found no room for that."""
    core = make_core(slots=2 * CHUNKS, tiers=[disk(frames=ROOM)])
    offer(core, "first", 0, 8)
    core.finish_all()
    offer(core, "first", 8, 18)
    tail = start(core)  # these writes are slow
    assert sum(len(op.keys) for op in tail) == 10
    offer(core, "second", 0, 20)
    rng, pending = Random(1), list[TierOp]()
    while not core.counters.evictions["disk"]:
        settle(core, rng, pending)
    for op in tail:
        core.finish(op)
    while core.manager.has_pending_changes or pending or core.lower[0].residency.num_deleting:
        settle(core, rng, pending)
    assert sum(heads(core)) == len(set(core.lower[0].residency))
    assert core.counters.evictions["disk"] >= 10, "the tail counts as evicted"


@pytest.mark.parametrize("seed", range(40))
def test_two_prompts_in_turn_leave_heads_only(seed: int) -> None:
    """Whatever is on its way when victims are chosen: in the end no chunk is without those before it."""
    core, rng, pending = make_core(slots=2 * CHUNKS, tiers=[disk(frames=ROOM)]), Random(seed), list[TierOp]()
    for first in range(0, CHUNKS, 5):
        for prompt in ("first", "second"):
            offer(core, prompt, first, first + 5)
            settle(core, rng, pending, ends=rng.random())
    while core.manager.has_pending_changes or pending or core.lower[0].residency.num_deleting:
        settle(core, rng, pending)
    assert sum(heads(core)) == len(set(core.lower[0].residency))
    assert sum(heads(core)) >= ROOM - 2
    assert not [op for op in pending if op.verb is Verb.DELETE]
