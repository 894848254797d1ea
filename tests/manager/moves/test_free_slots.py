"""Free slots of a host tier over a write-back tier: as many as one step takes, within bounds."""

from __future__ import annotations

import pytest
from core_parts import Core, disk, make_core
from edge_moves import put, run

from tierkv.manager.moves.write_back import FREE_SHARE, FREE_SHARE_MAX, LargestStep

SLOTS = 64


def fill(core: Core, first: int, steps: int, chunks: int) -> None:
    """Store ``chunks`` in each step. The tier writes what it is given before the next one."""
    for step in range(steps):
        put(core, run(first + step * chunks, chunks))
        core.finish_all()
        core.begin()


@pytest.mark.parametrize("chunks", [8, 16, 32])
def test_large_steps_lose_nothing_over_a_tier_that_keeps_up(chunks: int) -> None:
    """Each store finds free slots, up to half of the host tier in a step, so that prompts have no holes below."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back")])
    fill(core, 0, 1000 // chunks, chunks)
    stored = set(run(0, 1000 // chunks * chunks))
    assert core.ready() | set(core.lower[0].residency) == stored
    assert core.counters.demotions_dropped == {}
    core.manager.validate()


def test_small_steps_keep_an_eighth_free() -> None:
    """A large step is forgotten when small ones have taken four times as many slots as there are."""
    core = make_core(slots=SLOTS, tiers=[disk(write="back")])
    fill(core, 0, 10, 32)
    assert core.host.free == SLOTS * FREE_SHARE_MAX
    fill(core, 1000, 4 * SLOTS, 1)
    assert core.host.free == SLOTS * FREE_SHARE


def test_the_largest_step_is_counted_in_slots() -> None:
    """Steps without stores, such as thousands of decode steps, do not make it forget the prompts between them."""
    largest = LargestStep(10)
    taken = 0
    for taken in (7, 7, 7, 8, *[8] * 1000, 12):
        largest.note(taken)
    assert largest.num_slots == 7
    for taken in range(13, 50):
        largest.note(taken)
    assert largest.num_slots == 1


def test_a_tier_that_is_attached_late_learns_from_single_steps() -> None:
    """All that was stored before it, over many steps, is not taken for one large step."""
    core = make_core(slots=SLOTS, tiers=[])
    fill(core, 0, 200, 1)
    core.manager.attach(make_core(tiers=[disk(write="back")]).lower[0])
    fill(core, 1000, 1, 1)
    assert core.host.free == SLOTS * FREE_SHARE
