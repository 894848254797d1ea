"""Delivery of request observations to the eviction policies that want them. A policy that raises gets no more."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import EvictionPolicy, RequestAwarePolicy
from tierkv.metrics.counters import CoreCounters
from tierkv.types.observation import RequestObservation


class RequestFeed:
    """Subscribed policies, by tier. Single-threaded.

    Args:
        policies: each tier's name and policy.
        counters: ``observations_failed`` counts policies that raised, by tier.
    """

    def __init__(self, policies: Iterable[tuple[str, EvictionPolicy]], counters: CoreCounters) -> None:
        self._counters = counters
        self._subscribers = [(name, policy) for name, policy in policies if isinstance(policy, RequestAwarePolicy)]

    def add_tier(self, tier: str, policy: EvictionPolicy) -> None:
        """Subscribe the policy of an attached tier, if it is a :class:`~tierkv.abc.RequestAwarePolicy`."""
        if isinstance(policy, RequestAwarePolicy):
            self._subscribers.append((tier, policy))

    def remove_tier(self, tier: str) -> None:
        """Unsubscribe the policy of a detached tier."""
        self._subscribers = [item for item in self._subscribers if item[0] != tier]

    @property
    def has_subscribers(self) -> bool:
        """Whether any policy wants observations. Without one, the caller need not build them."""
        return bool(self._subscribers)

    def publish(self, observation: RequestObservation) -> None:
        """Pass an observation to every subscribed policy. A policy that raises is counted and unsubscribed."""
        for item in tuple(self._subscribers):
            name, policy = item
            try:
                policy.observe_request(observation)
            except KeyboardInterrupt:  # the user's
                raise
            except BaseException:  # noqa: BLE001  a plugin's own code, which may panic: counted, and not called again
                self._counters.observations_failed[name] += 1
                self._subscribers.remove(item)
