"""Ability of an eviction policy to receive whole requests, beside the verbs of :class:`~tierkv.abc.EvictionPolicy`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tierkv.types.observation import RequestObservation


@runtime_checkable
class RequestAwarePolicy(Protocol):
    """Policy that receives each request: its whole path, its hints, and the hits in the engine's own cache.

    Called in every tier whose policy has the method. A policy that raises is not called again with observations, and
    is counted in ``observations_failed``. It continues to order chunks.
    """

    def observe_request(self, observation: RequestObservation) -> None:
        """Process one observation, at most about a microsecond per key of the path: the call delays an engine step.

        Called on the engine's scheduler thread, once after the first lookup of a request is answered, and once when the
        request ends.
        """
