"""HTML report of a run of benchmarks: tables of all rows, and plots of ratios to limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.rows import Row, cells_of
from tierkv.reports.bar_chart import BarChart
from tierkv.reports.page import Heading, Page, Plots, Section, Table

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
        yield Table("", COLUMNS, [cells_of(row) for row in rows])
        notes = [(row.what, extra, value) for row in rows for extra, value in row.extra.items()]
        if notes:
            yield Table("Further figures", ("row", "figure", "value"), [[a, b, f"{c:,.4g}"] for a, b, c in notes])
