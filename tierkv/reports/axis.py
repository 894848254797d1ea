"""Axes: round ticks, and positions of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log"]
Format = Callable[[float], str]

ROUND_TICKS = 5
LOG_TICKS = 7
"""Ticks of an axis with equal steps, and of a logarithmic one, about."""

_STEPS = (1, 2, 2.5, 5, 10)
_LOG_STEPS = ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))


def plain(value: float) -> str:
    """Format a number with thousands separated and no trailing zeros."""
    if value and abs(value) < 0.01:  # noqa: PLR2004 - further digits would be rounded to zero
        return f"{value:.1e}"
    text = f"{value:,.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def round_ticks(low: float, high: float) -> list[float]:
    """About :data:`ROUND_TICKS` round numbers that cover ``low`` to ``high``."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        high = low + max(1.0, abs(low) / 10)
    raw = (high - low) / ROUND_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * one for one in _STEPS if power * one >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float, base: int = 10) -> list[float]:
    """Round numbers within ``low`` to ``high`` for a logarithmic axis. base: 10, or 2 for sizes in bytes."""
    if base == 2:  # noqa: PLR2004 - the other base
        first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
        step = max(1, -(-(last - first) // LOG_TICKS))
        return [2.0**power for power in range(first, last + 1) if not (power - first) % step]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks: list[float] = []
    for steps in _LOG_STEPS:
        ticks = [one * 10.0**power for power in range(first, last + 1) for one in steps]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) <= LOG_TICKS + 1:
            return ticks
    return ticks[:: -(-len(ticks) // LOG_TICKS)]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plot."""

    low: float
    """Value at its start."""
    high: float
    """Value at its end."""
    start: float
    """Position of its start in the plot."""
    end: float
    """Position of its end in the plot."""
    ticks: Sequence[float]
    """Values with a line and a label."""
    scale: Scale = "linear"

    def at(self, value: float) -> float:
        """Position of a value."""
        low, high = self.low, self.high
        if self.scale == "log":
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def axis_for(  # noqa: PLR0913 - all but four have defaults
    values: Sequence[float],
    start: float,
    end: float,
    scale: Scale = "linear",
    *,
    base: int = 10,
    from_zero: bool = True,
    high: float | None = None,
) -> Axis:
    """Axis for some values. Values that are not finite, or not above zero on a logarithmic axis, do not count.

    Args:
        values: to be shown.
        start: position of its start.
        end: position of its end.
        scale: of the axis.
        base: of the ticks of a logarithmic axis.
        from_zero: whether a linear axis begins at zero at the latest.
        high: value at the end; None: a round number above the largest value.
    """
    finite = [value for value in values if math.isfinite(value)]
    if scale == "log":
        positive = [value for value in finite if value > 0] or [1.0]
        low, top = min(positive), max(positive)
        if top <= low:
            low, top = low / base, top * base
        return Axis(low, top, start, end, log_ticks(low, top, base), scale)
    low = min(finite, default=0.0)
    low = min(0.0, low) if from_zero else low
    ticks = round_ticks(low, max(finite, default=1.0) if high is None else high)
    if high is not None:
        ticks = [tick for tick in ticks if tick <= high * 1.001]
    return Axis(ticks[0], ticks[-1] if high is None else high, start, end, ticks)
