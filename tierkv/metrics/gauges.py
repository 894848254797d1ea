"""What a stack knows of speeds, as gauges: there once it is known, and never a made-up zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from tierkv.metrics.definitions import PREFILL_SPEED, READ_LATENCY, READ_SPEED, Metric


class Gauge(NamedTuple):
    """One value, with the values of its metric's own labels."""

    metric: Metric
    label_values: tuple[str, ...]
    value: float


class Speeds(Protocol):
    """The part of :class:`~tierkv.stack.stack.Stack` that is read."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast the engine computes prompts."""

    def tier_speeds(self) -> Mapping[str, Mapping[str, float]]:
        """Measured latency and bandwidth, per lower tier."""


def gauges(stack: Speeds) -> Iterator[Gauge]:
    """Those that are known by now."""
    for tier, speeds in stack.tier_speeds().items():
        for metric, field in ((READ_LATENCY, "latency_s"), (READ_SPEED, "bytes_per_s")):
            if field in speeds:
                yield Gauge(metric, (tier,), speeds[field])
    if stack.prefill_tokens_per_s is not None:
        yield Gauge(PREFILL_SPEED, (), stack.prefill_tokens_per_s)
