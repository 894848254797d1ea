"""Budget of a step: bounded together, divided fairly, full again in the next step."""

from __future__ import annotations

from tierkv.manager.step_budget import KEYS_PER_LOOK, StepBudget


def test_all_parts_together_never_take_more_than_the_budget() -> None:
    """Promise 5: one number bounds the work of a step, however many parts want some."""
    budget = StepBudget(100)
    shares = [budget.share() for _ in range(4)]
    budget.begin_step()
    assert 90 < sum(share.take(1000) for share in shares) <= 100
    assert [share.left for share in shares] == [0, 0, 0, 0]


def test_a_part_keeps_its_share_whatever_the_others_take() -> None:
    """No part starves another one."""
    budget = StepBudget(100)
    greedy, modest = budget.share(), budget.share()
    budget.begin_step()
    assert greedy.take(1000) == 75
    assert modest.take(1000) == 25


def test_the_next_step_has_the_full_budget_again() -> None:
    """A step that uses all of it takes nothing from the next one."""
    budget = StepBudget(64)
    share = budget.share()
    assert share.take(1000) == 64, "also before the first step"
    budget.begin_step()
    assert share.left == 64
    assert share.take(10) == 10
    assert share.left == 54


def test_every_part_proceeds_in_every_step_however_small_the_budget_is() -> None:
    """A small budget makes a stack slow, but it always proceeds."""
    budget = StepBudget(2)
    shares = [budget.share() for _ in range(8)]
    budget.begin_step()
    assert all(share.take(5) for share in shares)


def test_a_job_may_have_more_chunks_than_a_step_may_move() -> None:
    """A look costs an eighth of a key operation: without that, grants and jobs of long prompts would be cut."""
    assert StepBudget(64).looks_max == 64 * KEYS_PER_LOOK > 64
