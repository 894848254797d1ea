"""Speeds of a stack as gauges. A gauge appears when its value is known; there is no made-up zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from tierkv.metrics.definitions import PREFILL_SPEED, READ_LATENCY, READ_SPEED, Metric


class Gauge(NamedTuple):
    """One value, with the values of its metric's own labels."""

    metric: Metric
    label_values: tuple[str, ...]
    value: float


class TierSpeeds(Protocol):
    """Source of measured speeds: ``stack.tiers``."""

    def speeds(self) -> Mapping[str, Mapping[str, float]]:
        """Measured latency and bandwidth, per lower tier."""


class PrefillSpeed(Protocol):
    """Source of the prefill rate: ``stack.metrics``."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The engine's prefill rate; None: not known yet."""


class Speeds(Protocol):
    """The part of :class:`tierkv.Stack` that is read."""

    @property
    def tiers(self) -> TierSpeeds:
        """The lower tiers."""

    @property
    def metrics(self) -> PrefillSpeed:
        """The measurements."""


def gauges(stack: Speeds) -> Iterator[Gauge]:
    """Yield the speeds that are known."""
    for tier, speeds in stack.tiers.speeds().items():
        for metric, field in ((READ_LATENCY, "latency_s"), (READ_SPEED, "bytes_per_s")):
            if field in speeds:
                yield Gauge(metric, (tier,), speeds[field])
    if stack.metrics.prefill_tokens_per_s is not None:
        yield Gauge(PREFILL_SPEED, (), stack.metrics.prefill_tokens_per_s)
