"""Tiers that are attached and detached while a stack runs: opened on the caller's thread, linked on the engine's.

Opening a backend and listing what it holds may take seconds, so it blocks the thread of the caller. The engine's thread
only links opened tiers, between two steps.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tierkv.abc import Codec
from tierkv.config.loading import parse_config
from tierkv.config.resolving import ResolvedTier, resolve
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.dispatch.runtime import Runtime
from tierkv.dispatch.scanning import scan_all
from tierkv.dispatch.spawn import OneShot
from tierkv.dispatch.tier_state import TierLimits
from tierkv.errors import BackendError, EngineProtocolError, TierKVError
from tierkv.logs.definitions import TIER_ATTACHED, TIER_DETACHED
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.manager import OffloadManager
from tierkv.plugins.registry import PluginRegistry
from tierkv.stack.tier_factory import TierFactory, dispatch_limits, held_by, share_host_slots
from tierkv.stack.timed_opening import close_backend
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key

SCAN_TIMEOUT_S = 60.0
"""Seconds that an opening tier may take to list what it holds. A slower tier of an opening stack is out of service."""


class TierChange:
    """Pending attachment or detachment of a tier. The engine's thread executes it in one of its steps."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = threading.Event()
        self._error: TierKVError | None = None

    @property
    def done(self) -> bool:
        """Whether the change is complete, or has failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the change. Never on the engine's thread, which executes it.

        Returns:
            Whether it is complete. A tier whose calls hang is detached when they end, which may be never.

        Raises:
            EngineProtocolError: the change is impossible: a name is taken, or unknown.
        """
        done = self._done.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return done

    def settle(self, error: TierKVError | None = None) -> None:
        """Complete the change, or fail it with ``error``."""
        self._error = error
        self._done.set()

    def __repr__(self) -> str:
        """Describe the change."""
        return f"<TierChange {self._what}: {'done' if self.done else 'waits for a step'}>"


@dataclass(slots=True)
class _Attachment:
    table: LowerTier
    tier: Tier
    limits: TierLimits
    before: str | None
    change: TierChange


@dataclass(slots=True)
class _Detachment:
    name: str
    timeout_s: float
    change: TierChange


@dataclass(slots=True)
class _Detaching:
    table: LowerTier
    change: TierChange
    deadline_s: float


class TierChanges:
    """Queue of attachments and detachments of one stack.

    :meth:`attach` and :meth:`detach` may be called on any thread, :meth:`apply` on the engine's.

    Args:
        factory: opens tiers.
        registry: the installed plugins.
        runtime: time and threads.
        codecs: codecs in use, by name.
        manager, dispatcher: of the stack.
        names: names of the tiers in service.
        num_slots: slots of the host tier.

    Attributes:
        names: names of all tiers that were ever attached, by number.
    """

    def __init__(  # noqa: PLR0913 - a tier concerns every layer; this class joins them
        self,
        factory: TierFactory,
        registry: PluginRegistry,
        runtime: Runtime,
        codecs: Mapping[str, Codec],
        *,
        manager: OffloadManager,
        dispatcher: Dispatcher,
        names: Sequence[str],
        num_slots: int,
    ) -> None:
        self.names = list(names)
        self._factory = factory
        self._registry = registry
        self._runtime = runtime
        self._codecs = codecs
        self._manager = manager
        self._dispatcher = dispatcher
        self._num_slots = num_slots
        self._indices = itertools.count(len(self.names))
        self._waiting: deque[_Attachment | _Detachment] = deque()
        self._detaching: dict[int, _Detaching] = {}
        self._is_closed = False

    # -- any thread --------------------------------------------------------------------------------------------------

    def attach(
        self, table: Mapping[str, Any], before: str | None, scan_timeout_s: float = SCAN_TIMEOUT_S
    ) -> TierChange:
        """Open a tier and queue its attachment. Raises as :meth:`tierkv.stack.views.tiers.StackTiers.attach`."""
        resolved = self._resolved(table)
        self._check_names(resolved.config.name, before)
        tier = self._factory.open_tier(resolved, self._codecs_for(resolved))
        try:
            entries, ranks = self._scan(tier, scan_timeout_s)
            lower = self._factory.make_table(next(self._indices), resolved, tier.backend)
            lower.load_index(entries, ranks)
        except BaseException:
            close_backend(tier.backend)
            raise
        change = TierChange(f"attach {tier.name}")
        self._queue(_Attachment(lower, tier, dispatch_limits(resolved), before, change))
        return change

    def detach(self, name: str, timeout_s: float) -> TierChange:
        """Queue a detachment, without waiting."""
        change = TierChange(f"detach {name}")
        self._queue(_Detachment(name, timeout_s, change))
        return change

    def _queue(self, item: _Attachment | _Detachment) -> None:
        self._waiting.append(item)
        if self._is_closed:  # closed meanwhile: no step will execute it
            self.close()

    def _check_names(self, name: str, before: str | None) -> None:
        """Raise before anything is opened, where the engine's thread would refuse the change."""
        if self._is_closed:
            raise EngineProtocolError(f"tier {name!r} cannot be attached: the stack is closed")
        names = self._manager.tier_names[1:]
        if name in names:
            raise EngineProtocolError(f"there is a tier {name!r} already; give the new one another `name`")
        if before is not None and before not in names:
            raise EngineProtocolError(f"before={before!r}: there is no such lower tier; there are: {', '.join(names)}")

    def _resolved(self, table: Mapping[str, Any]) -> ResolvedTier:
        config = parse_config({"host": {"capacity": 2**20}, "tiers": [dict(table)]}, source="stack.tiers.attach")
        return resolve(config, self._registry, "stack.tiers.attach").tiers[0]

    def _codecs_for(self, tier: ResolvedTier) -> Mapping[str, Codec]:
        return self._codecs if tier.codec.name in self._codecs else self._factory.open_codecs([tier])

    def _scan(self, tier: Tier, timeout_s: float) -> tuple[Sequence[tuple[Key, int]], Sequence[int]]:
        runtime = self._runtime
        for result in scan_all([tier], timeout_s, runtime.clock, runtime.engine_sleep, runtime.spawn):
            if result.error:
                raise BackendError(f"cannot tell what it holds: {result.error}", tier=tier.name)
            return result.entries, result.ranks
        return (), ()

    # -- the engine's thread -----------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether the engine should step for a change. A tier that hangs beyond its timeout does not count."""
        return bool(self._waiting) or any(
            self._runtime.clock() < detaching.deadline_s for detaching in self._detaching.values()
        )

    def apply(self) -> None:
        """Forget detached tiers and link opened ones, without waiting. Costs nothing where nothing changes."""
        # In this order: a tier's last operations are submitted, and refused, before the tier is forgotten.
        if self._detaching:
            for index in self._dispatcher.take_detached():
                self._manager.forget(index)
                detaching = self._detaching.pop(index)
                self._factory.log.report(TIER_DETACHED, tier=detaching.table.name)
                detaching.change.settle()
                self._share_host_slots()
        while self._waiting:
            item = self._waiting.popleft()
            try:
                self._attach_now(item) if isinstance(item, _Attachment) else self._detach_now(item)
            except TierKVError as error:
                item.change.settle(error)
            except Exception as error:  # noqa: BLE001 - such as a thread that cannot start: the engine must go on
                item.change.settle(EngineProtocolError(f"it could not be done: {error}"))

    def close(self) -> None:
        """Fail all pending changes: the stack has closed, with every tier in it."""
        self._is_closed = True
        for detaching in list(self._detaching.values()):
            detaching.change.settle()
        while True:
            try:
                item = self._waiting.popleft()
            except IndexError:  # another thread, with a late tier, may be in this loop as well
                return
            item.change.settle(EngineProtocolError("the stack was closed before a step could do it"))
            if isinstance(item, _Attachment):
                self._close_unused(item.tier)

    def _close_unused(self, tier: Tier) -> None:
        self._runtime.spawn(f"tierkv-{tier.name}-close", OneShot(partial(close_backend, tier.backend)))

    def _attach_now(self, item: _Attachment) -> None:
        index, name = item.table.index, item.tier.name
        try:
            self._manager.attach(item.table, item.before)
            self.names.extend([""] * (index + 1 - len(self.names)))
            self.names[index] = name
            try:
                self._dispatcher.attach(index, item.tier, item.limits)
            except BaseException:
                self._manager.forget(self._manager.detach(name))
                raise
        except BaseException:
            self._close_unused(item.tier)
            raise
        self._share_host_slots()
        self._factory.log.report(TIER_ATTACHED, tier=name, **held_by(item.table))
        item.change.settle()

    def _detach_now(self, item: _Detachment) -> None:
        tables = {table.name: table for table in self._manager.tiers}
        index = self._manager.detach(item.name)
        self._detaching[index] = _Detaching(tables[item.name], item.change, self._runtime.clock() + item.timeout_s)
        self._dispatcher.detach(index, item.timeout_s)
        self._share_host_slots()

    def _share_host_slots(self) -> None:
        pinned = sum(detaching.table.residency.num_writing for detaching in self._detaching.values())
        share_host_slots(list(self._manager.tiers), self._num_slots, pinned)
