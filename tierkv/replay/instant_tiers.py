"""Lower tiers that perform each operation at once and keep no bytes: dispatch of a replay."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.config.resolving import ResolvedTier
from tierkv.types.keys import Key
from tierkv.types.tier_ops import ABSENT, OK, Completion, Outcome, OutcomeKind, TierOp, Verb


@dataclass(slots=True)
class TierTraffic:
    """Chunks moved from and to one tier, by minute since the first request."""

    name: str
    """Name of the tier."""
    read: Counter[int] = field(default_factory=Counter)
    """Chunks read in each minute."""
    written: Counter[int] = field(default_factory=Counter)
    """Chunks written in each minute."""
    not_written: int = 0
    """Chunks that were to be written, and were evicted before."""


class InstantTiers:
    """Tiers of one stack, empty at first. Only a tier without an index remembers which chunks it has.

    Args:
        tiers: the tiers, by number.
        frame_bytes: bytes of the frame of a chunk.

    Attributes:
        traffic: chunks moved, by tier.
        completed: results that the manager has not taken in.
    """

    def __init__(self, tiers: Sequence[ResolvedTier], frame_bytes: int) -> None:
        self.traffic = [TierTraffic(tier.config.name) for tier in tiers]
        self.completed: deque[Completion] = deque()
        self._moved = Outcome(OutcomeKind.OK, frame_bytes)
        self._content: list[set[Key] | None] = [
            None if tier.backend.capabilities.authoritative_index else set() for tier in tiers
        ]

    def submit(self, op: TierOp, minute: int) -> None:
        """Perform an operation."""
        content, traffic = self._content[op.tier], self.traffic[op.tier]
        outcomes: list[Outcome] = []
        match op.verb:
            case Verb.READ:
                outcomes = [self._moved if content is None or key in content else ABSENT for key in op.keys]
                traffic.read[minute] += len(op.keys)
            case Verb.WRITE:
                outcomes = [self._moved] * len(op.keys)
                traffic.written[minute] += len(op.keys)
                if content is not None:
                    content.update(op.keys)
            case Verb.PROBE:
                outcomes = [OK if content is None or key in content else ABSENT for key in op.keys]
            case Verb.DELETE:
                outcomes = [OK] * len(op.keys)
                if content is not None:
                    content.difference_update(op.keys)
        self.completed.append(Completion(op.op_id, tuple(outcomes)))
