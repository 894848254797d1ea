"""Budget of one engine step, in key operations. Sans-IO.

Every call on the engine's thread does a bounded number of operations on keys, whatever the prompt, the number of tiers,
waiting requests or completions. What is left over waits for the next step, in the queue of the part that does it.
"""

from __future__ import annotations

STEP_KEYS_MAX = 1024
"""Default number of key operations per step: about three milliseconds' work."""

KEYS_PER_LOOK = 8
"""Chunks that are looked up, or entered in a table, in one batch for the cost of one key operation."""


class StepBudget:
    """Key operations that the parts of a core may do in one step.

    Half of them is divided equally: each part has its *share*, which no other part can use up, so none starves. The
    other half is common, first come, first served.

    Args:
        keys_max: key operations per step.
    """

    def __init__(self, keys_max: int = STEP_KEYS_MAX) -> None:
        self.keys_max = keys_max
        self._parts = 0
        self.share_keys = 0
        """Key operations that each part has in any case; at least one, so that every part proceeds in every step."""
        self.step = 0
        """Number of the step. Shares renew themselves by it."""
        self.common = keys_max - keys_max // 2
        """Key operations left of the half that is not divided."""

    def begin_step(self) -> None:
        """Begin a step with the full budget."""
        self.step += 1
        half = self.keys_max // 2
        self.common = self.keys_max - half
        self.share_keys = half // (self._parts or 1) or 1

    @property
    def looks_max(self) -> int:
        """Number of chunks that one call holds, or sends to the GPU, at once."""
        return KEYS_PER_LOOK * self.keys_max

    def share(self) -> BudgetShare:
        """Share of one more part."""
        self._parts += 1
        self.share_keys = self.keys_max // 2 // self._parts or 1
        return BudgetShare(self)


class BudgetShare:
    """Share of one part in the budget of each step."""

    __slots__ = ("_budget", "_own", "_step")

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._step = -1
        self._own = 0

    @property
    def own_left(self) -> int:
        """Key operations left of the share itself. Work that recurs in every step takes no more."""
        budget = self._budget
        if self._step != budget.step:
            self._step, self._own = budget.step, budget.share_keys
        return self._own

    @property
    def left(self) -> int:
        """Key operations that the part may still do in this step."""
        budget = self._budget
        if self._step != budget.step:
            self._step, self._own = budget.step, budget.share_keys
        return self._own + budget.common

    def take(self, wanted: int) -> int:
        """Take up to ``wanted`` key operations. Returns how many were left."""
        budget = self._budget
        if self._step != budget.step:
            self._step, self._own = budget.step, budget.share_keys
        if wanted <= self._own:  # usual, and without a further call
            self._own -= wanted
            return wanted
        beyond = min(wanted - self._own, budget.common)
        granted, self._own = self._own + beyond, 0
        budget.common -= beyond
        return granted
