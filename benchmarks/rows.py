"""Row of a result: a figure, its limit, their ratio, and its target."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

_WHOLE_FROM = 100.0
"""Smaller figures are shown with three digits."""


@dataclass(frozen=True, slots=True)
class Target:
    """Target: ``ratio`` or ``measured``, at most or at least a value."""

    of: Literal["ratio", "measured"]
    sign: Literal["<=", ">="]
    value: float

    def __str__(self) -> str:
        """Text in the table."""
        return f"{self.of} {self.sign} {self.value:g}"

    def met(self, value: float) -> bool:
        """Whether a figure meets the target."""
        return value <= self.value if self.sign == "<=" else value >= self.value


@dataclass(frozen=True, slots=True)
class Row:
    """Figure beside its limit.

    what: in words. unit: of ``measured`` and ``limit``. limit_name: what the limit is; "" where there is none.
    ratios: measured over limit, round by round; where there are none, the quotient of the two figures.
    target: what was aimed at, if anything. extra: further figures, named with their units.
    """

    what: str
    unit: str
    measured: float
    limit_name: str = ""
    limit: float | None = None
    ratios: Sequence[float] = ()
    target: Target | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Median of the ratio over the rounds."""
        if self.ratios:
            return statistics.median(self.ratios)
        return self.measured / self.limit if self.limit else None

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without one."""
        aimed_at = None if self.target is None else {"ratio": self.ratio, "measured": self.measured}[self.target.of]
        return None if self.target is None or aimed_at is None else self.target.met(aimed_at)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        ratios = self.ratios or [ratio for ratio in [self.ratio] if ratio is not None]
        return {
            "what": self.what,
            "unit": self.unit,
            "measured": self.measured,
            "limit_name": self.limit_name,
            "limit": self.limit,
            "ratio": self.ratio,
            "ratio_min": min(ratios, default=None),
            "ratio_max": max(ratios, default=None),
            "rounds": len(ratios),
            "target": None if self.target is None else str(self.target),
            "met": self.met,
            "extra": dict(self.extra),
        }


def as_json(name: str, rows: Iterable[Row]) -> str:
    """One JSON object per row and line, so that the output of several benchmarks is one file."""
    return "".join(json.dumps({"benchmark": name, **row.as_dict()}) + "\n" for row in rows)


def as_table(rows: Iterable[Row]) -> str:
    """Table: one line per row, further figures indented below it."""
    rows = list(rows)
    lines: list[Sequence[str]] = [("", "measured", "limit", "ratio", "(rounds)", "target", "")]
    lines += [cells_of(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [_join(lines[0], widths)]
    for row, line in zip(rows, lines[1:], strict=True):
        text.append(_join(line, widths))
        notes = [f"limit: {row.limit_name}"] if row.limit_name else []
        notes += [f"{name} {_number(value)}" for name, value in row.extra.items()]
        text += [f"    {note}" for note in notes]
    return "\n".join(text) + "\n"


def cells_of(row: Row) -> Sequence[str]:
    """Cells of a row in a table."""
    spread = f"({min(row.ratios):.2f} to {max(row.ratios):.2f}, {len(row.ratios)})" if row.ratios else ""
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    return (
        row.what,
        f"{_number(row.measured)} {row.unit}",
        "" if row.limit is None else _number(row.limit),
        "" if row.ratio is None else f"{row.ratio:.3g}",
        spread,
        "" if row.target is None else str(row.target),
        verdict,
    )


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([first, *others]).rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= _WHOLE_FROM or value == int(value) else f"{value:.3g}"
