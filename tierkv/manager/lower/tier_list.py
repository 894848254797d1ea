"""The lower tiers of a stack: in the order in which they are asked, and by their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tierkv.errors import EngineProtocolError
from tierkv.manager.lower.lower_tier import LowerTier


class TierList:
    """Tiers come and go while the stack runs. Iterating gives those in service, the fastest first. Single-threaded.

    A tier's number (``LowerTier.index``) is its own for ever. One that was detached is still found by its number until
    everything that was under way in it has ended.
    """

    def __init__(self, tiers: Iterable[LowerTier]) -> None:
        self.in_service = list(tiers)
        """What iterating gives; who asks per chunk saves two calls by it. Not to be changed by others."""
        self._by_index = {tier.index: tier for tier in self.in_service}

    def __iter__(self) -> Iterator[LowerTier]:
        """Those in service, in order."""
        return iter(self.in_service)

    def __len__(self) -> int:
        """How many are in service."""
        return len(self.in_service)

    def __getitem__(self, index: int) -> LowerTier:
        """By number; also one that is leaving."""
        return self._by_index[index]

    def get(self, name: str) -> LowerTier | None:
        """By name, of those in service."""
        return next((tier for tier in self.in_service if tier.name == name), None)

    def named(self, name: str) -> LowerTier:
        """By name, of those in service.

        Raises:
            EngineProtocolError: there is none; names those that are there.
        """
        tier = self.get(name)
        if tier is None:
            names = ", ".join(known.name for known in self.in_service) or "none"
            raise EngineProtocolError(f"there is no lower tier {name!r}; there are: {names}")
        return tier

    @property
    def with_detached(self) -> list[LowerTier]:
        """Those in service, and those that are leaving, by number."""
        return list(self._by_index.values())

    def check_ours(self) -> None:
        """Whether this stack may delete everything in every tier.

        Raises:
            EngineProtocolError: some tier holds chunks that are not this stack's to delete.
        """
        for tier in self.in_service:
            if not tier.limits.writes or not tier.capabilities.authoritative_index:
                why = "is shared with others" if tier.limits.writes else "is never written"
                raise EngineProtocolError(
                    f'reset_cache(scope="all"): tier {tier.name!r} {why}, so its chunks are not ours to delete. '
                    "Change namespace.epoch instead: then no chunk of before is ever found again"
                )

    def attach(self, tier: LowerTier, before: LowerTier | None = None) -> None:
        """Put a tier in service, ahead of another one, or last."""
        position = len(self.in_service) if before is None else self.in_service.index(before)
        self.in_service.insert(position, tier)
        self._by_index[tier.index] = tier

    def detach(self, tier: LowerTier) -> None:
        """Take a tier out of service."""
        self.in_service.remove(tier)

    def forget(self, index: int) -> None:
        """Nothing is under way any more in the tier of that number, which was detached."""
        del self._by_index[index]
