"""Speeds and health of a stack as gauges. A gauge appears when its value is known; there is no made-up zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tierkv.metrics.definitions import (
    PREFILL_SPEED,
    READ_LATENCY,
    READ_SPEED,
    TIER_ROOM,
    TIER_USABLE,
    TIER_WRITABLE,
    Metric,
)
from tierkv.metrics.watched import Watched


class Gauge(NamedTuple):
    """One value of a gauge."""

    metric: Metric
    """Definition."""
    label_values: tuple[str, ...]
    """Values of the metric's own labels."""
    value: float
    """Current value."""


def gauges(stack: Watched) -> Iterator[Gauge]:
    """Yield the health and the room of each tier, and the speeds that are known."""
    for tier, health in stack.tiers.health().items():
        yield Gauge(TIER_USABLE, (tier,), float(health.usable))
        yield Gauge(TIER_WRITABLE, (tier,), float(health.writable))
    for tier, room_bytes in stack.tiers.room().items():
        yield Gauge(TIER_ROOM, (tier,), float(room_bytes))
    for tier, speeds in stack.tiers.speeds().items():
        for metric, field in ((READ_LATENCY, "latency_s"), (READ_SPEED, "bytes_per_s")):
            if field in speeds:
                yield Gauge(metric, (tier,), speeds[field])
    if stack.metrics.prefill_tokens_per_s is not None:
        yield Gauge(PREFILL_SPEED, (), stack.metrics.prefill_tokens_per_s)
