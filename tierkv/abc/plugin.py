"""What a plugin registers: a backend, codec or policy with its name, its options and how to make one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tierkv.abc.backend import AsyncBackend, Backend, BackendContext
from tierkv.abc.capabilities import Capabilities
from tierkv.abc.codec import Codec, CodecContext
from tierkv.abc.policy import EvictionPolicy

SPI_VERSION = 1
"""Version of everything in ``tierkv.abc`` and ``tierkv.hookspecs``. A plugin module states the one it was written for
as ``TIERKV_SPI = 1``; another number is refused by name."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of ``tierkv check``: what was looked at, whether it is good, and if not, what to do."""

    subject: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class BackendPlugin:
    """A kind of tier.

    name: what users write as ``backend = "name"``.
    summary: one line for ``tierkv plugins``.
    options: a dataclass; its fields are the keys users may write in the tier's table beside the common ones. Fields
        are validated by their annotations; ``__post_init__`` may raise ValueError with a message for the user.
    capabilities: what it can do, with any options.
    open: makes a backend, or raises a :class:`~tierkv.errors.TierKVError`. Blocking is fine.
    check: optional; looks at the place without changing it, for ``tierkv check``. Gets the options and the capacity
        in bytes (or None).
    """

    name: str
    summary: str
    options: type
    capabilities: Capabilities
    open: Callable[[BackendContext, Any], Backend | AsyncBackend]
    check: Callable[[Any, int | None], Iterable[CheckResult]] | None = None


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a plugin that has none."""


@dataclass(frozen=True, slots=True)
class CodecPlugin:
    """A way of writing payloads at rest.

    name: at most 16 ASCII bytes, stored in every frame. Users write ``codec = "name"``, or a table with the name and
        options.
    summary: one line for ``tierkv plugins``.
    open: makes a codec, or raises a :class:`~tierkv.errors.ConfigError` where it cannot serve these payloads. Where no
        option is required it is also called with the defaults, to read frames of an earlier configuration.
    lossy: what comes back is an approximation. Only tiers with ``lossy = true`` write and read such frames.
    options: a dataclass, as for :class:`BackendPlugin`.
    conceals: its payloads must not lie at rest in the clear: they are never stored raw, nor is their checksum.
    check: optional; looks at what its options name, for ``tierkv check``. Gets the options.
    """

    name: str
    summary: str
    open: Callable[[CodecContext, Any], Codec]
    lossy: bool = False
    options: type = NoOptions
    conceals: bool = False
    check: Callable[[Any], Iterable[CheckResult]] | None = None


@dataclass(frozen=True, slots=True)
class PolicyPlugin:
    """An eviction policy. ``open`` gets the number of chunks that the tier can hold, or None where it has no bound."""

    name: str
    summary: str
    open: Callable[[int | None], EvictionPolicy]
