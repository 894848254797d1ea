"""Sightings of requests go to every policy that wants them, and a policy that fails is left alone."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import EvictionPolicy, RequestAwarePolicy
from tierkv.metrics.counters import CoreCounters
from tierkv.types.observation import RequestObservation


class SightingFeed:
    """Single-threaded.

    Args:
        policies: each tier's name and policy.
        counters: ``sightings_failed`` counts policies that raised, by tier.
    """

    def __init__(self, policies: Iterable[tuple[str, EvictionPolicy]], counters: CoreCounters) -> None:
        self._counters = counters
        self._wanted_by = [(name, policy) for name, policy in policies if isinstance(policy, RequestAwarePolicy)]

    def add(self, tier: str, policy: EvictionPolicy) -> None:
        """A tier came."""
        if isinstance(policy, RequestAwarePolicy):
            self._wanted_by.append((tier, policy))

    def remove(self, tier: str) -> None:
        """A tier went."""
        self._wanted_by = [item for item in self._wanted_by if item[0] != tier]

    @property
    def wanted(self) -> bool:
        """Whether any policy wants sightings; without one nobody needs to make them."""
        return bool(self._wanted_by)

    def tell(self, sighting: RequestObservation) -> None:
        """Pass a sighting on."""
        for item in tuple(self._wanted_by):
            name, policy = item
            try:
                policy.sighted(sighting)
            except Exception:  # noqa: BLE001  a plugin's own code: counted, and not called again
                self._counters.sightings_failed[name] += 1
                self._wanted_by.remove(item)
