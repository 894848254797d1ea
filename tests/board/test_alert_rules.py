"""The alert rules in promtool: each fires when it should, with a text that says what to do, and is silent otherwise.

Minutes and texts are those of docs/operate/alerts.yml. ``test_board_run`` shows that real faults move its metrics.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from board.prometheus import PROGRAM

RULES = Path(__file__).resolve().parents[2] / "docs/operate/alerts.yml"
CASES = Path(__file__).with_name("alert_cases.yml")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the tool of Prometheus's package; skips the test where there is none."""
    beside = Path(os.environ.get(PROGRAM, "prometheus")).with_name("promtool")
    program = str(beside) if beside.exists() else shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here: python -m nox -s board")
    command = [program, *map(str, arguments)]
    return subprocess.run(command, cwd=CASES.parent, timeout=120, check=False, capture_output=True, text=True)


def cases() -> list[Any]:
    """Alerts that the cases look at."""
    tests = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    return [look for test in tests for look in test["alert_rule_test"]]


def alerts() -> list[str]:
    """Names of the alerts."""
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule["alert"] for rule in group["rules"]]


def test_the_rules_are_valid() -> None:
    """Prometheus does not start with a rule file that it cannot read."""
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(alerts())} rules found" in done.stdout


def test_each_alert_fires_and_is_silent_when_it_should() -> None:
    """An alert that fires for nothing is switched off, and one whose text names no tier and no fix costs a night."""
    done = promtool("test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", alerts())
def test_each_alert_has_cases_of_both_kinds(alert: str) -> None:
    """An alert without a case can lose its meaning with an edit."""
    fires = {bool(look.get("exp_alerts")) for look in cases() if look["alertname"] == alert}
    assert fires == {True, False}
