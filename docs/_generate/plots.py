"""Plots of the documentation, made from figures.toml: ``python -m nox -s generate``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tierkv.reports.bar_chart import BarChart
from tierkv.reports.line_chart import LineChart, Series

FIGURES = Path(__file__).with_name("figures.toml")
FOLDER = "../explanation/plots"


def figures() -> Mapping[str, Any]:
    """Figures by plot."""
    return tomllib.loads(FIGURES.read_text(encoding="utf-8"))


def number(cell: str) -> float:
    """First number of a cell."""
    found = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    if found is None:
        raise ValueError(f"{cell!r} in figures.toml has no number")
    return float(found[0].replace(",", ""))


def cells_of(plot: Mapping[str, Any]) -> Iterator[tuple[list[str], bool]]:
    """Cells of each row or line, and whether they are in a column of a table rather than in a line."""
    for row in (*plot.get("rows", ()), *plot.get("lines", ())):
        yield row["cells"], row.get("columns", False)


def first_token() -> str:
    """Bars in groups: one per way to the first token."""
    plot = figures()["first-token"]
    series = [(name, [number(row["cells"][i]) for row in plot["rows"]]) for i, name in enumerate(plot["series"])]
    labels = [row["label"] for row in plot["rows"]]
    return BarChart(plot["title"], plot["x_label"], labels, series, x_format=_seconds).svg() + "\n"


def policies() -> str:
    """Lines of hits by capacity."""
    plot = figures()["policies"]
    lines = [
        Series(
            line["label"],
            [(size, number(cell)) for size, cell in zip(plot["capacities"], line["cells"], strict=True)],
            is_reference=line.get("reference", False),
        )
        for line in plot["lines"]
    ]
    return LineChart(plot["title"], plot["x_label"], plot["y_label"], lines, x_scale="log").svg() + "\n"


def bars(name: str) -> str:
    """Bars, one per row."""
    plot = figures()[name]
    values = [row["number"] if "number" in row else number(row["cells"][0]) for row in plot["rows"]]
    return BarChart(plot["title"], plot["x_label"], [row["label"] for row in plot["rows"]], [("", values)]).svg() + "\n"


def _seconds(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


PLOTS: dict[str, Callable[[], str]] = {
    f"{FOLDER}/first-token.svg": first_token,
    f"{FOLDER}/policies.svg": policies,
    f"{FOLDER}/small-tier.svg": partial(bars, "small-tier"),
    f"{FOLDER}/burst.svg": partial(bars, "burst"),
}
"""Plots by file, from docs/reference on."""
