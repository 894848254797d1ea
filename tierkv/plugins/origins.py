"""Values that link a registered backend, codec or policy, or a failure, to the plugin that it belongs to."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierkv.errors import PluginError

T = TypeVar("T")
UNREAD_NAME = "?"
"""Name of a plugin whose package cannot be read."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a plugin: its entry point and its distribution."""

    name: str
    """Name of the entry point. For an object handed to :func:`load_plugins`: name of its module or class."""
    distribution: str = ""
    """Name of the installed distribution; empty where unknown."""
    version: str = ""
    """Version of the distribution; empty where unknown."""
    target: str = ""
    """Object that the entry point names: ``module`` or ``module:object``."""
    load_s: float = 0.0
    """Seconds spent on importing the plugin and asking its hooks."""
    is_builtin: bool = False
    """Whether the plugin is the one that ships with tierkv."""

    def __str__(self) -> str:
        """Text for messages, such as ``tierkv-disk 0.1.0 (disk = tierkv_disk)``."""
        source = f"{self.distribution} {self.version}".strip()
        return f"{source} ({self.name} = {self.target})" if source else f"{self.name} ({self.target})"


@dataclass(frozen=True, slots=True)
class Registered(Generic[T]):
    """A value that a plugin registered, and its origin."""

    plugin: T
    origin: Origin


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An installed plugin that cannot be used."""

    origin: Origin
    error: str
    """The failure in one line."""
    traceback: str = ""
    """The whole traceback, for the plugin's author."""

    @classmethod
    def from_error(cls, origin: Origin, error: BaseException) -> BrokenPlugin:
        """Record of a plugin that raised ``error`` at import or in a hook."""
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, PluginError) else f"{type(error).__name__}: "
        return cls(origin, f"{kind}{text}".removesuffix(": "), "".join(traceback.format_exception(error)))

    @property
    def name(self) -> str:
        """Name of the entry point."""
        return self.origin.name

    @property
    def distribution(self) -> str:
        """Name of the installed distribution, or empty."""
        return self.origin.distribution

    @property
    def version(self) -> str:
        """Version of the distribution, or empty."""
        return self.origin.version
