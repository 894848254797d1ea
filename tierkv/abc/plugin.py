"""Values that a plugin registers: a backend, codec or policy, with its name, its options and its ``open`` function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tierkv.abc.at_rest import AtRest
from tierkv.abc.backend import AsyncBackend, Backend, BackendContext
from tierkv.abc.capabilities import Capabilities
from tierkv.abc.codec import Codec, CodecContext
from tierkv.abc.policy import EvictionPolicy

SPI_VERSION = 1
"""Version of everything in ``tierkv.abc`` and ``tierkv.hookspecs``.

A plugin module states the version that it was written for as ``TIERKV_SPI = 1``. Another number is refused by name.
"""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of ``tierkv check``."""

    subject: str
    """The thing that was checked, in a few words."""
    ok: bool
    """Whether the check passed."""
    detail: str
    """The facts found."""
    fix: str = ""
    """The action that repairs a failure, or that a warning asks for; empty otherwise."""
    warns: bool = False
    """Whether a check that passed found something to look at, such as storage that grows without bound."""


@dataclass(frozen=True, slots=True)
class BackendPlugin:
    """A kind of tier."""

    name: str
    """Name that users write as ``backend = "name"``: at most 32 lower-case letters, digits, ``-`` and ``_``."""
    summary: str
    """One line for ``tierkv plugins``."""
    options: type
    """Dataclass whose fields are the keys allowed in the tier's table, beside the common keys. Fields are validated by
    their annotations. ``__post_init__`` may raise ValueError with a message for the user."""
    capabilities: Capabilities
    """Capabilities that hold with any options."""
    open: Callable[[BackendContext, Any], Backend | AsyncBackend]
    """Opens a backend from the context and the options, or raises a :class:`~tierkv.errors.TierKVError`. May block."""
    check: Callable[[Any, int | None], Iterable[CheckResult]] | None = None
    """Optional. Inspects the storage for ``tierkv check`` without changing it. Takes the options and the capacity in
    bytes, or None."""
    at_rest: AtRest | None = None
    """Optional. Abilities for ``tierkv ls``, ``verify``, ``copy`` and others, which work on storage without a stack."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a plugin that has none."""


@dataclass(frozen=True, slots=True)
class CodecPlugin:
    """A stored form of payloads."""

    name: str
    """Name of at most 16 ASCII characters, stored in every frame. Users write ``codec = "name"``, or a table with the
    name and options."""
    summary: str
    """One line for ``tierkv plugins``."""
    open: Callable[[CodecContext, Any], Codec]
    """Opens a codec from the context and the options, or raises a :class:`~tierkv.errors.ConfigError` where it cannot
    encode these payloads. Where no option is required, it is also called with the defaults, to read frames of an
    earlier configuration."""
    lossy: bool = False
    """Whether decoded payloads are approximations. Only tiers with ``lossy = true`` write and read such frames."""
    options: type = NoOptions
    """Dataclass of options, as for :class:`BackendPlugin`."""
    conceals: bool = False
    """Whether payloads must not be stored in the clear. They are then never stored raw, nor is their checksum."""
    check: Callable[[Any], Iterable[CheckResult]] | None = None
    """Optional. Inspects the resources that the options name, for ``tierkv check``. Takes the options."""


@dataclass(frozen=True, slots=True)
class PolicyPlugin:
    """An eviction policy."""

    name: str
    """Name that users write as ``policy = "name"``: at most 32 lower-case letters, digits, ``-`` and ``_``."""
    summary: str
    """One line for ``tierkv plugins``."""
    open: Callable[[int | None], EvictionPolicy]
    """Opens a policy. Takes the number of chunks that the tier can hold, or None where it has no bound. With quotas,
    each tenant has a policy of its own: the number is what the tenant is expected to store, and it may store more."""
