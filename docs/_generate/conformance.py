"""Table of the conformance kit's results per backend in capabilities.md, from the reports of the suites.

``python -m nox -s conformance`` runs the suites of each distribution and calls this with their report. The figures are
kept in conformance.json beside this file, so that the page can be made, and checked, where no suite has run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_suffix(".json")
FLAGS = (
    "durable",
    "shared",
    "authoritative_index",
    "scan",
    "keeps_ranks",
    "read_only",
    "reads_end_with_call",
    "bounded",
)
NUMBERS = (
    "alignment",
    "preferred_batch",
    "preferred_write_bytes",
    "preferred_read_bytes",
    "spare_share",
    "preferred_concurrency",
)

HEAD = """
## What each backend declares and passes

Every backend of this repository runs the [conformance kit](../how-to/write-a-backend.md#tests), installed alone with
the core, in each of the ways in which it can be configured. A test that a declaration does not call for is *not
applicable*; one that it calls for and that is skipped is a failure. The figures are written by `nox -s conformance`.
"""


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """A distribution's report in short: the kit's tests, and per suite what it declares and passed.

    Raises:
        ValueError: a suite has not passed all of the kit that applies to it.
    """
    suites = {}
    tests = sorted({test for suite in report["suites"].values() for test in suite["tests"]})
    if not tests:
        raise ValueError("no suite of the conformance kit has run")
    for name, suite in report["suites"].items():
        outcomes = suite["tests"]
        if missing := [test for test in tests if test not in outcomes]:
            raise ValueError(f"{name} did not run {', '.join(missing)}")
        if failed := [test for test, outcome in outcomes.items() if outcome == "failed"]:
            raise ValueError(f"{name} failed {', '.join(failed)}")
        suites[name] = {
            "backend": suite["backend"],
            "describes": suite["describes"],
            "capabilities": suite["capabilities"],
            "passed": sum(outcome == "passed" for outcome in outcomes.values()),
            "not_applicable": dict(Counter(suite["reasons"][test] for test in tests if outcomes[test] != "passed")),
        }
    return {"tests": tests, "suites": suites}


def section(data: Mapping[str, Any]) -> str:
    """The part of the page."""
    columns = ["backend", "suite", *(f"`{name}`" for name in FLAGS + NUMBERS), "passed", "not applicable"]
    rows = [columns, ["---"] * len(columns)]
    details = []
    for distribution, known in sorted(data.items()):
        for name, suite in sorted(known["suites"].items()):
            declared = suite["capabilities"]
            rows.append([
                f"`{suite['backend']}` ({distribution})", name,
                *("yes" if declared[flag] else "" for flag in FLAGS),
                *(str(declared[number] or "") for number in NUMBERS),
                str(suite["passed"]), str(sum(suite["not_applicable"].values())),
            ])  # fmt: skip
            reasons = "; ".join(f"{reason} ({count})" for reason, count in sorted(suite["not_applicable"].items()))
            about = f" {suite['describes']}" if suite["describes"] else ""
            details.append(f"- {name}:{about} Not applicable: {reasons or 'none'}.")
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{HEAD}\n{table}\n\n" + "\n".join(details) + "\n"


def known() -> dict[str, Any]:
    """The figures that were written last."""
    loaded: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    return loaded


def main(arguments: list[str]) -> int:
    """Take in the report of a distribution: ``conformance.py NAME REPORT``."""
    name, report = arguments
    data = known()
    found = summary(json.loads(Path(report).read_text(encoding="utf-8")))
    changed = data.get(name) != found
    data[name] = found
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sys.stdout.write(f"{name}: {'other figures than before; commit them' if changed else 'the figures stand'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
