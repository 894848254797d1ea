"""Plugins that exist to be named in a configuration; nothing here is ever opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest

from tierkv.abc import BackendPlugin, Capabilities, CodecPlugin, PolicyPlugin
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry


def never_opened(*_: object) -> NoReturn:
    """Function in place of ``open``: validating a configuration must not open anything.

    Raises:
        AssertionError: always.
    """
    raise AssertionError("a configuration was validated, and something was opened")


class Mode(Enum):
    """An enum among options."""

    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, slots=True)
class Login:
    """A table among options."""

    user: str
    password: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """One option of each kind."""

    path: Path
    direct: bool = True
    ratio: float = 0.5
    segment_bytes: int = 2**20
    spare_bytes: int | None = None
    depth: int = 4
    mode: Mode = Mode.SAFE
    sync: Literal["always", "never"] = "never"
    hosts: tuple[str, ...] = ()
    login: Login | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.depth > 8:
            raise ValueError("depth is at most 8")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """A backend without options."""


class Plugins:
    """A plugin object as a distribution would offer it."""

    TIERKV_SPI = 1

    def __init__(
        self,
        backends: Sequence[BackendPlugin] = (),
        codecs: Sequence[CodecPlugin] = (),
        policies: Sequence[PolicyPlugin] = (),
    ) -> None:
        self.backends, self.codecs, self.policies = backends, codecs, policies

    @hookimpl
    def tierkv_backends(self) -> Sequence[BackendPlugin]:
        return self.backends

    @hookimpl
    def tierkv_codecs(self) -> Sequence[CodecPlugin]:
        return self.codecs

    @hookimpl
    def tierkv_policies(self) -> Sequence[PolicyPlugin]:
        return self.policies


MakeBackend = Callable[..., BackendPlugin]


@pytest.fixture
def make_backend() -> MakeBackend:
    """Makes a plugin: `make_backend("disk", shared=True)`, with these capabilities."""

    def make(name: str, options: type = Options, **capabilities: Any) -> BackendPlugin:
        return BackendPlugin(name, f"the {name} backend", options, Capabilities(**capabilities), never_opened)

    return make


@pytest.fixture
def make_registry() -> Callable[..., PluginRegistry]:
    """Makes a registry of the built-ins and these backends; `codecs=` adds codecs."""

    def make(*backends: BackendPlugin, codecs: Sequence[CodecPlugin] = ()) -> PluginRegistry:
        return load_plugins([Plugins(backends, codecs)], entry_points=lambda group: [])

    return make


@pytest.fixture
def registry(make_backend: MakeBackend, make_registry: Callable[..., PluginRegistry]) -> PluginRegistry:
    """The built-ins, a local, a shared, a read-only backend, and a lossy codec."""
    return make_registry(
        make_backend("disk"),
        make_backend("bucket", NoOptions, shared=True, bounded=False),
        make_backend("archive", NoOptions, read_only=True, bounded=False),
        codecs=[CodecPlugin("rough", "half of the bits", never_opened, lossy=True)],
    )
