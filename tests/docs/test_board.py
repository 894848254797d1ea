"""The board and the alerts in docs/operate name what a stack exports, and each alert has its advice.

``nox -s board`` evaluates the same queries in a real Prometheus, over a stack whose tiers fail and heal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tierkv.metrics.definitions import GAUGES, HISTOGRAMS, Metric, counters

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = re.compile(r"\b(?:tierkv|vllm)[_:]\w+")
LABELS = re.compile(r"\{([^{}]*)\}|\b(?:by|on|ignoring|group_left|group_right) ?\(([^()]*)\)")
OF_PROMETHEUS = {"instance", "job", "le", "alertname", "alertstate"}


def exported() -> dict[str, Metric]:
    """Each name under which a series is exported, with its metric."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    metrics = (*counters(), *GAUGES, *HISTOGRAMS)
    return {metric.name + ending: metric for metric in metrics for ending in endings[metric.kind]}


def targets() -> list[tuple[str, str, str]]:
    """Title, expression and legend of each query of the board."""
    board = json.loads((DOCS / "operate/board.json").read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    return [(panel["title"], one["expr"], one["legendFormat"]) for panel in panels for one in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    """All alert rules."""
    (group,) = yaml.safe_load((DOCS / "operate/alerts.yml").read_text(encoding="utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def faults_of(expression: str, texts: str) -> Iterator[str]:
    """Names in a query that no stack exports. Texts: legends or annotations, which may use labels."""
    known = exported()
    names = NAME.findall(re.sub(r'"[^"]*"', '""', expression))
    yield from (f"no metric {name}" for name in names if name not in known)
    labels = {label for name in names if name in known for label in known[name].labels} | OF_PROMETHEUS
    used = re.findall(r"\$labels\.(\w+)", texts) or re.findall(r"\{\{(\w+)\}\}", texts)
    for selected, grouped in LABELS.findall(expression):
        used += [part.partition("=")[0].rstrip("!~").strip() for part in (selected or grouped).split(",")]
    yield from (f"no label {label}" for label in used if label and label not in labels)


@pytest.mark.parametrize(("title", "expression", "legend"), targets())
def test_a_panel_names_what_is_exported(title: str, expression: str, legend: str) -> None:
    """A query with a misspelt name is no error: its panel stays empty, and all seems to be well."""
    assert not list(faults_of(expression, legend))
    assert "tierkv_" in expression or "ALERTS" in expression


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_names_what_is_exported(rule: dict[str, Any]) -> None:
    """An alert with a misspelt name never fires."""
    annotations = " ".join(rule["annotations"].values())
    assert not list(faults_of(rule["expr"], annotations))
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in {"warning", "critical"}


def test_each_alert_has_its_row_in_the_page() -> None:
    """An alert at night needs a meaning and an action, and a row about no alert misleads."""
    page = (DOCS / "how-to/operate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(Tierkv\w+)` \| [^|]{10,} \| [^|]{10,} \|$", page, flags=re.MULTILINE)
    assert rows == [rule["alert"] for rule in rules()]


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum by (tier) (rate(tierkv_evictons_total[5m]))", "no metric tierkv_evictons_total"),
        ("tierkv_evictions == 0", "no metric tierkv_evictions"),
        ("sum by (bucket) (tierkv_tier_usable)", "no label bucket"),
        ('tierkv_lookups_total{tier="disk"}', "no label tier"),
    ],
)
def test_a_misspelt_query_is_noticed(expression: str, fault: str) -> None:
    """The check itself can fail."""
    assert fault in list(faults_of(expression, ""))
