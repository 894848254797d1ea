"""HTML report of a run of benchmarks: tables of all rows, and plots of ratios to limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.rows import Row, cells_of
from tierkv.reports.bar_chart import BarChart
from tierkv.reports.page import Heading, Page, Plots, Section, Table

FIGURES_MAX = 6
"""Further figures that have a column each."""
COLUMNS = ("", "measured", "limit", "ratio", "(rounds)", "target", "")


def benchmarks_page(machine: str, results: Mapping[str, Sequence[Row]]) -> Page:
    """Make the page of a run. machine: facts about it."""
    return Page("Benchmarks", machine, tuple(_sections(results)), "A figure is beside its limit, from the same run.")


def _sections(results: Mapping[str, Sequence[Row]]) -> Iterator[Section]:
    for name, rows in results.items():
        yield Heading(name)
        ratios = [(row.what, row.ratio) for row in rows if row.ratio is not None]
        if ratios:
            labels = [what for what, _ in ratios]
            chart = BarChart("Measured, of the limit", "ratio", labels, [("", [r for _, r in ratios])], reference=1)
            yield Plots(((chart, ""),))
        yield Table("", COLUMNS, [_with_limit(row) for row in rows])
        if any(row.extra for row in rows):
            yield _further(rows)


def _with_limit(row: Row) -> Sequence[str]:
    """Cells of a row, with the name of the limit."""
    what, measured, limit, *others = cells_of(row)
    return what, measured, f"{limit} {row.limit_name}".strip(), *others


def _further(rows: Sequence[Row]) -> Table:
    """Table of further figures: a column for each, or a line for each where the rows have too many different ones."""
    names = list(dict.fromkeys(name for row in rows for name in row.extra))
    if len(names) <= FIGURES_MAX:
        lines = [
            [row.what, *(_figure(row.extra[name]) if name in row.extra else "" for name in names)]
            for row in rows
            if row.extra
        ]
        return Table("Further figures", ("", *names), lines)
    notes = [[row.what, name, _figure(value)] for row in rows for name, value in row.extra.items()]
    return Table("Further figures", ("row", "figure", "value"), notes)


def _figure(value: float) -> str:
    return f"{value:,.4g}"
