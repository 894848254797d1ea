"""Record of the latest run of each benchmark: a JSON file, from which the page of figures is made.

A run replaces the entries of its own benchmarks and keeps the others, each with its date, commit and machine.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, cast

from benchmarks.rows import Row

DIGITS = 4
"""Significant digits of a recorded figure: more say nothing, and change with every run."""


class RecordError(ValueError):
    """A file that is no record of benchmarks."""


def read_record(file: Path) -> dict[str, Any]:
    """Entries of a record by the name of the benchmark; none if there is no file.

    Raises:
        RecordError: the file is something else; the message names it.
    """
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{file} is no record of benchmarks ({error}): name another file") from error
    are_rows = isinstance(entries, dict) and all(isinstance(one, dict) and "rows" in one for one in entries.values())
    if not are_rows:
        raise RecordError(f"{file} is no record of benchmarks: name another file")
    return cast("dict[str, Any]", entries)


def write_record(file: Path, about: Mapping[str, str], name: str, rows: Sequence[Row], machine: str) -> None:
    """Put the rows of a benchmark in the place of those that the record has of it.

    Args:
        file: of the record.
        about: text on each benchmark, in the order of the record.
        name: of the benchmark.
        rows: its result.
        machine: facts about the machine before the run.

    Raises:
        RecordError: the file is something else.
    """
    entries = read_record(file)
    entries[name] = {
        "about": about[name],
        "date": date.today().isoformat(),  # noqa: DTZ011 - the day on the clock of the user
        "commit": _commit(),
        "machine": machine,
        "rows": [_rounded(row.as_dict()) for row in rows],
    }
    in_order = {known: entries[known] for known in about if known in entries}
    file.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return value


def _commit() -> str:
    """Short name of the commit that is measured; "unknown" outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True)  # noqa: S603 - no text of a user
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
