"""Which backends, codecs, policies, observers and commands are installed, where each comes from, and what is broken.

Nothing is imported before :func:`load_plugins` is called, and it loads in one order on every machine: the built-ins,
the objects it was handed, then the entry points of group ``tierkv`` sorted by name. Every plugin gets a pluggy manager
of its own: it is validated alone, and whatever it does wrong has exactly one owner. Such a plugin is recorded as
:class:`BrokenPlugin`, none of it is used, and only a stack that asks for it stops.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import pluggy

from tierkv import __version__, hookspecs
from tierkv.abc.plugin import SPI_VERSION, BackendPlugin, CodecPlugin, PolicyPlugin
from tierkv.errors import PluginError, SpiVersionError, TierKVError
from tierkv.plugin_checks import check_plugin_value
from tierkv.types.cache_events import CacheEvent

EntryPoint = importlib.metadata.EntryPoint
Observe = Callable[..., object]
"""An observer's ``tierkv_observe``, called as ``observe(events=...)``; it may raise."""

BUILTIN = EntryPoint(name="builtin", value="tierkv.builtins", group=hookspecs.PROJECT)

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


def load_plugins(
    extra: Sequence[object] = (),
    entry_points: Callable[..., Iterable[EntryPoint]] = importlib.metadata.entry_points,
    clock: Callable[[], float] = time.perf_counter,
) -> PluginRegistry:
    """Import and ask every plugin, once. Never raises for a plugin's fault.

    Args:
        extra: plugin objects or modules that no distribution announces; they come before the entry points.
        entry_points: ``entry_points(group="tierkv")`` gives the installed ones.
        clock: seconds, for the load times.
    """
    loader = _Loader(clock)
    loader.take(Origin(BUILTIN.name, "tierkv", __version__, BUILTIN.value), BUILTIN.load)
    for plugin in extra:
        loader.take(_origin_of_object(plugin), partial(_identity, plugin))
    found, unreadable = _discover(entry_points)
    loader.broken += unreadable
    for entry_point in sorted(found, key=lambda entry: (entry.name, *_distribution_of(entry), entry.value)):
        distribution, version = _distribution_of(entry_point)
        loader.take(Origin(entry_point.name, distribution, version, entry_point.value), entry_point.load)
    return loader.registry()


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


@dataclass(slots=True)
class _Loader:
    """Takes plugins one by one; the first to claim a name keeps it."""

    clock: Callable[[], float]
    backends: dict[str, Registered[BackendPlugin]] = field(default_factory=dict)
    codecs: dict[str, Registered[CodecPlugin]] = field(default_factory=dict)
    policies: dict[str, Registered[PolicyPlugin]] = field(default_factory=dict)
    hooks: list[tuple[Origin, pluggy.HookRelay]] = field(default_factory=list)
    broken: list[BrokenPlugin] = field(default_factory=list)

    def take(self, origin: Origin, load: Callable[[], object]) -> None:
        started_s = self.clock()
        try:
            hooks = _hooks_of(load(), origin.name)
            backends = _ask(hooks.tierkv_backends, BackendPlugin)
            codecs = _ask(hooks.tierkv_codecs, CodecPlugin)
            policies = _ask(hooks.tierkv_policies, PolicyPlugin)
            self._refuse_taken_names("backend", backends, self.backends)
            self._refuse_taken_names("codec", codecs, self.codecs)
            self._refuse_taken_names("policy", policies, self.policies)
        except _PLUGIN_FAULTS as error:
            self.broken.append(_broken(self._timed(origin, started_s), error))
            return
        origin = self._timed(origin, started_s)
        self.backends.update({plugin.name: Registered(plugin, origin) for plugin in backends})
        self.codecs.update({plugin.name: Registered(plugin, origin) for plugin in codecs})
        self.policies.update({plugin.name: Registered(plugin, origin) for plugin in policies})
        self.hooks.append((origin, hooks))

    def registry(self) -> PluginRegistry:
        observers: list[Registered[Observe]] = [
            Registered(hooks.tierkv_observe, origin)
            for origin, hooks in self.hooks
            if hooks.tierkv_observe.get_hookimpls()
        ]
        return PluginRegistry(
            backends=MappingProxyType(self.backends),
            codecs=MappingProxyType(self.codecs),
            policies=MappingProxyType(self.policies),
            observers=tuple(observers),
            origins=tuple(origin for origin, _ in self.hooks),
            broken=tuple(self.broken),
            _hooks=tuple(self.hooks),
        )

    def _timed(self, origin: Origin, started_s: float) -> Origin:
        return Origin(origin.name, origin.distribution, origin.version, origin.target, self.clock() - started_s)

    @staticmethod
    def _refuse_taken_names(kind: str, offered: Iterable[Any], taken: Mapping[str, Registered[Any]]) -> None:
        seen: set[str] = set()
        for plugin in offered:
            if plugin.name in taken:
                raise PluginError(
                    f"{kind} {plugin.name!r} is already registered by {taken[plugin.name].origin}, which is used; "
                    f"uninstall one of the two"
                )
            if plugin.name in seen:
                raise PluginError(f"it registers {kind} {plugin.name!r} twice")
            seen.add(plugin.name)


def _hooks_of(plugin: object, name: str) -> pluggy.HookRelay:
    """Check the version and every hook of one plugin, alone.

    Raises:
        SpiVersionError: it states no version of the plugin interface, or another one.
        PluginError: it implements no hook.
        pluggy.PluginValidationError: a hook it implements is unknown or has arguments that the specification lacks.
    """
    spi = getattr(plugin, "TIERKV_SPI", None)
    if spi is None:
        raise SpiVersionError(f"it states no TIERKV_SPI; this tierkv serves TIERKV_SPI = {SPI_VERSION}")
    if spi != SPI_VERSION:
        raise SpiVersionError(
            f"it was written for TIERKV_SPI = {spi!r}, and tierkv {__version__} serves {SPI_VERSION}: "
            f"install versions of the two that agree"
        )
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise PluginError("it implements no hook: mark its functions with @hookimpl of tierkv.hookspecs")
    return manager.hook


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


def _origin_of_object(plugin: object) -> Origin:
    name = getattr(plugin, "__name__", type(plugin).__name__)
    return Origin(name, target=getattr(plugin, "__module__", name))


def _identity(plugin: object) -> object:
    return plugin


def _distribution_of(entry_point: EntryPoint) -> tuple[str, str]:
    try:
        distribution = entry_point.dist
        known = (distribution.name or "", distribution.version or "") if distribution else ("", "")
    except Exception:  # noqa: BLE001  damaged metadata costs a name in a message, nothing else
        return "", ""
    return known


def _discover(entry_points: Callable[..., Iterable[EntryPoint]]) -> tuple[list[EntryPoint], list[BrokenPlugin]]:
    try:
        return list(entry_points(group=hookspecs.PROJECT)), []
    except Exception:  # noqa: BLE001  one distribution with unreadable metadata must not hide the others
        found: list[EntryPoint] = []
        broken: list[BrokenPlugin] = []
        for item in _one_by_one():
            if isinstance(item, BrokenPlugin):
                broken.append(item)
            else:
                found.append(item)
        return found, broken


def _one_by_one() -> Iterator[EntryPoint | BrokenPlugin]:
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = "?"
        try:
            name = distribution.name or "?"
            if name in seen:  # an earlier directory of sys.path hides it
                continue
            seen.add(name)
            yield from list(distribution.entry_points.select(group=hookspecs.PROJECT))
        except Exception as error:  # noqa: BLE001  whatever its metadata holds, it is named and the search goes on
            yield _broken(Origin(name, name, "", "entry_points.txt"), error)
