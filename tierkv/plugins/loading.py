"""Which backends, codecs, policies, observers and commands are installed, where each comes from, and what is broken.

Nothing is imported before :func:`load_plugins` is called, and it loads in one order on every machine: the built-ins,
the objects it was handed, then the entry points of group ``tierkv`` sorted by name. Every plugin gets a pluggy manager
of its own: it is validated alone, and whatever it does wrong has exactly one owner. Such a plugin is recorded as
:class:`BrokenPlugin`, none of it is used, and only a stack that asks for it stops.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import pluggy

from tierkv import hookspecs
from tierkv._version import __version__
from tierkv.abc.plugin import SPI_VERSION, BackendPlugin, CodecPlugin, PolicyPlugin
from tierkv.errors import PluginError, SpiVersionError
from tierkv.plugins.registry import (
    _PLUGIN_FAULTS,
    BrokenPlugin,
    EntryPoint,
    Observe,
    Origin,
    PluginRegistry,
    Registered,
    _ask,
    _broken,
)

BUILTIN = EntryPoint(name="builtin", value="tierkv.plugins.builtin", group=hookspecs.PROJECT)


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
