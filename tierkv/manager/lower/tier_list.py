"""The lower tiers of a stack: in the order in which they are searched, and by number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tierkv.errors import EngineProtocolError
from tierkv.manager.lower.lower_tier import LowerTier


class TierList:
    """Tiers in service, the fastest first, and detached tiers by number. Single-threaded.

    Tiers are attached and detached while the stack runs. The number of a tier (``LowerTier.index``) is never reused. A
    detached tier is still found by its number until all of its operations have ended.
    """

    def __init__(self, tiers: Iterable[LowerTier]) -> None:
        self.in_service = list(tiers)
        """Tiers that iteration yields; saves two calls for callers that ask per chunk. Read only."""
        self._by_index = {tier.index: tier for tier in self.in_service}

    def __iter__(self) -> Iterator[LowerTier]:
        """Iterate over the tiers in service, in order."""
        return iter(self.in_service)

    def __len__(self) -> int:
        """Number of tiers in service."""
        return len(self.in_service)

    def __getitem__(self, index: int) -> LowerTier:
        """Tier of a number, in service or detached."""
        return self._by_index[index]

    def get(self, name: str) -> LowerTier | None:
        """Tier in service of that name; None if there is none."""
        return next((tier for tier in self.in_service if tier.name == name), None)

    def named(self, name: str) -> LowerTier:
        """Tier in service of that name.

        Raises:
            EngineProtocolError: there is none; lists the names in service.
        """
        tier = self.get(name)
        if tier is None:
            names = ", ".join(known.name for known in self.in_service) or "none"
            raise EngineProtocolError(f"there is no lower tier {name!r}; there are: {names}")
        return tier

    @property
    def with_detached(self) -> list[LowerTier]:
        """Tiers in service and detached ones, in the order of their numbers."""
        return list(self._by_index.values())

    def check_ours(self) -> None:
        """Check that this stack may delete every chunk in every tier.

        Raises:
            EngineProtocolError: a tier is shared with other processes, or never written.
        """
        for tier in self.in_service:
            if not tier.limits.writes or not tier.capabilities.authoritative_index:
                why = "is shared with others" if tier.limits.writes else "is never written"
                raise EngineProtocolError(
                    f'reset_cache(scope="all"): tier {tier.name!r} {why}, so its chunks are not ours to delete. '
                    "Change namespace.epoch instead: then no previous chunk is ever found again"
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
        """Remove a detached tier whose operations have all ended."""
        del self._by_index[index]
