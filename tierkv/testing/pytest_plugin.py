"""pytest plugin of the kit: explained assertions, rules for skipped tests, and a report of passed tests.

Loaded through the ``pytest11`` entry point in every pytest run where tierkv is installed, so it imports nothing of
tierkv before a suite of the kit has run.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tierkv.testing.conformance.report import Report

pytest.register_assert_rewrite("tierkv.testing.conformance", "tierkv.testing.engines", "tierkv.testing.raw")

REPORT: pytest.StashKey[Report] = pytest.StashKey()
SUITES = "tierkv_conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--conformance-report FILE``."""
    group = parser.getgroup("tierkv", "conformance kit of tierkv")
    group.addoption(
        "--conformance-report", metavar="FILE", default=None, help="write what each suite of the kit passed, as JSON"
    )
    group.addoption("--conformance-only", action="store_true", help="run the kit's own tests and leave all others out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect other tests if the option says so."""
    if config.getoption("--conformance-only"):
        kit = [item for item in items if getattr(getattr(item, "cls", None), "is_conformance_kit", False)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kit)])
        items[:] = kit


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the outcome of a kit test; only the kit itself may skip one."""
    report = yield
    if not getattr(getattr(item, "cls", None), "is_conformance_kit", False):
        return report
    from tierkv.testing.conformance import report as kit_report  # noqa: PLC0415 - only where a suite runs

    kit_report.judge(item, call, report)
    if item.config.getoption("--conformance-report"):
        item.config.stash.setdefault(REPORT, kit_report.Report()).add(item, report)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report; a worker of pytest-xdist passes it to its parent process."""
    path = session.config.getoption("--conformance-report")
    if not path or REPORT not in session.config.stash:
        return
    report = session.config.stash[REPORT]
    handed_over: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if handed_over is None:
        report.write(Path(path))
    else:
        handed_over[SUITES] = report.suites


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401 - pytest-xdist's own, which need not be installed
    """Merge the report of a pytest-xdist worker that has ended."""
    if suites := getattr(node, "workeroutput", {}).get(SUITES):
        from tierkv.testing.conformance import report as kit_report  # noqa: PLC0415 - as above

        node.config.stash.setdefault(REPORT, kit_report.Report()).take(suites)
