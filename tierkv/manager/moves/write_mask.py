"""Bits by host slot: the lower tiers that the chunk in it may not be written to.

A mask is set when a chunk is admitted, from the hints of the request and from the tier that it is read from. It holds
until the slot has another chunk. Expiry is checked in addition: a chunk with a TTL is not written to shared tiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.retention import Retention
from tierkv.structures.columns import column
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key

TIERS_MAX = 62
"""Lower tiers that have a bit of their own, beside the two bits below. Other tiers get no chunk with a mask."""

_ALL = (1 << TIERS_MAX) - 1
_ONE_SHOT, _INEXACT = 1 << TIERS_MAX, 2 << TIERS_MAX


class WriteMask:
    """Column of masks. Sans-IO. Nothing is written to it while no chunk has a mask."""

    def __init__(self, num_slots: int, tiers: TierList, retention: Retention) -> None:
        self.tiers = tiers
        self.retention = retention
        self._denied = column("Q", num_slots)
        self.any = False
        """Whether any chunk ever had a mask."""

    def admitted(self, slots: Iterable[int], hints: RequestHints, source: LowerTier | None) -> None:
        """Set the masks of newly admitted chunks, which a request with such hints brings.

        source: the tier that they are read from; None if they are stored.
        """
        denied = self._bits_of_hints(hints) | (0 if source is None else self._bits_of_source(source))
        if denied or self.any:
            self.any = True
            for slot in slots:
                self._denied[slot] = denied

    def deny(self, tier: LowerTier, slot: int) -> None:
        """Deny writes of a chunk to a tier that has it, although the answer that it is there is soon forgotten."""
        if tier.index < TIERS_MAX:
            self.any = True
            self._denied[slot] |= 1 << tier.index

    @staticmethod
    def _bits_of_source(source: LowerTier) -> int:
        """Bits for chunks that are read from a tier.

        Chunks of an inexact tier differ from those that were computed, so they are written nowhere. A chunk of a shared
        tier is not written there again, although the answer that it is there is soon forgotten.
        """
        if not source.limits.exact:
            return _INEXACT
        return 1 << source.index if source.capabilities.shared and source.index < TIERS_MAX else 0

    def _bits_of_hints(self, hints: RequestHints) -> int:
        bits = _ONE_SHOT if hints.one_shot else 0
        if hints.store is not None:
            bits |= _ALL ^ sum(1 << t.index for t in self.tiers if t.name in hints.store and t.index < TIERS_MAX)
        return bits

    def allowed(self, tier: LowerTier, chunks: list[tuple[int, Key]], now: float) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that may be written to a tier."""
        if self.any:
            chunks = [chunk for chunk in chunks if self._allows(chunk[0], tier)]
        if self.retention.has_lifetimes:
            # Other processes that read a shared tier do not know when a chunk expires.
            has_ttl = (
                self.retention.has_ttl if tier.capabilities.shared else partial(self.retention.is_expired, now=now)
            )
            chunks = [chunk for chunk in chunks if not has_ttl(chunk[1])]
        return chunks

    def _allows(self, slot: int, tier: LowerTier) -> bool:
        denied = self._denied[slot]
        return not denied or (tier.index < TIERS_MAX and not denied >> tier.index & 1 and not denied >> TIERS_MAX)

    def end_one_shot(self, slots: Iterable[int]) -> list[int]:
        """Allow writes of one-shot chunks that another request uses. Returns those that were one-shot until now."""
        if not self.any:
            return []
        ended = [slot for slot in slots if self._denied[slot] & _ONE_SHOT]
        for slot in ended:
            self._denied[slot] &= ~_ONE_SHOT
        return ended
