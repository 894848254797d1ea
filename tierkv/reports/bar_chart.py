"""Bar charts: horizontal bars, one below the other, in groups or stacked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.reports.axis import Format, axis_for, plain
from tierkv.reports.svg import (
    LINE,
    MARGIN,
    WIDTH,
    axis_label,
    colour_of,
    document,
    legend,
    number,
    text,
    text_width,
    vertical_grid,
)

_BAR = 22
_GAP = 12
_LABEL_MAX = 210


@dataclass(frozen=True, slots=True)
class BarChart:
    """Chart of bars: one group per label, one bar (or part of a bar) per series."""

    title: str
    """Title of the chart."""
    x_label: str
    """Name and unit of the values."""
    labels: Sequence[str]
    """Names of the groups."""
    series: Sequence[tuple[str, Sequence[float]]]
    """Name, and one value per group."""
    stacked: bool = False
    """Whether the bars of a group are parts of one."""
    x_format: Format = field(default=plain)
    """Text of a value."""
    x_high: float | None = None
    """Value at the right end; None: a round number above all values."""
    reference: float | None = None
    """Value with a line of its own, such as 1 for equal."""

    def svg(self) -> str:
        """Render as SVG."""
        rows = 1 if self.stacked else max(1, len(self.series))
        marks = [colour_of(index, is_reference=False) for index in range(len(self.series))]
        head, y = "", float(MARGIN + LINE + 10)
        if len(self.series) > 1:
            head, y = legend([name for name, _ in self.series], marks, MARGIN + 2 * LINE + 4)
        widest = max([text_width(label) for label in self.labels], default=0)
        above = LINE if widest > _LABEL_MAX else 0  # long labels have a line of their own
        left = float(MARGIN) if above else MARGIN + 12 + widest
        ends = [self._end(group) for group in range(len(self.labels))]
        room = max([text_width(self.x_format(end)) for end in ends], default=0) + 14
        axis = axis_for([*ends, self.reference or 0], left, WIDTH - MARGIN - room, high=self.x_high)
        top = y + 6
        step = above + rows * _BAR + _GAP
        height = len(self.labels) * step + _GAP / 2
        bottom = top + height
        parts = [text(MARGIN, MARGIN + 15, self.title, "title"), head, vertical_grid(axis, self.x_format, top, bottom)]
        if self.reference is not None:
            x = axis.at(self.reference)
            parts.append(
                f'<path d="M{number(x)} {number(top)}V{number(bottom)}" class="line cr" stroke-dasharray="5 4"/>'
            )
        for group, label in enumerate(self.labels):
            y0 = top + _GAP / 2 + group * step + above
            if above:
                parts.append(text(left, y0 - 4, _cut(label)))
            else:
                parts.append(text(left - 10, y0 + rows * _BAR / 2 + 5, label, anchor="end"))
            x0 = axis.at(0)
            for index, (_, values) in enumerate(self.series):
                value = _finite(values[group])
                y1 = y0 if self.stacked else y0 + index * _BAR
                x1 = x0 + axis.at(value) - axis.at(0)
                parts.append(_bar(x0, x1, y1, marks[index]))
                if not self.stacked:
                    parts.append(text(x1 + 6, y1 + _BAR / 2 + 4, self.x_format(values[group]), "dim small"))
                x0 = x1 if self.stacked else x0
            if self.stacked:
                parts.append(text(x0 + 6, y0 + _BAR / 2 + 5, self.x_format(ends[group]), "dim small"))
        parts.append(axis_label(self.x_label, left, WIDTH - MARGIN, bottom + 36))
        return document(self.title, self.x_label, "".join(parts), bottom + 46)

    def _end(self, group: int) -> float:
        """Largest value of a group that is drawn."""
        values = [_finite(values[group]) for _, values in self.series]
        return sum(values) if self.stacked else max(values, default=0.0)


def _bar(x0: float, x1: float, y: float, mark: str) -> str:
    place = f'x="{number(x0)}" y="{number(y + 2)}" width="{number(max(0.0, x1 - x0))}" height="{_BAR - 4}"'
    return f'<rect {place} rx="2" class="f{mark}"/>'


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _cut(label: str) -> str:
    letters = int((WIDTH - 2 * MARGIN) // text_width("x"))
    return label if len(label) <= letters else f"{label[: letters - 1]}…"
