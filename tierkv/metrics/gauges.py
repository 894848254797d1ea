"""Speeds and health of a stack as gauges. A gauge appears when its value is known; there is no made-up zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tierkv.metrics import definitions as names
from tierkv.metrics.definitions import Metric
from tierkv.metrics.watched import Watched


class Gauge(NamedTuple):
    """One value of a gauge."""

    metric: Metric
    """Definition."""
    label_values: tuple[str, ...]
    """Values of the metric's own labels."""
    value: float
    """Current value."""


def gauges(stack: Watched) -> list[Gauge]:
    """Health, content and load of each tier, and the speeds that are known."""
    found = [*_state_gauges(stack), *_content_gauges(stack)]
    for tier, speeds in stack.tiers.speeds().items():
        for metric, field in ((names.READ_LATENCY, "latency_s"), (names.READ_SPEED, "bytes_per_s")):
            if field in speeds:
                found.append(Gauge(metric, (tier,), speeds[field]))
    prefill_speed = stack.metrics.prefill_tokens_per_s
    if prefill_speed is not None:
        found.append(Gauge(names.PREFILL_SPEED, (), prefill_speed))
    return found


def _state_gauges(stack: Watched) -> Iterator[Gauge]:
    for tier, health in stack.tiers.health().items():
        yield Gauge(names.TIER_USABLE, (tier,), float(health.usable))
        yield Gauge(names.TIER_WRITABLE, (tier,), float(health.writable))
    for tier, load in stack.tiers.load().items():
        yield Gauge(names.TIER_BREAKER, (tier,), float(load.breaker))
        yield Gauge(names.TIER_QUEUED, (tier,), float(load.queued_ops))
        yield Gauge(names.TIER_QUEUE_AGE, (tier,), load.queue_age_s)
        yield Gauge(names.TIER_RUNNING, (tier,), float(load.running_ops))
        yield Gauge(names.TIER_LATE, (tier,), float(load.late_ops))


def _content_gauges(stack: Watched) -> Iterator[Gauge]:
    metrics = (names.TIER_CHUNKS, names.TIER_HELD, names.TIER_CAPACITY, names.TIER_WAITING)
    for tier, content in stack.tiers.content().items():
        for metric, value in zip(metrics, content, strict=True):
            if value is not None:
                yield Gauge(metric, (tier,), float(value))
    for tier, room_bytes in stack.tiers.room().items():
        yield Gauge(names.TIER_ROOM, (tier,), float(room_bytes))
