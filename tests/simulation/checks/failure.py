"""Violation: a broken promise, with its name."""

from __future__ import annotations


class Violation(AssertionError):  # noqa: N818 - it is a finding; nothing went wrong in this code
    """An invariant does not hold.

    Attributes:
        invariant: its name, one of those that docs/explanation/simulation.md lists.
    """

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


def demand(condition: object, invariant: str, detail: str) -> None:
    """Raise unless a condition holds.

    Raises:
        Violation: it does not.
    """
    if not condition:
        raise Violation(invariant, detail)
