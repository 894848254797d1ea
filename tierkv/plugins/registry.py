"""Immutable registry of the installed plugins: backends, codecs, policies, observers, commands and broken plugins."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pluggy

from tierkv.abc.plugin import BackendPlugin, CodecPlugin, PolicyPlugin
from tierkv.errors import PluginError
from tierkv.plugins.calls import PLUGIN_FAULTS, registered_values
from tierkv.plugins.origins import UNREAD_NAME, BrokenPlugin, Origin, Registered
from tierkv.types.cache_events import CacheEvent

Observe = Callable[..., object]
"""A plugin's ``tierkv_observe``, called as ``observe(events=...)``. It may raise."""

T = TypeVar("T")

OWN_BACKENDS = ("disk", "fsspec", "lmdb", "valkey")
"""Backends in the repository of this distribution. No package index has them; another project may take their names."""
_SERVED_BY = {
    **dict.fromkeys(("file", "nvme", "ssd"), "disk"),
    **dict.fromkeys(("abfs", "az", "azure", "gcs", "gs", "http", "https", "minio", "nfs", "s3", "sftp"), "fsspec"),
    **dict.fromkeys(("redis", "rediss", "valkeys"), "valkey"),
}
"""Names of products and protocols that a user may write in place of a backend of this project."""


@dataclass(frozen=True, slots=True)
class PluginRegistry:
    """Result of :func:`load_plugins`. Immutable; may be used on any thread."""

    backends: Mapping[str, Registered[BackendPlugin]]
    """Backends by name."""
    codecs: Mapping[str, Registered[CodecPlugin]]
    """Codecs by name."""
    policies: Mapping[str, Registered[PolicyPlugin]]
    """Eviction policies by name."""
    observers: tuple[Registered[Observe], ...]
    """The ``tierkv_observe`` of each plugin that implements it. The caller must guard each call by itself."""
    origins: tuple[Origin, ...]
    """Origins of all usable plugins, in load order."""
    broken: tuple[BrokenPlugin, ...]
    """Plugins that cannot be used."""
    _hooks: tuple[tuple[Origin, pluggy.HookRelay], ...] = ()

    def require_backend(self, name: str, others: Iterable[str] = ()) -> Registered[BackendPlugin]:
        """Return the backend of that name.

        Args:
            name: of the backend.
            others: further backends that are wanted. The command that installs a missing one installs them as well.

        Raises:
            PluginError: no backend has that name, or its plugin is broken. The message names the package to install.
        """
        return self._require("backend", self.backends, name, others)

    def missing_packages(self, backends: Iterable[str]) -> list[str]:
        """Return the folders, in a checkout, of this project's backends that are wanted and not installed."""
        wanted = {_own(name) for name in backends} - {None, *self.backends}
        return [f"./plugins/tierkv-{name}" for name in OWN_BACKENDS if name in wanted]

    def require_codec(self, name: str) -> Registered[CodecPlugin]:
        """Return the codec of that name.

        Raises:
            PluginError: no codec has that name, or its plugin is broken.
        """
        return self._require("codec", self.codecs, name)

    def require_policy(self, name: str) -> Registered[PolicyPlugin]:
        """Return the eviction policy of that name.

        Raises:
            PluginError: no policy has that name, or its plugin is broken.
        """
        return self._require("policy", self.policies, name)

    @property
    def has_observers(self) -> bool:
        """Whether any plugin implements ``tierkv_observe``."""
        return bool(self.observers)

    def observe(self, events: Sequence[CacheEvent]) -> None:
        """Pass events to every observer, also after one of them raised.

        Raises:
            BaseExceptionGroup: exceptions of the observers, each with a note that names the plugin.
        """
        faults: list[BaseException] = []
        for observer in self.observers:
            try:
                observer.plugin(events=events)
            except BaseException as error:  # noqa: BLE001  plugin code may raise anything; raised below with its name
                error.add_note(f"raised by tierkv_observe of {observer.origin}")
                faults.append(error)
        if faults:
            raise BaseExceptionGroup("observers of cache events failed", faults)

    def commands(self, kind: type[T]) -> tuple[list[Registered[T]], list[BrokenPlugin]]:
        """Commands that plugins add to the ``tierkv`` program, and the plugins whose commands cannot be used.

        Args:
            kind: class of a command, ``click.Command``. Only the program imports that library.
        """
        commands: list[Registered[T]] = []
        broken: list[BrokenPlugin] = []
        for origin, hooks in self._hooks:
            try:
                found = registered_values(hooks.tierkv_commands, kind)
            except PLUGIN_FAULTS as error:
                broken.append(BrokenPlugin.from_error(origin, error))
            else:
                commands += [Registered(command, origin) for command in found]
        return commands, broken

    def _require(
        self, kind: str, known: Mapping[str, Registered[T]], name: str, others: Iterable[str] = ()
    ) -> Registered[T]:
        if name in known:
            return known[name]
        for broken in self.broken:
            if name in (broken.name, broken.distribution.removeprefix("tierkv-")):
                raise PluginError(f"{kind} {name!r}: its plugin {broken.origin} is broken: {broken.error}")
        installed = ", ".join(sorted(known)) or "none"
        own = _own(name)
        is_own = kind == "backend" and own is not None
        hint = f"backend {own!r} serves it" if is_own and own != name else nearest_hint(name, known)
        parts = [f"unknown {kind} {name!r}", hint, f"installed: {installed}"]
        if is_own and own not in known:
            parts.append(f"in a checkout of tierkv: pip install . {' '.join(self.missing_packages([name, *others]))}")
        elif (
            kind == "backend" and not is_own and name.isidentifier() and not _is_a_slip(name, known)
        ):  # a slip must not fetch a foreign package
            parts.append(f"if a plugin provides it: pip install tierkv-{name.lower().replace('_', '-')}")
        if self.broken:
            unread = [broken for broken in self.broken if broken.name == UNREAD_NAME]
            names = [broken.name for broken in self.broken if broken.name != UNREAD_NAME]
            names += [f"{len(unread)} packages that cannot be read ({unread[0].error})"] if unread else []
            parts.append(f"installed but broken: {', '.join(names)} (`tierkv plugins` says why)")
        raise PluginError("; ".join(part for part in parts if part))


def _own(name: str) -> str | None:
    """Backend of this project that has a name, or serves it; None: none."""
    return name if name in OWN_BACKENDS else _SERVED_BY.get(name.lower())


def _is_a_slip(name: str, choices: Iterable[str]) -> bool:
    """Whether a name is a misspelt choice, rather than one of its own such as ``redis`` beside ``disk``."""
    return bool(difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.75))


def nearest_hint(name: str, choices: Iterable[str]) -> str:
    """``"did you mean 'disk'?"`` where a choice is similar to the name; otherwise an empty string."""
    close = difflib.get_close_matches(name.lower(), sorted(choices), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""
