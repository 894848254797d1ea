"""The kit in pytest: a selection of its own tests, and a report that does not depend on processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import plain_files
from tierkv.testing import BackendConformance

class {name}(BackendConformance):
    plugin = plain_files.{plugin}
    raw_live = True

    def make_options(self, place):
        return plain_files.PlainOptions(str(place))

    def raw(self, place, context):
        return plain_files.PlainRaw(place, context)

    def test_of_the_author(self):
        pass

def test_beside_the_suite():
    pass
"""

FEW = "test_empty_batches or test_the_kit_is_whole or test_of_the_author or test_beside_the_suite"


def write_suites(pytester: pytest.Pytester) -> None:
    """Two modules with a suite, a test of the author's own in it, and one beside it."""
    first = SUITE.format(name="TestFirst", plugin="PLUGIN")
    second = SUITE.format(name="TestSecond", plugin="READ_ONLY_PLUGIN")
    pytester.makepyfile(test_first=first, test_second=second)


def run(pytester: pytest.Pytester, *options: str) -> dict[str, int]:
    """Outcomes of a pytest of its own, which finds the backend beside this module."""
    result = pytester.runpytest_subprocess("-k", FEW, "-o", f"pythonpath={Path(__file__).parent}", *options)
    assert not result.ret
    return result.parseoutcomes()


def ran(outcomes: dict[str, int]) -> int:
    """Tests that were run, or skipped by the kit."""
    return outcomes.get("passed", 0) + outcomes.get("skipped", 0)


def report_of(path: Path) -> dict[str, dict[str, object]]:
    """The suites in a report."""
    suites: dict[str, dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))["suites"]
    return suites


def test_only_suites_run_where_that_is_asked_for(pytester: pytest.Pytester) -> None:
    """The session that runs the kit must not repeat a plugin's other tests, and must not lose one of the suite's."""
    write_suites(pytester)
    everything = run(pytester)
    suites = run(pytester, "--conformance-only")
    outside = 2
    assert ran(suites) == ran(everything) - outside
    assert suites["deselected"] == everything["deselected"] + outside


def test_processes_report_together_what_one_reports(pytester: pytest.Pytester) -> None:
    """The table of capabilities is made from the report: a suite lost between processes would empty its row."""
    write_suites(pytester)
    one, two = pytester.path / "one.json", pytester.path / "two.json"
    run(pytester, "--conformance-only", "--conformance-report", str(one))
    run(pytester, "--conformance-only", "--conformance-report", str(two), "-n", "2", "--dist", "loadscope")
    assert report_of(one).keys() == {"TestFirst", "TestSecond"}
    assert report_of(two) == report_of(one)


def test_tests_of_the_author_are_not_in_the_report(pytester: pytest.Pytester) -> None:
    """A row of the table says what the kit found, nothing else."""
    write_suites(pytester)
    path = pytester.path / "report.json"
    run(pytester, "--conformance-report", str(path))
    for suite in report_of(path).values():
        assert suite["tests"]
        assert "test_of_the_author" not in suite["tests"]


@pytest.mark.parametrize(("name", "package"), [("BackendConformance", "pytest"), ("PolicyConformance", "hypothesis")])
def test_the_kit_names_what_it_needs(name: str, package: str) -> None:
    """An author who installed the core alone read that there is no module of a name that no page of ours has."""
    hidden = f"import sys; sys.modules[{package!r}] = None; from tierkv.testing import {name}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert f"{name} needs the package {package}; in a checkout of tierkv: pip install '.[testing]'" in done.stderr
