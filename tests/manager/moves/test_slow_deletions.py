"""A tier that deletes slowly is full in the end: chunks wait for their room, and none leaves for a refused chunk."""

from __future__ import annotations

import pytest
from core_parts import Core, disk, make_core

from tierkv.manager.contract import RequestContext
from tierkv.types.keys import Key, make_key
from tierkv.types.tier_ops import TierOp, Verb
from tierkv.types.transfers import NO_REQUEST, SlotRef

ROOM, CHUNKS = 26, 40


class SlowDeletions:
    """Tier below a core whose writes end in the next step, and whose deletions end one by one, each after a while."""

    def __init__(self, core: Core, steps: int) -> None:
        self._core = core
        self._steps = steps
        self._pending: list[tuple[int, TierOp]] = []  # with the steps that are left

    def settle(self) -> None:
        """Step until nothing is due or under way."""
        while self._core.manager.has_pending_changes or self._pending:
            self._step()

    def _step(self) -> None:
        core = self._core
        core.begin(core.now + 0.1)
        ended, self._pending = (
            [op for left, op in self._pending if not left],
            [(left - 1, op) for left, op in self._pending if left],
        )
        for op in ended:
            core.finish(op)
        deletions = 0
        for op in core.manager.take_ops():
            deletions += op.verb is Verb.DELETE
            self._pending.append((deletions * self._steps if op.verb is Verb.DELETE else 0, op))
        core.manager.validate()


def keys_of(prompt: str) -> list[Key]:
    """Key per chunk of a prompt."""
    return [make_key(b"%s %8d" % (prompt.encode(), number), 0) for number in range(CHUNKS)]


@pytest.mark.parametrize("at_once", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_two_prompts_in_turn_fill_a_tier_that_deletes_slowly(steps: int, at_once: int) -> None:
    """Both do not fit. Victims for a chunk that was then refused left room that no chunk was allowed to take.

    The tier held 19 chunks of 26 for that, and fourteen where the machine was busy.
    """
    core = make_core(slots=2 * CHUNKS, tiers=[disk(frames=ROOM)])
    prompts, tier = {prompt: keys_of(prompt) for prompt in ("first", "second")}, SlowDeletions(core, steps)
    for start in range(0, CHUNKS, at_once):
        for prompt, keys in prompts.items():
            offered = [(key, start + i + 1) for i, key in enumerate(keys[start : start + at_once])]
            grant = core.manager.prepare_store(offered, RequestContext(prompt))
            assert grant is not None
            core.manager.complete_store(grant.slots)
            tier.settle()
    stored = set(core.lower[0].residency)
    heads = [next(i for i, key in enumerate(keys) if key not in stored) for keys in prompts.values()]
    assert sum(heads) == len(stored) == ROOM
    assert not core.counters.cascades_dropped, "chunks wait for deletions, however long these take"


def test_a_chunk_whose_old_frame_makes_room_is_written_after_its_deletion() -> None:
    """Reads of listed chunks failed, so they are written again. Room for them is made by their old frames.

    Deleted beside its write, a chunk was listed and not stored.
    """
    core = make_core(slots=14, tiers=[disk(frames=8)])  # room for one more, and not for all that wait
    keys, (tier,) = keys_of("only")[:7], core.lower
    refs: list[SlotRef] = []
    for key in keys:
        grant = core.manager.prepare_store([(key, 1)], RequestContext(NO_REQUEST))
        assert grant is not None
        core.manager.complete_store(grant.slots)
        refs += grant.slots
    ends = SlowDeletions(core, steps=0)
    ends.settle()
    for key in keys:
        tier.mark_absent(key, core.now)  # a read has failed
    chunks = [(ref.slot, key) for ref, key in zip(refs, keys, strict=True)][::-1]
    core.manager._tier_io.cascades.queue(tier, chunks, core.now)
    written: set[Key] = set()
    while core.manager.has_pending_changes:
        core.begin(core.now + 0.1)
        ops = core.manager.take_ops()
        assert not {key for op in ops if op.verb is Verb.DELETE for key in op.keys} & {
            key for op in ops if op.verb is Verb.WRITE for key in op.keys
        }
        written.update(key for op in ops if op.verb is Verb.WRITE for key in op.keys)
        for op in ops:
            core.finish(op)
        core.manager.validate()
    assert written == set(tier.residency) == set(keys)
