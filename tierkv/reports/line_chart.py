"""Line charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.reports.axis import Axis, Format, Scale, axis_for, plain
from tierkv.reports.style import SERIES
from tierkv.reports.svg import (
    LINE,
    MARGIN,
    WIDTH,
    axis_label,
    colour_of,
    document,
    horizontal_grid,
    legend,
    number,
    text,
    text_width,
    vertical_grid,
)

_HEIGHT = 250
_DOTS_MAX = 16


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    name: str
    """Name in the legend."""
    points: Sequence[tuple[float, float]]
    """Positions, in the order of x. Points that are not finite are left out."""
    is_reference: bool = False
    """Whether it is a bound or a comparison: grey and dashed."""
    is_dashed: bool = False
    """Whether it is dashed, beside a line that may have equal values."""


@dataclass(frozen=True, slots=True)
class LineChart:
    """Chart of some lines over one axis."""

    title: str
    """Title of the chart."""
    x_label: str
    """Name and unit of the horizontal axis."""
    y_label: str
    """Name and unit of the vertical axis."""
    series: Sequence[Series]
    """Lines."""
    x_scale: Scale = "linear"
    """Scale of the horizontal axis."""
    x_base: int = 10
    """Base of the ticks of a logarithmic axis: 10, or 2 for sizes."""
    x_format: Format = field(default=plain)
    """Text of a value on the horizontal axis."""
    y_format: Format = field(default=plain)
    """Text of a value on the vertical axis."""
    y_high: float | None = None
    """Value at the top; None: a round number above all values."""

    def svg(self) -> str:
        """Render as SVG."""
        shown = [(index, one, self._drawn(one)) for index, one in enumerate(self.series)]
        points = [point for _, _, found in shown for point in found]
        marks = [colour_of(index, is_reference=one.is_reference) for index, one, _ in shown]
        head, y = legend([one.name for one in self.series], marks, MARGIN + 2 * LINE + 4)
        top, bottom = y + 18, y + 18 + _HEIGHT
        y_axis = axis_for([point[1] for point in points], bottom, top, high=self.y_high)
        left = MARGIN + 10 + max(text_width(self.y_format(tick)) for tick in y_axis.ticks)
        x_axis = axis_for(
            [point[0] for point in points], left, WIDTH - 22, self.x_scale, base=self.x_base, from_zero=False
        )
        parts = [
            text(MARGIN, MARGIN + 15, self.title, "title"),
            head,
            text(MARGIN, top - 10, self.y_label, "dim small"),
            horizontal_grid(y_axis, self.y_format, left, WIDTH - 22),
            vertical_grid(x_axis, self.x_format, top, bottom),
            axis_label(self.x_label, left, WIDTH - 22, bottom + 36),
        ]
        for (index, one, found), mark in zip(shown, marks, strict=True):
            parts.append(_line(index, one, found, mark, x_axis, y_axis))
        if not points:
            parts.append(text(WIDTH / 2, (top + bottom) / 2, "no data", "dim", "middle"))
        return document(self.title, f"{self.y_label} by {self.x_label}", "".join(parts), bottom + 46)

    def _drawn(self, one: Series) -> list[tuple[float, float]]:
        is_log = self.x_scale == "log"
        return [(x, y) for x, y in one.points if math.isfinite(x) and math.isfinite(y) and not (is_log and x <= 0)]


def _line(  # noqa: PLR0913, PLR0917 - a line and its axes
    index: int, one: Series, found: list[tuple[float, float]], mark: str, x_axis: Axis, y_axis: Axis
) -> str:
    if not found:
        return ""
    places = [f"{number(x_axis.at(x))},{number(y_axis.at(y))}" for x, y in found]
    dash = ' stroke-dasharray="6 5"' if one.is_reference or one.is_dashed or index >= SERIES else ""
    parts = [f'<polyline points="{" ".join(places)}" class="line c{mark}"{dash}/>']
    if len(found) <= _DOTS_MAX and not one.is_reference:
        parts += [
            f'<circle cx="{place.partition(",")[0]}" cy="{place.partition(",")[2]}" r="3.5" class="f{mark}"/>'
            for place in places
        ]
    return "".join(parts)
