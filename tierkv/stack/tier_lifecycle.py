"""Tiers that are attached and detached while a stack runs: opened on another thread, linked on the engine's.

Opening a backend and listing what it holds may take seconds, so it blocks the thread of the caller; a tier that was
absent when the stack opened is tried again on a thread of its own. The engine's thread only begins those tries and
links opened tiers, between two steps.
"""

from __future__ import annotations

import itertools
import logging
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
from tierkv.dispatch.scanning import scan_all
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.dispatch.threads.spawn import OneShot
from tierkv.dispatch.tier_state import TierLimits
from tierkv.errors import (
    BackendError,
    ConfigError,
    EngineProtocolError,
    NamespaceMismatchError,
    PluginError,
    TierKVError,
)
from tierkv.logs.definitions import TIER_ATTACHED, TIER_DETACHED, TIER_JOINED, TIER_STAYS_OUT
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.tier_list import is_ours
from tierkv.manager.manager import OffloadManager
from tierkv.plugins.registry import PluginRegistry
from tierkv.stack.tier_factory import TierFactory, dispatch_limits, held_by, share_host_slots
from tierkv.stack.timed_opening import AbsentTier, UnusedTiers, close_backend, open_within
from tierkv.tiers.tier import Tier
from tierkv.types.tier_ops import TierContent

_log = logging.getLogger(__name__)

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
    absent: AbsentTier | None = None
    """Set where the stack itself opened the tier again."""


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
    """Queue of attachments and detachments of one stack, and its absent tiers.

    :meth:`attach` and :meth:`detach` may be called on any thread, :meth:`apply` on the engine's.

    Args:
        factory: opens tiers.
        registry: the installed plugins.
        runtime: time and threads.
        codecs: codecs in use, by name.
        manager, dispatcher: of the stack.
        names: names of the tiers in service.
        absent: tiers that could not be opened; tried again in the background.
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
        absent: Sequence[AbsentTier] = (),
    ) -> None:
        self.names = list(names)
        self._absent = {tier.name: tier for tier in absent}
        self._factory = factory
        self._registry = registry
        self._runtime = runtime
        self._codecs = codecs
        self._manager = manager
        self._dispatcher = dispatcher
        self._num_slots = num_slots
        self._indices = itertools.count(len(self.names))
        self.waiting: deque[_Attachment | _Detachment] = deque()
        """Changes that the engine's thread has not made yet."""
        self._detaching: dict[int, _Detaching] = {}
        self._is_closed = False
        self._unused = UnusedTiers(runtime.spawn)

    # -- any thread --------------------------------------------------------------------------------------------------

    def attach(
        self, table: Mapping[str, Any], before: str | None, scan_timeout_s: float = SCAN_TIMEOUT_S
    ) -> TierChange:
        """Open a tier and queue its attachment. Raises as :meth:`tierkv.stack.views.tiers.StackTiers.attach`."""
        resolved = self._resolved(table)
        config = resolved.config
        self._check_names(config.name, before)
        absent = self._take_over(config.name, config.open_deadline_s)
        try:
            open_tier = partial(self._factory.open_tier, resolved, self._codecs_for(resolved))
            tier = open_within(config.name, open_tier, config.open_deadline_s, self._factory.log)
            attachment = self._prepared(resolved, tier, before, scan_timeout_s)
        except BaseException:
            if absent is not None:
                self._absent[config.name] = absent  # tried again, as before
            raise
        self._queue(attachment)
        return attachment.change

    def _prepared(self, resolved: ResolvedTier, tier: Tier, before: str | None, scan_timeout_s: float) -> _Attachment:
        """List what an opened tier holds. The tier is closed if that fails."""
        try:
            content = self._scan(tier, scan_timeout_s)
            lower = self._factory.tables.make_table(next(self._indices), resolved, tier.backend)
            lower.load_index(content)
        except BaseException:
            close_backend(tier.backend)
            raise
        return _Attachment(lower, tier, dispatch_limits(resolved), before, TierChange(f"attach {tier.name}"))

    def _take_over(self, name: str, timeout_s: float) -> AbsentTier | None:
        """End the tries to open an absent tier: the caller opens it. None: the tier is not absent.

        Raises:
            EngineProtocolError: it was opened meanwhile.
        """
        absent = self._absent.get(name)
        if absent is None:
            return None
        absent.wait_idle(timeout_s)
        if any(isinstance(item, _Attachment) and item.absent is absent for item in tuple(self.waiting)):
            raise EngineProtocolError(f"tier {name!r} was opened again meanwhile: the next step attaches it")
        absent.abandon()
        return self._absent.pop(name, None)

    def detach(self, name: str, timeout_s: float) -> TierChange:
        """Queue a detachment, without waiting. Raises as :meth:`tierkv.stack.views.tiers.StackTiers.detach`."""
        arriving = [item.tier.name for item in tuple(self.waiting) if isinstance(item, _Attachment)]
        known = [*self._manager.tier_names[1:], *tuple(self._absent), *arriving]
        if name not in known and not self._is_closed:
            names = ", ".join(known) or "none"
            raise EngineProtocolError(
                f"tier {name!r} cannot be detached: there is no such lower tier; there are: {names}"
            )
        change = TierChange(f"detach {name}")
        self._queue(_Detachment(name, timeout_s, change))
        return change

    def _queue(self, item: _Attachment | _Detachment) -> None:
        self.waiting.append(item)
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
        if not isinstance(table, Mapping):
            raise ConfigError(f"stack.tiers.attach: table = {table!r:.80}: give a mapping, as a [[tiers]] table")
        config = parse_config({"host": {"capacity": 2**20}, "tiers": [dict(table)]}, source="stack.tiers.attach")
        return resolve(config, self._registry, "stack.tiers.attach").tiers[0]

    def _codecs_for(self, tier: ResolvedTier) -> Mapping[str, Codec]:
        return self._codecs if tier.codec.name in self._codecs else self._factory.open_codecs([tier])

    def _scan(self, tier: Tier, timeout_s: float) -> TierContent:
        runtime = self._runtime
        for result in scan_all([tier], timeout_s, runtime.clock, runtime.engine_sleep, runtime.spawn):
            if result.error:
                raise BackendError(f"cannot tell what it holds: {result.error}", tier=tier.name)
            return result.content
        return TierContent()

    def _open_again(self, absent: AbsentTier) -> None:
        """Try to open an absent tier, on a thread of its own."""
        resolved, opening, attachment = absent.resolved, absent.opening, None
        try:
            absent.opening = None
            if opening is not None:
                tier = opening.wait(0.0)
            else:
                tier = self._factory.open_tier(resolved, self._codecs_for(resolved))
            attachment = self._prepared(resolved, tier, None, SCAN_TIMEOUT_S)
            attachment.absent = absent
        except (ConfigError, PluginError, NamespaceMismatchError) as error:  # no time heals these
            self._absent.pop(absent.name, None)
            self._factory.log.report(TIER_STAYS_OUT, tier=absent.name, reason=error)
        except BaseException as error:  # noqa: BLE001 - logged when the tier left; the thread ends, and the next one tries
            _log.debug("tier %s cannot be opened yet (try %d): %s", absent.name, absent.tries, error)
        if attachment is not None:
            self._queue(attachment)
        absent.try_ended()

    # -- the engine's thread -----------------------------------------------------------------------------------------

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of the tiers that could not be opened, and are tried again. Any thread."""
        return tuple(self._absent)

    @property
    def pending(self) -> bool:
        """Whether the engine should step for a change. A tier that hangs beyond its timeout does not count."""
        return bool(self.waiting) or any(
            self._runtime.clock() < detaching.deadline_s for detaching in self._detaching.values()
        )

    def apply(self) -> None:
        """Forget detached tiers and link opened ones, without waiting. Costs nothing where nothing changes."""
        if self._absent:
            self._try_absent()
        if self._unused.waiting:
            self._unused.close_waiting()
        # In this order: a tier's last operations are submitted, and refused, before the tier is forgotten.
        if self._detaching:
            for index in self._dispatcher.take_detached():
                self._manager.forget(index)
                detaching = self._detaching.pop(index)
                self._factory.log.report(TIER_DETACHED, tier=detaching.table.name)
                detaching.change.settle()
                self._share_host_slots()
        while self.waiting:
            item = self.waiting.popleft()
            try:
                self._attach_now(item) if isinstance(item, _Attachment) else self._detach_now(item)
            except TierKVError as error:
                item.change.settle(error)
            except Exception as error:  # noqa: BLE001 - such as a thread that cannot start: the engine must go on
                item.change.settle(EngineProtocolError(f"it could not be done: {error}"))

    def _try_absent(self) -> None:
        now_s = self._runtime.clock()
        for absent in tuple(self._absent.values()):
            if absent.is_due(now_s):
                absent.try_began(now_s)
                try:
                    self._runtime.spawn(f"tierkv-{absent.name}-open", OneShot(partial(self._open_again, absent)))
                except RuntimeError:  # no thread can be started at present
                    absent.try_ended()

    def cache_was_reset(self) -> None:
        """Note a reset of all tiers: what absent tiers hold is outdated."""
        for absent in tuple(self._absent.values()):
            absent.must_be_emptied = True

    def close(self) -> None:
        """Fail all pending changes: the stack has closed, with every tier in it."""
        self._is_closed = True
        while self._absent:
            self._absent.popitem()[1].abandon()
        for detaching in list(self._detaching.values()):
            detaching.change.settle()
        while True:
            try:
                item = self.waiting.popleft()
            except IndexError:  # another thread, with a late tier, may be in this loop as well
                return
            item.change.settle(EngineProtocolError("the stack was closed before a step could do it"))
            if isinstance(item, _Attachment):
                self._unused.close(item.tier)

    def _attach_now(self, item: _Attachment) -> None:
        index, name = item.table.index, item.tier.name
        try:
            before = item.before if item.absent is None else self._place_of(item.absent, item.table)
            self._manager.attach(item.table, before)
            self.names.extend([""] * (index + 1 - len(self.names)))
            self.names[index] = name
            try:
                self._dispatcher.attach(index, item.tier, item.limits)
            except BaseException:
                self._manager.forget(self._manager.detach(name))
                raise
        except BaseException:
            self._unused.close(item.tier)
            raise
        self._share_host_slots()
        if item.absent is None:
            self._factory.log.report(TIER_ATTACHED, tier=name, **held_by(item.table))
        else:
            self._joined(item.absent, item.table)
        item.change.settle()

    def _place_of(self, absent: AbsentTier, table: LowerTier) -> str | None:
        """Return the tier ahead of which a tier that was absent is searched.

        Raises:
            EngineProtocolError: it is no longer wanted.
        """
        if self._absent.get(absent.name) is not absent:
            raise EngineProtocolError(f"tier {absent.name!r} was detached, or attached by hand, meanwhile")
        if absent.must_be_emptied and not is_ours(table):
            self._absent.pop(absent.name)
            reason = "the cache was reset meanwhile, and this tier, shared or read-only, must not be emptied"
            self._factory.log.report(TIER_STAYS_OUT, tier=absent.name, reason=reason)
            raise EngineProtocolError(f"tier {absent.name!r} holds outdated chunks")
        in_service = self._manager.tier_names[1:]
        return next((name for name in absent.followers if name in in_service), None)

    def _joined(self, absent: AbsentTier, table: LowerTier) -> None:
        self._absent.pop(absent.name, None)
        if absent.must_be_emptied:
            table.reset()
        self._factory.log.report(TIER_JOINED, tier=absent.name, attempts=absent.tries, **held_by(table))

    def _detach_now(self, item: _Detachment) -> None:
        absent = self._absent.pop(item.name, None)
        if absent is not None:
            absent.abandon()
            item.change.settle()
            return
        tables = {table.name: table for table in self._manager.tiers}
        index = self._manager.detach(item.name)
        self._detaching[index] = _Detaching(tables[item.name], item.change, self._runtime.clock() + item.timeout_s)
        self._dispatcher.detach(index, item.timeout_s)
        self._share_host_slots()

    def _share_host_slots(self) -> None:
        pinned = sum(detaching.table.residency.num_writing for detaching in self._detaching.values())
        share_host_slots(list(self._manager.tiers), self._num_slots, pinned)
