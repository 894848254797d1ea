"""Assumptions of a plan: sizes, speeds and prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.config.resolving import ResolvedStack, ResolvedTier
from tierkv.errors import ConfigError
from tierkv.types.cache_events import HOST

ENGINE = "engine"
"""Name of the price of an engine."""
GIB = 1024**3
BUSY_MAX, BUSY_WINDOW_S = 0.8, 3600.0
"""Share of its time that an engine may spend on the prompts of the busiest hour. More engines are planned beyond it."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Speed of reads from a tier."""

    bytes_per_s: float
    """Bytes per second, all threads together."""
    latency_s: float
    """Seconds before the first byte of a request's chunks."""

    def load_s(self, chunk_bytes: int) -> float:
        """Seconds of one chunk, without the latency."""
        return chunk_bytes / self.bytes_per_s


HOST_SPEED = TierSpeed(20e9, 0.0002)
"""Copies from pinned memory to a GPU over PCIe 4, unless stated."""
LOCAL_SPEED = TierSpeed(2.5e9, 0.001)
"""Reads from one NVMe drive, unless stated."""
SHARED_SPEED = TierSpeed(1e9, 0.03)
"""Reads from storage behind a network, unless stated."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Facts that a trace does not have."""

    prefill_tokens_per_s: float
    """Prompt tokens that one engine computes per second."""
    chunk_tokens: int
    """Tokens per chunk of the trace."""
    chunk_bytes: int
    """Bytes per chunk."""
    engines: int | None = None
    """Engines for the times to the first token; None: as many as needed without a cache."""
    speeds: Mapping[str, TierSpeed] = field(default_factory=dict)
    """Speeds by name of tier or backend, where they are not the defaults."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Prices per GiB by name of tier or backend, and of an engine; empty: none."""
    more_bytes: int | None = None
    """Room that is added to each tier in turn, to see what it would bring; None: as much as the tier has."""

    @property
    def chunk_prefill_s(self) -> float:
        """Seconds in which an engine computes one chunk."""
        return self.chunk_tokens / self.prefill_tokens_per_s

    def speed_of(self, tier: ResolvedTier | None) -> TierSpeed:
        """Speed of a tier; None: of the host tier."""
        if tier is None:
            return self.speeds.get(HOST, HOST_SPEED)
        default = SHARED_SPEED if tier.backend.capabilities.shared else LOCAL_SPEED
        return self.speeds.get(tier.config.name, self.speeds.get(tier.backend.name, default))

    def price_per_gib(self, tier: ResolvedTier | None) -> float | None:
        """Price of a tier per GiB; None: no prices were given.

        Raises:
            ConfigError: there are prices, but none of this tier.
        """
        if not self.prices:
            return None
        names = [HOST] if tier is None else [tier.config.name, tier.backend.name]
        for name in names:
            if name in self.prices:
                return self.prices[name]
        raise ConfigError(
            f"there is no price of tier {names[0]!r}: add --price {names[0]}=PRICE, per GiB; 0 is allowed"
        )

    def check_names(self, stacks: Mapping[str, ResolvedStack]) -> None:
        """Check that each speed and price belongs to a tier of some stack, and that no price is missing.

        Raises:
            ConfigError: one does not.
        """
        known = {HOST}
        for stack in stacks.values():
            known.update(name for tier in stack.tiers for name in (tier.config.name, tier.backend.name))
        for option, names, allowed in (("--speed", self.speeds, known), ("--price", self.prices, {*known, ENGINE})):
            for name in sorted(set(names) - allowed):
                raise ConfigError(
                    f"{option} {name}=...: no stack has such a tier or backend; names: {', '.join(sorted(allowed))}"
                )
        for stack in stacks.values():
            for tier in (None, *stack.tiers):
                self.price_per_gib(tier)
