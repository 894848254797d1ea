"""Speeds and health of a stack as gauges. A gauge appears when its value is known; there is no made-up zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.metrics import definitions as names
from tierkv.metrics.definitions import Metric
from tierkv.metrics.watched import Watched

Gauge = tuple[Metric, dict[str, float]]
"""A metric, and its current value by the value of its label; the label of a gauge without one is ``""``."""

_HEALTH = (names.TIER_USABLE, names.TIER_WRITABLE, names.TIER_SLOW)
_LOAD = (names.TIER_QUEUED, names.TIER_QUEUE_AGE, names.TIER_RUNNING, names.TIER_LATE, names.TIER_BREAKER)
_CONTENT = (names.TIER_CHUNKS, names.TIER_HELD, names.TIER_CAPACITY, names.TIER_WAITING)
"""Gauges of the fields of ``TierCondition``, ``TierLoad`` and ``TierContent``, in the order of the fields."""


def gauges(stack: Watched) -> list[Gauge]:
    """Health, load and content of each tier, requests that wait, and the speeds that are known."""
    tiers, prefill_speed, waiting = stack.tiers, stack.metrics.prefill_tokens_per_s, stack.metrics.waiting()
    speeds = tiers.speeds()
    found = [*_columns(_HEALTH, tiers.health()), *_columns(_LOAD, tiers.load()), *_columns(_CONTENT, tiers.content())]
    found += [
        (names.TIER_ROOM, {tier: float(room_bytes) for tier, room_bytes in tiers.room().items()}),
        (names.WAITING_REQUESTS, {"slots": float(waiting.slots), "first_reads": float(waiting.first_reads)}),
        (names.WAITING_AGE, {"": waiting.age_s}),
        (names.READ_LATENCY, {tier: of["latency_s"] for tier, of in speeds.items() if "latency_s" in of}),
        (names.READ_SPEED, {tier: of["bytes_per_s"] for tier, of in speeds.items() if "bytes_per_s" in of}),
        (names.PREFILL_SPEED, {} if prefill_speed is None else {"": prefill_speed}),
    ]
    return [gauge for gauge in found if gauge[1]]


def _columns(metrics: Sequence[Metric], by_tier: Mapping[str, Sequence[float | None]]) -> list[Gauge]:
    """Values of each metric by tier. by_tier: a value or None for each metric."""
    columns = zip(*by_tier.values(), strict=True)
    return [
        (metric, {tier: float(value) for tier, value in zip(by_tier, values, strict=True) if value is not None})
        for metric, values in zip(metrics, columns, strict=False)  # without a tier there is no column
    ]
