"""Tables of figures.md, from measured.json: ``python -m benchmarks NAME... --record docs/_generate/measured.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("measured.json")
WHOLE_FROM = 100.0
"""Smaller figures are shown with three digits."""

HEAD = """
Rows of `python -m benchmarks`, as the program printed them, each beside its *limit*: the least that the same work can
take, measured in the same run. [The method](../explanation/performance/method.md) says what each measures, and what was
learned from them is on [another page](../explanation/performance/figures.md). In brackets: the range of the ratio over
the rounds. A run with `--record docs/_generate/measured.json` replaces the tables of its benchmarks.
"""


def body() -> str:
    """Everything below the title."""
    entries = json.loads(DATA.read_text(encoding="utf-8"))
    return HEAD + _overview(entries) + "".join(_section(name, entry) for name, entry in entries.items())


def _overview(entries: Mapping[str, Any]) -> str:
    """Table of how many targets each benchmark meets, and of the row that misses its own most."""
    lines = [
        "\n## Targets\n",
        "| benchmark | date | targets met | the row that misses its target most |",
        "|---|---|---|---|",
    ]
    for name, entry in entries.items():
        aimed = [row for row in entry["rows"] if row["target"] is not None]
        missed = [row for row in aimed if not row["met"]]
        worst = max(missed, key=_excess, default=None)
        most = "" if worst is None else f"{_printed(worst['what'])}: {_excess(worst):.3g} times too far"
        lines.append(f"| [`{name}`](#{name}) | {_day(entry)} | {len(aimed) - len(missed)} of {len(aimed)} | {most} |")
    return "\n".join(lines) + "\n"


def _excess(row: Mapping[str, Any]) -> float:
    """Factor by which a row misses its target."""
    of, sign, number = row["target"].split()
    found, wanted = float(row[of]), float(number)
    return found / wanted if sign == "<=" else wanted / found


def _day(entry: Mapping[str, Any]) -> str:
    day = date.fromisoformat(entry["date"])
    return f"{day.day} {day:%B %Y}"


def _section(name: str, entry: Mapping[str, Any]) -> str:
    when = f"{_day(entry)}, commit `{entry['commit']}`; {entry['machine']}."
    lines = [
        f"\n## `{name}`\n",
        f"{entry['about'][:1].upper()}{entry['about'][1:]}.\n",
        f"{when}\n",
        "| what | measured | limit | ratio | target | further figures |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(_cells(row))} |" for row in entry["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield _printed(row["what"])
    yield f"{_number(row['measured'])} {row['unit']}"
    yield "" if row["limit"] is None else f"{_number(row['limit'])} {_printed(row['limit_name'])}".strip()
    spread = f" ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})" if row["rounds"] > 1 else ""
    yield "" if row["ratio"] is None else f"{row['ratio']:.3g}{spread}"
    verdict = {None: "", True: ": met", False: ": **missed**"}[row["met"]]
    yield "" if row["target"] is None else row["target"].replace("<=", "≤").replace(">=", "≥") + verdict
    yield "; ".join(f"{_printed(name)} {_number(value)}" for name, value in row["extra"].items())


def _printed(text: str) -> str:
    """Name as the program prints it."""
    return f"`{text}`" if text else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= WHOLE_FROM or value == int(value) else f"{value:.3g}"
