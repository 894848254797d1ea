"""What an eviction policy may do beside :class:`~tierkv.abc.EvictionPolicy`: hear of requests as a whole."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tierkv.types.observation import RequestObservation


@runtime_checkable
class RequestAwarePolicy(Protocol):
    """A policy that wants to know who asks, for what, with which hints, and what the engine found in its own cache.

    Called on the engine's scheduler thread, once when a request's first lookup is answered and once when it ends, in
    every tier whose policy has the method. At most a microsecond or so per key of the path: it delays a step. A policy
    that raises is not called again, and counted (``observations_failed``); it goes on ordering chunks.
    """

    def observe_request(self, observation: RequestObservation) -> None:
        """A request arrived or finished."""
