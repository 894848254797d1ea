"""Tiers that come and go while a stack runs: opened on the caller's thread, put in service on the engine's.

Opening a backend and reading its index may take seconds, so whoever asks for a tier pays for it. The engine's thread
only links what is ready, between two steps.
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
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.manager import OffloadManager
from tierkv.plugins.registry import PluginRegistry
from tierkv.stack.tier_factory import TierOpener, close_backend, dispatch_limits, share_host_slots
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key

SCAN_TIMEOUT_S = 60.0
"""How long opening a tier waits for it to tell what it holds; where a stack opens, a later one stays out."""


class TierChange:
    """A tier that is to come or go. The engine's thread does it in a step of its own."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = threading.Event()
        self._error: TierKVError | None = None

    @property
    def done(self) -> bool:
        """Whether it has come about, or failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for it. Never on the engine's thread, which has to do it.

        Returns:
            Whether it has come about. A tier whose calls hang leaves when they end, which may be never.

        Raises:
            EngineProtocolError: it cannot be: a name is taken, or unknown.
        """
        done = self._done.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return done

    def settle(self, error: TierKVError | None = None) -> None:
        """It has come about, or cannot."""
        self._error = error
        self._done.set()

    def __repr__(self) -> str:
        """For people."""
        return f"<TierChange {self._what}: {'done' if self.done else 'waits for a step'}>"


@dataclass(slots=True)
class _Arrival:
    table: LowerTier
    tier: Tier
    limits: TierLimits
    before: str | None
    change: TierChange


@dataclass(slots=True)
class _Departure:
    name: str
    timeout_s: float
    change: TierChange


@dataclass(slots=True)
class _Leaving:
    table: LowerTier
    change: TierChange
    by_s: float


class TierChanges:
    """What :class:`tierkv.stack.stack.Stack` needs to let tiers come and go.

    ``names`` are those of all tiers there ever were, by number.

    :meth:`attach` and :meth:`detach` on any thread, :meth:`apply` on the engine's.

    Args:
        opener: opens tiers. registry: the installed plugins. runtime: time and threads.
        codecs: those that are open already, by name.
        manager, dispatcher: of the stack.
        names: of the tiers it has.
        num_slots: of the host tier.
    """

    def __init__(  # noqa: PLR0913 - a tier concerns every floor; this is where they meet
        self,
        opener: TierOpener,
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
        self._opener = opener
        self._registry = registry
        self._runtime = runtime
        self._codecs = codecs
        self._manager = manager
        self._dispatcher = dispatcher
        self._num_slots = num_slots
        self._indices = itertools.count(len(self.names))
        self._waiting: deque[_Arrival | _Departure] = deque()
        self._leaving: dict[int, _Leaving] = {}
        self._is_closed = False

    # -- any thread --------------------------------------------------------------------------------------------------

    def attach(
        self, table: Mapping[str, Any], before: str | None, scan_timeout_s: float = SCAN_TIMEOUT_S
    ) -> TierChange:
        """Open a tier and queue it for service. Raises as :meth:`tierkv.stack.tiers.StackTiers.attach`."""
        resolved = self._resolved(table)
        self._check_names(resolved.config.name, before)
        tier = self._opener.open(resolved, self._codecs_for(resolved))
        try:
            entries = self._scan(tier, scan_timeout_s)
            lower = self._opener.table(next(self._indices), resolved, tier.backend)
            lower.load_index(entries)
        except BaseException:
            close_backend(tier.backend)
            raise
        change = TierChange(f"attach {tier.name}")
        self._queue(_Arrival(lower, tier, dispatch_limits(resolved), before, change))
        return change

    def detach(self, name: str, timeout_s: float) -> TierChange:
        """Queue a tier's departure. Any thread; does not wait."""
        change = TierChange(f"detach {name}")
        self._queue(_Departure(name, timeout_s, change))
        return change

    def _queue(self, item: _Arrival | _Departure) -> None:
        self._waiting.append(item)
        if self._is_closed:  # closed meanwhile, and nobody will look any more
            self.close()

    def _check_names(self, name: str, before: str | None) -> None:
        """Refuse early what the engine's thread would refuse, before anything is opened."""
        if self._is_closed:
            raise EngineProtocolError(f"tier {name!r} cannot be attached: the stack is closed")
        names = self._manager.tier_names[1:]
        if name in names:
            raise EngineProtocolError(f"there is a tier {name!r} already; give the new one another `name`")
        if before is not None and before not in names:
            raise EngineProtocolError(f"before={before!r}: there is no such lower tier; there are: {', '.join(names)}")

    def _resolved(self, table: Mapping[str, Any]) -> ResolvedTier:
        config = parse_config({"host": {"capacity": 2**20}, "tiers": [dict(table)]}, source="attach_tier")
        return resolve(config, self._registry, "attach_tier").tiers[0]

    def _codecs_for(self, tier: ResolvedTier) -> Mapping[str, Codec]:
        return self._codecs if tier.codec.name in self._codecs else self._opener.open_codecs([tier])

    def _scan(self, tier: Tier, timeout_s: float) -> list[tuple[Key, int]]:
        runtime = self._runtime
        for result in scan_all([tier], timeout_s, runtime.clock, runtime.engine_sleep, runtime.spawn):
            if result.error:
                raise BackendError(f"cannot tell what it holds: {result.error}", tier=tier.name)
            return list(result.entries)
        return []

    # -- the engine's thread -----------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether the engine should step for it. Not for a tier that hangs beyond its time: that may be for ever."""
        return bool(self._waiting) or any(self._runtime.clock() < leaving.by_s for leaving in self._leaving.values())

    def apply(self) -> None:
        """Let go of what has left, and link what is ready. Never waits; costs nothing where nothing changes."""
        # In this order: what the manager still had to say to a tier that goes now is said, and refused, before it left.
        if self._leaving:
            for index in self._dispatcher.take_detached():
                self._manager.forget(index)
                self._leaving.pop(index).change.settle()
                self._share_host_slots()
        while self._waiting:
            item = self._waiting.popleft()
            try:
                self._come(item) if isinstance(item, _Arrival) else self._go(item)
            except TierKVError as error:
                item.change.settle(error)
            except Exception as error:  # noqa: BLE001 - such as no thread to be had: no reason to stop the engine
                item.change.settle(EngineProtocolError(f"it could not be done: {error}"))

    def close(self) -> None:
        """The stack has closed, with every tier in it: what has not come never will."""
        self._is_closed = True
        for leaving in list(self._leaving.values()):
            leaving.change.settle()
        while True:
            try:
                item = self._waiting.popleft()
            except IndexError:  # another thread, whose tier came too late, may be here as well
                return
            item.change.settle(EngineProtocolError("the stack was closed before a step could do it"))
            if isinstance(item, _Arrival):
                self._close_unused(item.tier)

    def _close_unused(self, tier: Tier) -> None:
        self._runtime.spawn(f"tierkv-{tier.name}-close", OneShot(partial(close_backend, tier.backend)))

    def _come(self, item: _Arrival) -> None:
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
        item.change.settle()

    def _go(self, item: _Departure) -> None:
        tables = {table.name: table for table in self._manager.tiers}
        index = self._manager.detach(item.name)
        self._leaving[index] = _Leaving(tables[item.name], item.change, self._runtime.clock() + item.timeout_s)
        self._dispatcher.detach(index, item.timeout_s)
        self._share_host_slots()

    def _share_host_slots(self) -> None:
        held = sum(leaving.table.residency.num_writing for leaving in self._leaving.values())
        share_host_slots(list(self._manager.tiers), self._num_slots, held)
