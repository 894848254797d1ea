"""Replay of a trace against one eviction policy, driven as by the host tier.

A request looks up its prefix when it arrives. Then its chunks are used, tail first (S54). Missing chunks are stored
before their use. Nothing takes time, and nothing is pinned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.abc import AdmissionPolicy, EvictionPolicy, RequestAwarePolicy
from tierkv.replay.trace import TraceRequest
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation, RequestPhase


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay, in chunks."""

    asked: int
    """Chunks of all requests."""
    hits: int
    """Chunks found from the front of their request without a gap."""
    writes: int
    """Stored chunks."""

    @property
    def hit_percent(self) -> float:
        """Percentage of chunks that were hits; 0 for an empty trace."""
        return 100 * self.hits / self.asked if self.asked else 0.0


class _Tier:
    """Slots and their keys."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.slots: dict[Key, int] = {}
        self._policy = policy
        self._admission = policy if isinstance(policy, AdmissionPolicy) else None
        self._keys = [Key(b"")] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._pins = bytes(capacity)
        self.writes = 0

    def prefix(self, keys: tuple[Key, ...]) -> int:
        """Number of ``keys`` in the tier before the first missing one."""
        slots = self.slots
        for number, key in enumerate(keys):
            if key not in slots:
                return number
        return len(keys)

    def use(self, keys: tuple[Key, ...]) -> None:
        """Use the chunks of a request, and store the missing ones that the policy admits."""
        slots, used = self.slots, list[int]()
        for key in reversed(keys):
            slot = slots.get(key)
            if slot is None:
                self._policy.touch(used)
                used = []
                slot = self._store(key)
            if slot is not None:
                used.append(slot)
        self._policy.touch(used)

    def _store(self, key: Key) -> int | None:
        if self._admission is not None and self._admission.refuse((key,), len(self._free)):
            return None
        if not self._free:
            for victim in self._policy.evict(1, self._pins):
                del self.slots[self._keys[victim]]
                self._free.append(victim)
            if not self._free:
                return None
        slot = self._free.pop()
        self._keys[slot] = key
        self.slots[key] = slot
        self._policy.add((slot,), (key,))
        self.writes += 1
        return slot


def replay(requests: Iterable[TraceRequest], policy: EvictionPolicy, capacity: int) -> Replayed:
    """Replay a trace against a new policy that was opened for ``capacity`` chunks.

    A :class:`~tierkv.abc.RequestAwarePolicy` gets each request at arrival and end. An
    :class:`~tierkv.abc.AdmissionPolicy` is asked before each store. If the policy chooses no victim, the store is lost.
    """
    tier = _Tier(policy, capacity)
    observer = policy if isinstance(policy, RequestAwarePolicy) else None
    asked = hits = 0
    for number, request in enumerate(requests):
        found = tier.prefix(request.keys)
        asked += len(request.keys)
        hits += found
        if observer is not None:
            observer.observe_request(observation_of(number, request, found, RequestPhase.ARRIVED))
        tier.use(request.keys)
        if observer is not None:
            observer.observe_request(observation_of(number, request, found, RequestPhase.FINISHED))
    return Replayed(asked, hits, tier.writes)


def observation_of(number: int, request: TraceRequest, found: int, phase: RequestPhase) -> RequestObservation:
    """Observation of a request of a trace."""
    new = len(request.keys) - found
    return RequestObservation(str(number), phase, request.at_s, (request.keys,), (0,), (new,), {HOST: found})
