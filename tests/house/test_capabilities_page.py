"""The table of backends is current: every plugin is in it, with what it declares, and with the whole kit of today."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import conformance
import pytest

from tierkv.plugins.loading import load_plugins
from tierkv.testing import BackendConformance
from tierkv.testing.conformance.rules import kit_tests

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "python -m nox -s conformance"
KNOWN = conformance.known()
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))


def test_every_plugin_has_figures() -> None:
    """A backend without a row looks untested."""
    assert sorted(KNOWN) == PLUGINS, AGAIN


@pytest.mark.parametrize("distribution", PLUGINS)
def test_figures_are_of_the_whole_kit(distribution: str) -> None:
    """A test that was added to the kit counts for every backend: figures of an older kit would flatter."""
    kit = set(kit_tests(BackendConformance))
    assert set(KNOWN[distribution]["tests"]) == kit, AGAIN
    for name, suite in KNOWN[distribution]["suites"].items():
        assert suite["passed"] + sum(suite["not_applicable"].values()) == len(kit), name


@pytest.mark.parametrize("distribution", PLUGINS)
def test_what_is_declared_is_in_the_table(distribution: str) -> None:
    """Users choose by this table: it may not say what a backend said once. A suite may declare less, not more."""
    pytest.importorskip(distribution.replace("-", "_"))
    backends = load_plugins().backends
    for suite in KNOWN[distribution]["suites"].values():
        declared = dataclasses.asdict(backends[suite["backend"]].plugin.capabilities)
        assert declared.keys() == suite["capabilities"].keys(), AGAIN
        more = [name for name, value in suite["capabilities"].items() if value != declared[name] and value is not False]
        assert not more, AGAIN


def report(**outcomes: str) -> dict[str, Any]:
    """A report of one suite."""
    capabilities: dict[str, Any] = {}
    suite = {"backend": "foo", "describes": "", "capabilities": capabilities, "tests": outcomes, "reasons": {}}
    return {"suites": {"TestFoo": suite}}


def test_a_failure_never_gets_into_the_table() -> None:
    """The table is of what was passed; a run with a failure, or of a part, leaves it as it was."""
    assert conformance.summary(report(test_a="passed"))["suites"]["TestFoo"]["passed"] == 1
    with pytest.raises(ValueError, match="TestFoo failed test_b"):
        conformance.summary(report(test_a="passed", test_b="failed"))
    with pytest.raises(ValueError, match="no suite"):
        conformance.summary({"suites": {}})
    partly = report(test_a="passed")
    partly["suites"]["TestBar"] = report(test_b="passed")["suites"]["TestFoo"]
    with pytest.raises(ValueError, match="did not run"):
        conformance.summary(partly)
