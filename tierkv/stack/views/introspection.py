"""State of a stack in service, for tests and for debugging by hand. Nothing in a step depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.errors import wrong_value
from tierkv.manager.manager import OffloadManager
from tierkv.scheduler.requests.rules import checked_keys
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One lower tier at one moment."""

    usable: bool
    """Whether the tier is read and written; False while its breaker is open."""
    used_bytes: int
    """Bytes of frames that the tier stores, as far as its index knows."""
    reserved_bytes: int
    """Bytes of writes that have not ended."""
    pending_ops: int
    """Operations and trials whose I/O has not ended."""


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """A whole stack at one moment."""

    pending_ops: int
    """Operations of lower tiers whose I/O has not ended; trials do not count."""
    pending_trials: int
    """Trials of unusable tiers that have not ended."""
    has_pending_changes: bool
    """Whether lower tiers still have chunks to write, or to delete after a reset."""
    host_is_idle: bool
    """Whether every host slot is free or may be evicted."""


class StackIntrospection:
    """Read-only view of one stack, as ``stack.introspection``. Engine's scheduler thread; not for its step path."""

    def __init__(self, manager: OffloadManager, dispatcher: Dispatcher) -> None:
        self._manager = manager
        self._dispatcher = dispatcher

    def stack(self) -> StackSnapshot:
        """State of the whole stack."""
        manager, dispatcher = self._manager, self._dispatcher
        return StackSnapshot(
            dispatcher.pending(), dispatcher.pending_trials(), manager.has_pending_changes, manager.host_is_idle
        )

    def tiers(self) -> dict[str, TierSnapshot]:
        """State of each lower tier in service, in the order in which they are searched."""
        states = self._dispatcher.states()
        return {
            tier.name: TierSnapshot(
                tier.phase.usable,
                tier.residency.used_bytes,
                tier.residency.reserved_bytes,
                states[tier.index].in_flight,
            )
            for tier in self._manager.tiers
        }

    def in_host(self, keys: Iterable[Key]) -> set[Key]:
        """Those of ``keys`` whose chunks are readable in the host tier.

        Raises:
            EngineProtocolError: they are no keys of chunks.
        """
        prefix = self._manager.resident_prefix
        return {key for key in checked_keys("in_host", keys) if prefix((key,), 0, 1)}

    def in_index(self, tier: str, keys: Iterable[Key]) -> set[Key]:
        """Those of ``keys`` that the index of a lower tier lists as stored.

        Raises:
            EngineProtocolError: no lower tier of that name is in service, or they are no keys of chunks.
        """
        table = next((table for table in self._manager.tiers if table.name == tier), None)
        if table is None:
            raise wrong_value("in_index", "tier", tier, "give the name of a lower tier in service")
        given = checked_keys("in_index", keys)
        return {key for key in given if table.presence(key, float("inf")) is LookupResult.HIT}
