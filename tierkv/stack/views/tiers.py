"""Lower tiers of a stack in service: attach, detach and watch them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.errors import wrong_value
from tierkv.manager.manager import OffloadManager
from tierkv.memory.arena import HostArena
from tierkv.metrics.watched import TierCondition, TierContent, TierLoad
from tierkv.policies.quotas import usage_by_tier
from tierkv.stack.tier_lifecycle import TierChange, TierChanges
from tierkv.types.waits import bounded_seconds

_T = TypeVar("_T")


class StackTiers:
    """Lower tiers of one stack, as ``stack.tiers``. Engine's scheduler thread, unless a method says otherwise."""

    def __init__(self, manager: OffloadManager, dispatcher: Dispatcher, changes: TierChanges, arena: HostArena) -> None:
        self._slot_bytes, self._num_slots = arena.slot_bytes, arena.num_slots
        self._manager = manager
        self._dispatcher = dispatcher
        self._changes = changes

    @property
    def names(self) -> tuple[str, ...]:
        """The lower tiers in service, in the order in which they are searched."""
        return self._manager.tier_names[1:]

    def attach(self, table: Mapping[str, Any], *, before: str | None = None) -> TierChange:
        """Add a lower tier to a stack in service. Any thread but the engine's: waits until the backend is open.

        The engine's next step puts the tier in service, with everything it holds. The tier gets what is stored from
        then on. The stack makes no further attempt to open an absent tier of that name.

        Args:
            table: as a ``[[tiers]]`` table of a stack's description.
            before: name of the tier that will be searched after it; None: it becomes the last one.

        Raises:
            ConfigError: the table is wrong.
            BackendError: the tier cannot be opened, or its content cannot be listed.
            PluginError: a plugin that the table names is missing or broken.
            EngineProtocolError: its name is taken, or there is no tier ``before``.
        """
        return self._changes.attach(table, before)

    def detach(self, name: str, *, timeout_s: float = 30.0) -> TierChange:
        """Remove a lower tier from a stack in service; its stored chunks stay in place. Any thread; does not wait.

        A tier that could not be opened is not tried again.

        From the engine's next step on, the tier is neither read nor written. Chunks that were queued for it are
        dropped and counted. Its backend is closed when its running calls have ended, or after ``timeout_s``; then the
        change is done.

        Raises:
            EngineProtocolError: there is no such tier, or ``timeout_s`` is no number of seconds, or ``inf``. Nothing
                has changed.
        """
        if not isinstance(name, str):
            raise wrong_value("detach", "name", name, "give the name of a lower tier")
        return self._changes.detach(name, bounded_seconds("detach", timeout_s))

    def detach_not_ours(self) -> tuple[str, ...]:
        """Take every tier out of service that a reset of all tiers must not empty: shared ones, and read-only ones.

        Between steps; does not wait. The tiers are neither read nor written from now on, and keep their chunks.

        Returns:
            Their names.
        """
        names = self._manager.tiers.not_ours
        for name in names:
            self.detach(name)
        if names:
            self._changes.apply()
        return names

    def has_waiting_writes(self) -> bool:
        """Whether chunks are queued for a lower tier that accepts no more at present: only a step submits them.

        An idle engine that wants other engines to find them soon keeps stepping until there are none. Otherwise only
        time is lost: the engine's next steps, a flush and a close submit them.
        """
        return any(tier.has_backlog for tier in self._manager.tiers)

    def has_pending_changes(self) -> bool:
        """Whether chunks are queued for, or being written to, a lower tier, or are still to be deleted by a reset."""
        return self._manager.has_pending_changes

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of dispatch, per lower tier; the fields of :class:`tierkv.dispatch.stats.TierStats`. Any thread."""
        latest = latest_by_name(self._changes, self._dispatcher.stats.tiers)
        return {name: stats.as_dict() for name, stats in latest.items()}

    def speeds(self) -> dict[str, dict[str, float]]:
        """``latency_s`` and ``bytes_per_s`` of each lower tier's reads, as far as they are measured.

        Together with the engine's prefill rate they decide what is worth loading
        (docs/explanation/load-or-recompute.md).
        """
        return self._manager.read_costs.speeds()

    def health(self) -> dict[str, TierCondition]:
        """Whether each lower tier is in service, can be written, and is slower than computing. Any thread.

        Tiers that could not be opened, and are tried again, are included.
        """
        health = dict.fromkeys(self._changes.absent, TierCondition(usable=False, writable=False))
        health |= latest_by_name(self._changes, self._dispatcher.health())
        slow = [tier.name for tier in tuple(self._manager.tiers) if tier.probes.is_slow]
        return health | {name: health[name]._replace(slow=True) for name in slow if name in health}

    def load(self) -> dict[str, TierLoad]:
        """Operations that wait and run in each lower tier, and the state of its breaker. Any thread.

        An operation that was cancelled while it waited counts until a call would have taken it.
        """
        states = latest_by_name(self._changes, self._dispatcher.states())
        return {name: state.load() for name, state in states.items()}

    def content(self) -> dict[str, TierContent]:
        """Chunks and bytes that each tier holds, the host tier first, under the name ``host``. Any thread.

        A chunk of the host tier counts as a whole slot. Chunks that are being evicted are left out.
        """
        (host, policy), *_ = self._manager.policies
        chunks, size = len(policy), self._slot_bytes
        contents = {host: TierContent(chunks, chunks * size, self._num_slots * size, None)}
        for tier in tuple(self._manager.tiers):
            is_known = tier.capabilities.authoritative_index
            contents[tier.name] = TierContent(
                len(tier.policy) if is_known else None,
                tier.residency.used_bytes if is_known else None,
                tier.limits.capacity_bytes,
                len(tier.write_queue),
            )
        return contents

    def room(self) -> dict[str, int]:
        """Bytes that each lower tier may hold: its capacity, or less while its backend reports that it is full.

        Tiers without a bound are left out. Any thread.
        """
        room = {tier.name: tier.residency.capacity_bytes for tier in tuple(self._manager.tiers)}
        return {name: room_bytes for name, room_bytes in room.items() if room_bytes is not None}

    def usage(self) -> dict[str, dict[str, int]]:
        """Bytes by tenant, in each tier with quotas; a tenant's name is the digest of its salt in hex.

        ``""`` is the name for requests without a salt. :func:`tierkv.types.keys.tenant_of_salt` computes the digest.
        """
        return usage_by_tier(self._manager.policies)


def latest_by_name(changes: TierChanges, by_tier: Mapping[int, _T]) -> dict[str, _T]:
    """Rekey by name. A re-attached tier may share its name with one still closing: the newer one is kept."""
    return {changes.names[index]: item for index, item in list(by_tier.items())}
