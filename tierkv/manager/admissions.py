"""Who comes into the host tier, and who leaves for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.manager.chunk_state import ChunkState
from tierkv.manager.contract import HOST
from tierkv.manager.event_log import EventLog
from tierkv.manager.host_index import HostIndex
from tierkv.manager.terms import Terms
from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.keys import Key


class Admissions:
    """Makes room and takes it: by the policy, the terms of one-shot chunks and the routes of hints. Sans-IO."""

    def __init__(self, host: HostIndex, terms: Terms, events: EventLog, counters: CoreCounters) -> None:
        self._host = host
        self.terms = terms
        self._events = events
        self._counters = counters
        self._routes: dict[int, tuple[int, frozenset[str]]] = {}  # by slot: its generation, and where its chunk may go

    def let_in(self, keys: list[Key]) -> list[Key]:
        """Those of ``keys`` that the host tier's policy lets in."""
        refused = self._host.refused(keys)
        if not refused:
            return keys
        kept = [key for i, key in enumerate(keys) if i not in refused]
        self._counters.admissions_refused[HOST] += len(keys) - len(kept)
        return kept

    def make_room(self, count: int) -> list[Key] | None:
        """Evict until ``count`` slots are free. One-shot chunks leave before all others."""
        if count > self._host.room:
            return None
        one_shots = self._drop_one_shots(count - self._host.free) if self.terms.any else []
        chosen = self._host.make_room(count)
        evicted = one_shots + (chosen or [])
        if evicted:
            self._counters.evictions[HOST] += len(evicted)
            self._events.extend(CacheEventKind.REMOVED, HOST, evicted)
        return None if chosen is None else evicted

    def _drop_one_shots(self, count: int) -> list[Key]:
        """Free the slots of up to so many one-shot chunks, as far as they are to be had."""

        def is_free(key: Key) -> bool | None:
            slot = self._host.find(key)
            return None if slot is None else self._host.is_idle(slot)

        dropped: list[Key] = []
        while len(dropped) < count and (key := self.terms.take_one_shot(is_free)) is not None:
            dropped.append(key)
            self._host.drop([slot for slot in [self._host.find(key)] if slot is not None])
        return dropped

    def admit(
        self, keys: Sequence[Key], state: ChunkState, origin: str = HOST, route: frozenset[str] | None = None
    ) -> list[int]:
        """Slots for ``keys``, held once; see :meth:`HostIndex.admit`.

        route: the only tiers that the chunks may cascade to; None: all.
        """
        slots = self._host.admit(keys, state, origin)
        if route is not None:
            self._routes.update((slot, (self._host.generation(slot), route)) for slot in slots)
        return slots

    def take_routes(self, slots: Sequence[int]) -> Mapping[int, frozenset[str] | None]:
        """The only tiers that chunks that became readable may cascade to, of those that have such a limit."""
        if not self._routes:
            return {}
        routes = {}
        for slot in slots:
            generation, route = self._routes.pop(slot, (None, None))
            # Another generation: an earlier chunk of this slot, which never became readable.
            routes[slot] = route if generation == self._host.generation(slot) else None
        return routes
