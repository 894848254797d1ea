"""Discovery and import of plugins.

Plugins load in one order on every machine: the built-in plugin, the objects handed over, then the entry points of the
group ``tierkv``, sorted by name. Each plugin gets its own pluggy manager, so it is validated alone and each fault
belongs to exactly one plugin. A plugin with a fault is recorded as :class:`~tierkv.plugins.origins.BrokenPlugin`, and
nothing of it is used. Only a stack that asks for it fails to open.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pluggy

from tierkv import hookspecs
from tierkv._version import __version__
from tierkv.abc.plugin import SPI_VERSION, BackendPlugin, CodecPlugin, PolicyPlugin
from tierkv.errors import PluginError, SpiVersionError
from tierkv.plugins.calls import PLUGIN_FAULTS, registered_values
from tierkv.plugins.origins import UNREAD_NAME, BrokenPlugin, Origin, Registered
from tierkv.plugins.registry import Observe, PluginRegistry

EntryPoint = importlib.metadata.EntryPoint

BUILTIN = EntryPoint(name="builtin", value="tierkv.plugins.builtin", group=hookspecs.PROJECT)


def load_plugins(
    extra: Sequence[object] = (),
    entry_points: Callable[..., Iterable[EntryPoint]] = importlib.metadata.entry_points,
    clock: Callable[[], float] = time.perf_counter,
) -> PluginRegistry:
    """Import every plugin and ask its hooks, once. A fault of a plugin never raises.

    Args:
        extra: plugin objects or modules without an entry point. They load before the entry points.
        entry_points: lists the installed entry points, called as ``entry_points(group="tierkv")``.
        clock: seconds, for the load times.
    """
    loader = _Loader(clock)
    loader.load(Origin(BUILTIN.name, "tierkv", __version__, BUILTIN.value, is_builtin=True), BUILTIN.load)
    for plugin in extra:
        loader.load(_origin_of_object(plugin), partial(_identity, plugin))
    found, unreadable = _discover(entry_points)
    loader.broken += unreadable
    for entry_point in sorted(found, key=lambda entry: (entry.name, *_distribution_of(entry), entry.value)):
        distribution, version = _distribution_of(entry_point)
        loader.load(Origin(entry_point.name, distribution, version, entry_point.value), entry_point.load)
    return loader.registry()


@dataclass(slots=True)
class _Loader:
    """Loads plugins one by one. The first plugin to register a name keeps it."""

    clock: Callable[[], float]
    backends: dict[str, Registered[BackendPlugin]] = field(default_factory=dict)
    codecs: dict[str, Registered[CodecPlugin]] = field(default_factory=dict)
    policies: dict[str, Registered[PolicyPlugin]] = field(default_factory=dict)
    hooks: list[tuple[Origin, pluggy.HookRelay]] = field(default_factory=list)
    broken: list[BrokenPlugin] = field(default_factory=list)

    def load(self, origin: Origin, import_plugin: Callable[[], object]) -> None:
        started_s = self.clock()
        try:
            hooks = _hooks_of(import_plugin(), origin.name)
            backends = registered_values(hooks.tierkv_backends, BackendPlugin)
            codecs = registered_values(hooks.tierkv_codecs, CodecPlugin)
            policies = registered_values(hooks.tierkv_policies, PolicyPlugin)
            self._refuse_taken_names("backend", backends, self.backends)
            self._refuse_taken_names("codec", codecs, self.codecs)
            self._refuse_taken_names("policy", policies, self.policies)
        except PLUGIN_FAULTS as error:
            self.broken.append(BrokenPlugin.from_error(self._timed(origin, started_s), error))
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
        return replace(origin, load_s=self.clock() - started_s)

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
                raise PluginError(f"the plugin registers {kind} {plugin.name!r} twice")
            seen.add(plugin.name)


def _hooks_of(plugin: object, name: str) -> pluggy.HookRelay:
    """Check the SPI version and every hook of one plugin.

    Raises:
        SpiVersionError: the plugin states no version of the plugin interface, or another one.
        PluginError: the plugin implements no hook, or an unknown one.
        pluggy.PluginValidationError: a hook has arguments that the specification lacks.
    """
    spi = getattr(plugin, "TIERKV_SPI", None)
    if spi is None:
        raise SpiVersionError(
            f"the plugin states no TIERKV_SPI: write TIERKV_SPI = {SPI_VERSION} in the module of its entry point"
        )
    if spi != SPI_VERSION:
        raise SpiVersionError(
            f"the plugin was written for TIERKV_SPI = {spi!r}, and tierkv {__version__} supports {SPI_VERSION}: "
            f"install versions of the two that agree"
        )
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = ", ".join(sorted(name for name in vars(manager.hook) if name.startswith("tierkv_")))
        raise PluginError(f"{error}; the hooks are {known}") from error
    if not manager.get_hookcallers(plugin):
        raise PluginError("the plugin implements no hook: mark its functions with @hookimpl of tierkv.hookspecs")
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
    except Exception:  # noqa: BLE001  damaged metadata only costs a name in a message
        return "", ""
    return known


def _discover(entry_points: Callable[..., Iterable[EntryPoint]]) -> tuple[list[EntryPoint], list[BrokenPlugin]]:
    try:
        return list(entry_points(group=hookspecs.PROJECT)), []
    except Exception:  # noqa: BLE001  one distribution with unreadable metadata must not hide the others
        found: list[EntryPoint] = []
        broken: list[BrokenPlugin] = []
        for item in _each_distribution():
            if isinstance(item, BrokenPlugin):
                broken.append(item)
            else:
                found.append(item)
        return found, broken


def _each_distribution() -> Iterator[EntryPoint | BrokenPlugin]:
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = UNREAD_NAME
        try:
            name = distribution.name or UNREAD_NAME
            if name in seen:  # hidden by an earlier directory of sys.path
                continue
            seen.add(name)
            yield from list(distribution.entry_points.select(group=hookspecs.PROJECT))
        except Exception as error:  # noqa: BLE001  damaged metadata is reported, and the search goes on
            yield BrokenPlugin.from_error(Origin(name, name, "", "entry_points.txt"), error)
