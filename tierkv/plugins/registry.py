"""What is installed: backends, codecs, policies, observers and commands, and what is broken."""

from __future__ import annotations

import difflib
import importlib.metadata
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import pluggy

from tierkv.abc.plugin import BackendPlugin, CodecPlugin, PolicyPlugin
from tierkv.errors import PluginError, TierKVError
from tierkv.plugins.validation import check_plugin_value
from tierkv.types.cache_events import CacheEvent

EntryPoint = importlib.metadata.EntryPoint


Observe = Callable[..., object]
"""An observer's ``tierkv_observe``, called as ``observe(events=...)``; it may raise."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin comes from.

    name: of its entry point; of its class or module for an object handed to :func:`load_plugins`.
    distribution, version: what was installed; empty where nobody knows.
    target: what the entry point points at, ``module`` or ``module:object``.
    load_s: seconds that importing and asking it took.
    """

    name: str
    distribution: str = ""
    version: str = ""
    target: str = ""
    load_s: float = 0.0

    def __str__(self) -> str:
        """For messages: ``tierkv-disk 0.1.0 (disk = tierkv_disk)``."""
        source = f"{self.distribution} {self.version}".strip()
        return f"{source} ({self.name} = {self.target})" if source else f"{self.name} ({self.target})"


@dataclass(frozen=True, slots=True)
class Registered(Generic[T]):
    """Something a plugin registered, and its origin."""

    plugin: T
    origin: Origin


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An installed plugin that cannot be used. ``error``: one line; ``traceback``: all of it, for its author."""

    origin: Origin
    error: str
    traceback: str = ""

    @property
    def name(self) -> str:
        """Name of the entry point."""
        return self.origin.name

    @property
    def distribution(self) -> str:
        """The installed distribution, or empty."""
        return self.origin.distribution

    @property
    def version(self) -> str:
        """Version of the distribution, or empty."""
        return self.origin.version


@dataclass(frozen=True, slots=True)
class PluginRegistry:
    """What :func:`load_plugins` found. Immutable; any thread.

    origins: every usable plugin in load order.
    observers: the ``tierkv_observe`` of each plugin that has one. Call each under its own guard.
    """

    backends: Mapping[str, Registered[BackendPlugin]]
    codecs: Mapping[str, Registered[CodecPlugin]]
    policies: Mapping[str, Registered[PolicyPlugin]]
    observers: tuple[Registered[Observe], ...]
    origins: tuple[Origin, ...]
    broken: tuple[BrokenPlugin, ...]
    _hooks: tuple[tuple[Origin, pluggy.HookRelay], ...] = ()

    def require_backend(self, name: str) -> Registered[BackendPlugin]:
        """The backend of that name.

        Raises:
            PluginError: there is none, or the plugin of that name is broken; says which, and what to install.
        """
        return _require(self, "backend", self.backends, name)

    def require_codec(self, name: str) -> Registered[CodecPlugin]:
        """The codec of that name. Raises as :meth:`require_backend`."""
        return _require(self, "codec", self.codecs, name)

    def require_policy(self, name: str) -> Registered[PolicyPlugin]:
        """The eviction policy of that name. Raises as :meth:`require_backend`."""
        return _require(self, "policy", self.policies, name)

    @property
    def has_observers(self) -> bool:
        """Whether anybody implements ``tierkv_observe``."""
        return bool(self.observers)

    def observe(self, events: Sequence[CacheEvent]) -> None:
        """Tell every observer. One that raises keeps the events from nobody else.

        Raises:
            ExceptionGroup: what observers raised, after all of them were told.
        """
        faults: list[Exception] = []
        for observer in self.observers:
            try:
                observer.plugin(events=events)
            except Exception as error:  # noqa: BLE001  somebody else's code; its fault is raised below, named
                error.add_note(f"raised by tierkv_observe of {observer.origin}")
                faults.append(error)
        if faults:
            raise ExceptionGroup("observers of cache events failed", faults)

    def commands(self, kind: type[T]) -> tuple[list[Registered[T]], list[BrokenPlugin]]:
        """Commands that plugins add to the ``tierkv`` program, and the plugins whose commands cannot be used.

        ``kind`` is what a command is, ``click.Command``; only the program knows that library.
        """
        commands: list[Registered[T]] = []
        broken: list[BrokenPlugin] = []
        for origin, hooks in self._hooks:
            try:
                found = _ask(hooks.tierkv_commands, kind)
            except _PLUGIN_FAULTS as error:
                broken.append(_broken(origin, error))
            else:
                commands += [Registered(command, origin) for command in found]
        return commands, broken


def nearest_hint(name: str, choices: Iterable[str]) -> str:
    """``"did you mean 'disk'?"`` where a choice is close to the name, else an empty string."""
    close = difflib.get_close_matches(name.lower(), sorted(choices), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


_PLUGIN_FAULTS = (Exception, SystemExit)
"""What may come out of somebody else's code at import or in a hook. Anything: the plugin is then named and left out."""


def opened(
    what: str, origin: Origin, make: Callable[[], T], *, tier: str | None = None, error: type[TierKVError] = PluginError
) -> T:
    """What somebody's ``open`` makes; ``what`` it is and for which tier, for the message.

    Raises:
        TierKVError: as the plugin raised it itself; or an ``error`` that names the plugin, whatever else it raised.
    """
    try:
        return make()
    except TierKVError as fault:
        fault.tier = fault.tier or tier
        raise
    except _PLUGIN_FAULTS as fault:
        place = "" if tier is None else f"tier {tier!r}: "
        text = f"{place}{what} of {origin} cannot be opened: {type(fault).__name__}: {fault}".removesuffix(": ")
        raise error(text, tier=tier) from fault


def _ask(hook: pluggy.HookCaller, kind: type[T]) -> list[T]:
    """Call a registering hook of one plugin and check what it gives.

    Raises:
        PluginError: it gives something else than an iterable of ``kind``, or a value that contradicts itself.
    """
    answers = hook()
    asked = sum(1 for impl in hook.get_hookimpls() if not (impl.wrapper or impl.hookwrapper))
    if len(answers) < asked:  # pluggy leaves None out
        raise PluginError(f"{hook.name} returned None; return a list of {kind.__name__}")
    values: list[T] = []
    for answer in answers:
        for value in answer:
            if not isinstance(value, kind):
                raise PluginError(f"{hook.name} gave a {type(value).__name__} ({value!r:.80}); give {kind.__name__}")
            check_plugin_value(value)
            values.append(value)
    return values


def _require(registry: PluginRegistry, kind: str, known: Mapping[str, Registered[T]], name: str) -> Registered[T]:
    if name in known:
        return known[name]
    for broken in registry.broken:
        if name in (broken.name, broken.distribution.removeprefix("tierkv-")):
            raise PluginError(f"{kind} {name!r}: its plugin {broken.origin} is broken: {broken.error}")
    parts = [f"unknown {kind} {name!r}", nearest_hint(name, known), f"installed: {', '.join(sorted(known)) or 'none'}"]
    if kind == "backend" and name.isidentifier():
        parts.append(f"if a plugin provides it: pip install tierkv-{name.lower().replace('_', '-')}")
    if registry.broken:
        names = ", ".join(broken.name for broken in registry.broken)
        parts.append(f"installed but broken: {names} (`tierkv plugins` says why)")
    raise PluginError("; ".join(part for part in parts if part))


def _broken(origin: Origin, error: BaseException) -> BrokenPlugin:
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, PluginError) else f"{type(error).__name__}: "
    return BrokenPlugin(origin, f"{kind}{text}".removesuffix(": "), "".join(traceback.format_exception(error)))
