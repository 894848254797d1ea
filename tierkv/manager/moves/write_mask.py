"""Which lower tiers the chunk in a host slot may be written to: by hints, by its end, by where its bytes come from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.moves.retention import Retention
from tierkv.structures.key_table import column
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key

TIERS_MAX = 62
"""Lower tiers that a route can tell apart: a bit for each, beside the two below. Others get no chunk with a route."""

_ALL = (1 << TIERS_MAX) - 1
_ONE_SHOT, _INEXACT = 1 << TIERS_MAX, 2 << TIERS_MAX


class WriteMask:
    """A column of bits by slot: the tiers that may *not* have the chunk. Sans-IO.

    What holds for one chunk holds until its slot has another. Nothing is written while no chunk has a route.
    """

    def __init__(self, num_slots: int, tiers: Iterable[LowerTier], retention: Retention) -> None:
        self.tiers = tiers
        self.retention = retention
        self._denied = column("Q", num_slots)
        self.any = False
        """Whether any chunk ever had a route. While not, nobody needs to ask."""

    def admitted(self, slots: Iterable[int], hints: RequestHints, source: LowerTier | None) -> None:
        """These slots have new chunks, which a request with such hints brought.

        source: the tier they are read from; None: they are stored.
        """
        denied = self._bits(hints) | (0 if source is None else self._bits_of(source))
        if denied or self.any:
            self.any = True
            for slot in slots:
                self._denied[slot] = denied

    @staticmethod
    def _bits_of(source: LowerTier) -> int:
        """Bytes that are not those that were computed must not be spread as if they were.

        A shared tier's yes is forgotten after a while; but what comes from there need not be written there again.
        """
        if not source.limits.exact:
            return _INEXACT
        late = source.limits.write in (WritePolicy.ON_REUSE, WritePolicy.BACK)
        return 1 << source.index if late and source.capabilities.shared and source.index < TIERS_MAX else 0

    def _bits(self, hints: RequestHints) -> int:
        bits = _ONE_SHOT if hints.one_shot else 0
        if hints.store is not None:
            bits |= _ALL ^ sum(1 << t.index for t in self.tiers if t.name in hints.store and t.index < TIERS_MAX)
        return bits

    def allowed(self, tier: LowerTier, chunks: list[tuple[int, Key]], now: float) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that may be written to a tier."""
        if self.any:
            chunks = [chunk for chunk in chunks if self._allows(chunk[0], tier)]
        if self.retention.lifetimes:
            # Of a chunk with an end no other process would know when.
            has_ttl = (
                self.retention.has_ttl if tier.capabilities.shared else partial(self.retention.is_expired, now=now)
            )
            chunks = [chunk for chunk in chunks if not has_ttl(chunk[1])]
        return chunks

    def _allows(self, slot: int, tier: LowerTier) -> bool:
        denied = self._denied[slot]
        return not denied or (tier.index < TIERS_MAX and not denied >> tier.index & 1 and not denied >> TIERS_MAX)

    def end_one_shot(self, slots: Iterable[int]) -> list[int]:
        """A request that is not one-shot uses these. Returns those that were kept in the host tier until now."""
        if not self.any:
            return []
        ended = [slot for slot in slots if self._denied[slot] & _ONE_SHOT]
        for slot in ended:
            self._denied[slot] &= ~_ONE_SHOT
        return ended
