"""Requests of a trace against an eviction policy alone, as the host tier would drive it.

A request looks up its prefix when it comes. Then its chunks are used, tail first (S54), each stored before if it is
not there. Nothing takes time, and nothing is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.abc import AdmissionPolicy, EvictionPolicy, RequestAwarePolicy
from tierkv.replay.trace import TraceRequest
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation, RequestPhase


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it, in chunks.

    asked: that requests consist of. hits: that were there, from the front of their request without a gap. writes: that
    were stored.
    """

    asked: int
    hits: int
    writes: int

    @property
    def hit_percent(self) -> float:
        """Hits of what was asked for; 0 where nothing was."""
        return 100 * self.hits / self.asked if self.asked else 0.0


class _Tier:
    """Slots, and which key is in which."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.slots: dict[Key, int] = {}
        self._policy = policy
        self._gate = policy if isinstance(policy, AdmissionPolicy) else None
        self._keys = [Key(b"")] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._pins = bytes(capacity)
        self.writes = 0

    def prefix(self, keys: tuple[Key, ...]) -> int:
        """How many of ``keys`` are here before the first that is not."""
        slots = self.slots
        for number, key in enumerate(keys):
            if key not in slots:
                return number
        return len(keys)

    def use(self, keys: tuple[Key, ...]) -> None:
        """A request used these, and stores what is not here, as far as the policy lets it."""
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
        if self._gate is not None and self._gate.refuse((key,), len(self._free)):
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
    """Play a trace against a new policy that was opened for ``capacity`` chunks.

    A policy that listens to observations hears of each request as it comes and when it ends; one that refuses is asked
    before each store. A choice of "not now" loses the store.
    """
    tier = _Tier(policy, capacity)
    listener = policy if isinstance(policy, RequestAwarePolicy) else None
    asked = hits = 0
    for number, request in enumerate(requests):
        found = tier.prefix(request.keys)
        asked += len(request.keys)
        hits += found
        if listener is not None:
            listener.observe_request(observation_of(number, request, found, RequestPhase.ARRIVED))
        tier.use(request.keys)
        if listener is not None:
            listener.observe_request(observation_of(number, request, found, RequestPhase.FINISHED))
    return Replayed(asked, hits, tier.writes)


def observation_of(number: int, request: TraceRequest, found: int, event: RequestPhase) -> RequestObservation:
    """What a policy hears of a request of a trace."""
    new = len(request.keys) - found
    return RequestObservation(str(number), event, request.at_s, (request.keys,), (0,), (new,), {"host": found})
