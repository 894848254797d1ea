"""Table of the rows of ``vllm_ab``, one column per stack: ``python -m benchmarks.side_by_side.table FILE``.

FILE is what ``python -m benchmarks vllm_ab --json`` has printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Cell = Callable[[Mapping[str, Any]], str]


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line per measure, in the rows' order; the stacks side by side."""
    lines: dict[str, dict[str, str]] = {}
    stacks: dict[str, None] = {}
    for row in rows:
        measure, _, stack = str(row["what"]).rpartition(": ")
        stacks[stack] = None
        cell = next(cell for prefix, cell in _CELLS if measure.startswith(prefix))
        lines.setdefault(measure, {})[stack] = cell(row)
    table = [["", *stacks], ["---"] * (1 + len(stacks))]
    table += [[measure, *(cells.get(stack, "") for stack in stacks)] for measure, cells in lines.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def _first_token(row: Mapping[str, Any]) -> str:
    return f"{row['measured']:.0f} ms, {_ratio(row)}"


def _cached(row: Mapping[str, Any]) -> str:
    answers = row["extra"]["answers as without offloading, %"]
    same = "" if answers == 100 else f", {answers:.0f} % of the answers the same"  # noqa: PLR2004 - percent
    return f"{row['measured']:,.0f} of {row['limit']:,.0f}{same}"


def _step(row: Mapping[str, Any]) -> str:
    extra = row["extra"]
    call = f"{extra['p99 of a single call, us']:,.0f} / {extra['longest single call, us']:,.0f}"
    total = extra["all scheduling, ms per request"]
    return f"+{extra['added, us']:,.0f} µs, {_ratio(row)}; call {call} µs; {total:.1f} ms a request"


def _read(row: Mapping[str, Any]) -> str:
    return f"{row['measured']:.0f} of {row['limit']:.0f} MiB, {_ratio(row)}"


def _lookups(row: Mapping[str, Any]) -> str:
    return f"{row['measured']:.1f}, in {row['extra']['questions per request']:.1f} questions"


def _long(row: Mapping[str, Any]) -> str:
    extra = row["extra"]
    read = f"{extra['MiB read']:,.0f} MiB read"
    if not extra["finished, 1 or 0"]:
        return f"no answer: given up after {extra['seconds']:.0f} s, {row['measured']:,.0f} steps, {read}"
    seconds = f"{extra['seconds']:.2f} s (computed: {extra['seconds when computed']:.2f} s)"
    return f"{seconds}, {row['measured']:.0f} steps, {extra['of the prefix cached, %']:.0f} % cached, {read}"


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return "nothing loaded"
    return f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"


_CELLS: Sequence[tuple[str, Cell]] = (
    ("first token", _first_token),
    ("cached", _cached),
    ("scheduling", _step),
    ("read", _read),
    ("lookups", _lookups),
    ("", _long),
)
"""Format of a measure, by the beginning of its name."""


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    sys.stdout.write(markdown(map(json.loads, text.splitlines())))
