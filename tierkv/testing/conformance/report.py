"""Report of the kit's tests, the source of the table of capabilities, and the rule for skipped tests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tierkv.testing.conformance.kit import BY_THE_KIT, KitBase
from tierkv.testing.conformance.kit import FAILED as HAS_FAILED
from tierkv.testing.conformance.rules import kit_tests

PASSED, NOT_APPLICABLE, FAILED = "passed", "not applicable", "failed"
_RANK = (NOT_APPLICABLE, PASSED, FAILED)
"""Order of outcomes: a test with several cases has that of its worst case that applies."""


def is_kit_test(item: pytest.Item) -> bool:
    """Whether a test belongs to the kit; a suite may have tests of its own."""
    return getattr(item, "originalname", item.name) in kit_tests(item.cls)  # type: ignore[attr-defined]  # a method's


def judge(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Turn a skip or an expected failure of a kit test into a failure, unless the kit itself skipped it."""
    item.stash[HAS_FAILED] = report.failed or item.stash.get(HAS_FAILED, False)
    if not is_kit_test(item):
        return
    by_kit = call.excinfo is not None and hasattr(call.excinfo.value, BY_THE_KIT)
    if (report.skipped and not by_kit) or hasattr(report, "wasxfail"):
        reason = call.excinfo.value if call.excinfo else "expected to fail"
        report.outcome = "failed"
        report.longrepr = (
            f"{item.name} belongs to the conformance kit, and was skipped by something else ({reason}). A capability "
            "that is declared is tested: take the skip away, or the declaration"
        )
        if hasattr(report, "wasxfail"):
            del report.wasxfail


class Report:
    """Outcomes of the kit's tests, per suite, with the plugin and its capabilities."""

    def __init__(self) -> None:
        self._suites: dict[str, dict[str, Any]] = {}

    def add(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Note the outcome of one phase of one test."""
        if not is_kit_test(item) or (report.when != "call" and report.passed):
            return
        suite = item.cls  # type: ignore[attr-defined]  # suites are classes
        known = self._suites.setdefault(suite.__name__, _described(suite))
        name = getattr(item, "originalname", item.name)
        outcome = FAILED if report.failed else NOT_APPLICABLE if report.skipped else PASSED
        before = known["tests"].get(name, outcome)
        known["tests"][name] = max(before, outcome, key=_RANK.index)
        if report.skipped and isinstance(report.longrepr, tuple):
            known["reasons"][name] = report.longrepr[2].partition(": ")[2]

    @property
    def suites(self) -> dict[str, dict[str, Any]]:
        """Outcomes so far, as plain values."""
        return self._suites

    def take(self, suites: dict[str, dict[str, Any]]) -> None:
        """Merge the report of another process; one process runs a whole suite (``--dist loadscope``)."""
        self._suites.update(suites)

    def write(self, path: Path) -> None:
        """Write the report as JSON; it depends on neither time nor paths."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"suites": self._suites}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _described(suite: type[KitBase]) -> dict[str, Any]:
    return {
        "backend": suite.plugin.name,
        "capabilities": dataclasses.asdict(suite.plugin.capabilities),
        "describes": (suite.__doc__ or "").strip().partition("\n")[0],
        "raw_access": suite.raw_access,
        "tests": {},
        "reasons": {},
    }
