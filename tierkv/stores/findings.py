"""Findings: what is wrong at rest, as values that commands print one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

Progress = Callable[[int, int], None]
"""Called with the chunks and the bytes handled since the previous call."""


def no_progress(_chunks: int, _bytes: int) -> None:
    """Show nothing."""


class FindingKind(StrEnum):
    """Classes of what can be wrong at rest."""

    DAMAGED = "damaged"
    """A check of the frame, or of the listing, failed."""
    UNREADABLE = "unreadable"
    """The backend cannot read it."""
    MISSING = "missing"
    """It is listed, and not there, though no other process may remove it."""
    UNUSABLE = "unusable"
    """The place, or the namespace, cannot be listed or opened."""
    NOT_WRITTEN = "not written"
    """The target did not take the frame, or gave other bytes back."""
    REFUSED = "refused"
    """The target may not hold such a frame."""
    INCOMPLETE = "incomplete"
    """Work was left undone."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    """Class of the fault."""
    place: str
    """Name of the tier, or of the backend."""
    namespace: str
    """Fingerprint in hex; empty: it concerns the whole place."""
    subject: str
    """Key in hex, or what else is concerned."""
    reason: str
    """Cause, in words."""
    action: str = ""
    """Action that was taken; empty: none."""

    def __str__(self) -> str:
        """One line."""
        where = f"{self.place}/{self.namespace[:8]}" if self.namespace else self.place
        done = f" ({self.action})" if self.action else ""
        return f"{self.kind.value}: {where} {self.subject}: {self.reason}{done}"
