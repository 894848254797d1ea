"""Figures of a stack for the reader of ``tierkv top``, computed from a window of samples."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.cli.top.window import Window
from tierkv.metrics.transfer_stats import LOAD, STORE
from tierkv.types.cache_events import HOST

SERVES, READ_ONLY, SLOW, TRIAL, OUT = "serves", "read only", "slow", "trial", "OUT"


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier. None: not known, or there is none."""

    name: str
    state: str
    """``serves``, ``read only``, ``slow`` (longer than computing), ``trial`` or ``OUT`` of service."""
    chunks: int | None
    held_bytes: int | None
    capacity_bytes: int | None
    room_bytes: int | None
    hit_rate: float | None
    """Share of the tokens asked that it delivered, within the window."""
    hit_rate_since_start: float | None
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    read_s: float | None
    """Mean time of a read of a batch."""
    write_s: float | None
    queued_ops: int | None
    running_ops: int | None
    late_ops: int | None
    queue_age_s: float | None
    waiting_chunks: int | None
    """Chunks that wait to be written to it."""
    evictions_per_s: float
    dropped_per_s: float
    """Chunks that were not written, because its queue was full or it was out of service."""
    failures: int
    """Chunks since the start that failed, were late or damaged."""


@dataclass(frozen=True, slots=True)
class StackFigures:
    """One stack. Rates are per second of the window."""

    labels: str
    """Labels of the stack, such as ``engine=0``; empty for the only one."""
    at_s: float
    """Time of the latest sample."""
    window_s: float
    """Seconds of the window; 0 until there are two samples."""
    lookups_per_s: float
    deferrals_per_s: float
    wait_s: float | None
    """Mean wait of a deferred lookup."""
    tokens_asked_per_s: float
    tokens_local_per_s: float
    tokens_loaded_per_s: float
    tokens_computed_per_s: float
    hit_rate: float | None
    """Share of the tokens asked that any tier delivered, within the window."""
    hit_rate_since_start: float | None
    to_gpu_bytes_per_s: float
    from_gpu_bytes_per_s: float
    prefill_tokens_per_s: float | None
    tiers: tuple[TierFigures, ...]


def stack_figures(labels: str, window: Window) -> StackFigures:
    """Compute the figures of a stack."""
    asked, loaded = "tierkv_tokens_asked_total", "tierkv_tokens_loaded_total"
    return StackFigures(
        labels=labels,
        at_s=window.at_s,
        window_s=window.seconds,
        lookups_per_s=window.rate("tierkv_lookups_total"),
        deferrals_per_s=window.rate("tierkv_deferrals_total"),
        wait_s=window.mean("tierkv_deferred_seconds"),
        tokens_asked_per_s=window.rate(asked),
        tokens_local_per_s=window.rate("tierkv_tokens_local_total"),
        tokens_loaded_per_s=window.rate(loaded, None),
        tokens_computed_per_s=window.rate("tierkv_tokens_computed_total"),
        hit_rate=window.share(loaded, asked),
        hit_rate_since_start=_since_start(window, None),
        to_gpu_bytes_per_s=window.rate("tierkv_transfer_bytes_sum", LOAD),
        from_gpu_bytes_per_s=window.rate("tierkv_transfer_bytes_sum", STORE),
        prefill_tokens_per_s=window.level("tierkv_prefill_tokens_per_second"),
        tiers=tuple(_tier_figures(name, window) for name in _tier_names(window)),
    )


def _tier_names(window: Window) -> list[str]:
    """Return the tiers in the order of the stack: the host tier first."""
    known = [*window.latest.get("tierkv_tier_chunks", {}), *window.latest.get("tierkv_tier_usable", {})]
    return list(dict.fromkeys([HOST, *known]))


def _since_start(window: Window, tier: str | None) -> float | None:
    asked = window.level("tierkv_tokens_asked_total")
    loaded = window.latest.get("tierkv_tokens_loaded_total", {})
    return (sum(loaded.values()) if tier is None else loaded.get(tier, 0.0)) / asked if asked else None


def _tier_figures(name: str, window: Window) -> TierFigures:
    is_lower = name != HOST
    failures = ("failed", "timed_out", "corrupt", "no_space")
    dropped = ("cascades_dropped", "demotions_dropped")
    return TierFigures(
        name=name,
        state=_state(name, window),
        chunks=_whole(window, "chunks", name),
        held_bytes=_whole(window, "held_bytes", name),
        capacity_bytes=_whole(window, "capacity_bytes", name),
        room_bytes=_whole(window, "room_bytes", name),
        hit_rate=window.share("tierkv_tokens_loaded_total", "tierkv_tokens_asked_total", name),
        hit_rate_since_start=_since_start(window, name),
        read_bytes_per_s=window.rate("tierkv_tier_bytes_read_total", name) if is_lower else None,
        written_bytes_per_s=window.rate("tierkv_tier_bytes_written_total", name) if is_lower else None,
        read_s=window.mean("tierkv_tier_read_seconds", name),
        write_s=window.mean("tierkv_tier_write_seconds", name),
        queued_ops=_whole(window, "queued_ops", name),
        running_ops=_whole(window, "running_ops", name),
        late_ops=_whole(window, "late_ops", name),
        queue_age_s=window.level("tierkv_tier_queue_age_seconds", name),
        waiting_chunks=_whole(window, "waiting_chunks", name),
        evictions_per_s=window.rate("tierkv_evictions_total", name),
        dropped_per_s=sum(window.rate(f"tierkv_{field}_total", name) for field in dropped),
        failures=sum(_whole(window, f"{field}_total", name) or 0 for field in failures),
    )


def _whole(window: Window, field: str, tier: str) -> int | None:
    value = window.level(f"tierkv_tier_{field}", tier)
    return None if value is None else int(value)


def _state(name: str, window: Window) -> str:
    if window.level("tierkv_tier_usable", name) == 0:
        return TRIAL if window.level("tierkv_tier_breaker_state", name) == 1 else OUT
    if window.level("tierkv_tier_writable", name) == 0:
        return READ_ONLY
    return SLOW if window.level("tierkv_tier_slow", name) == 1 else SERVES
