"""Each alert fires while its fault lasts and clears when the fault has ended, and each panel of the board has data.

A real Prometheus scrapes a real stack. Rules and queries are those in docs/operate, with a second for each minute.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from board.prometheus import PROGRAM, Server, serving
from board.stage import FAULTS, Stage, staged

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(PROGRAM not in os.environ, reason="no Prometheus here: python -m nox -s board"),
]
DOCS = Path(__file__).resolve().parents[2] / "docs"
PATIENCE_S = 90.0
RESULTS = "TIERKV_BOARD_RESULTS"
"""Variable with the path of a file that gets what Prometheus answered, for the picture in the documentation."""


def hurried(text: str) -> str:
    """The same rules or query, with a second for each minute."""
    return re.sub(r"\b(\d+)m\b", r"\1s", text).replace("$__rate_interval", "3s").replace("$instance", ".*")


def queries() -> list[Any]:
    """Title, expression and legend of each query of the board."""
    board = json.loads((DOCS / "operate/board.json").read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    return [(panel["title"], one["expr"], one["legendFormat"]) for panel in panels for one in panel["targets"]]


def page_queries() -> list[str]:
    """Queries that the pages give to a reader, the names of single metrics left out."""
    pages = [(DOCS / page).read_text(encoding="utf-8") for page in ("how-to/operate.md", "reference/metrics.md")]
    found = [
        query for page in pages for query in re.findall(r"(?:`|^)([^`\n]*tierkv_[^`\n]*)(?:`|$)", page, re.MULTILINE)
    ]
    return [query for query in found if re.match(r"(sum by|rate|tierkv_\w+ [</>])", query)]


@dataclass
class Run:
    """Course of a run."""

    server: Server
    began_s: float
    ended_s: float = 0.0
    seconds: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Alert to the seconds at which its fault began, it fired, and it was clear."""


def serve_until(stage: Stage, condition: Callable[[], bool]) -> float:
    """Serve requests until something is so. Returns the time."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, "the condition never became true"
        stage.turn()
        stage.step_hand()
        time.sleep(0.02)  # a processor of a busy machine is also for others
    return time.time()


def over(run: Run, expression: str) -> Any:
    """Series of a query over the whole run."""
    hurry = {"query": hurried(expression), "start": run.began_s + 4, "end": run.ended_s, "step": 0.5}
    return run.server.get("query_range", **hurry)["result"]


def results(run: Run) -> Any:
    """Series of each query of the board, by title."""
    answers: dict[str, list[Any]] = {}
    for title, expression, legend in queries():
        answers.setdefault(title, []).append({"legend": legend, "series": over(run, expression)})
    return {"began_s": run.began_s + 4, "ended_s": run.ended_s, "alerts": run.seconds, "panels": answers}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The whole run: one fault after the other, and then the end of all alerts."""
    place = tmp_path_factory.mktemp("board")
    rules = hurried((DOCS / "operate/alerts.yml").read_text(encoding="utf-8"))
    with staged(place) as stage:
        targets = [f"127.0.0.1:{port}" for port in stage.ports]
        with serving(Path(os.environ[PROGRAM]), place, rules, targets) as server:
            run = Run(server, time.time())
            calm_s = time.monotonic() + 6
            serve_until(stage, lambda: time.monotonic() > calm_s)
            assert server.firing() == set(), "an alert fires in a calm stack"
            for alert, fault in FAULTS.items():
                fault_s = time.time()
                with fault(stage):
                    fired_s = serve_until(stage, lambda alert=alert: alert in server.firing())  # type: ignore[misc]
                run.seconds[alert] = (fault_s, fired_s, 0.0)
            for alert, (fault_s, fired_s, _) in run.seconds.items():
                clear_s = serve_until(stage, lambda alert=alert: alert not in server.firing())  # type: ignore[misc]
                run.seconds[alert] = (fault_s, fired_s, clear_s)
            assert server.firing() == set()
            run.ended_s = time.time()
            if RESULTS in os.environ:
                Path(os.environ[RESULTS]).write_text(json.dumps(results(run)), encoding="utf-8")
            yield run


@pytest.mark.parametrize("alert", FAULTS)
def test_an_alert_fires_and_clears(run: Run, alert: str) -> None:
    """An alert that never fires is false comfort; one that stays is switched off by its readers."""
    fault_s, fired_s, clear_s = run.seconds[alert]
    assert fault_s < fired_s < clear_s


def test_every_alert_has_a_fault(run: Run) -> None:
    """No alert of the file is left out above, and Prometheus evaluates each without an error."""
    (group,) = run.server.get("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == set(FAULTS)
    assert {rule["health"] for rule in group["rules"]} == {"ok"}


@pytest.mark.parametrize(("title", "expression", "legend"), queries())
def test_a_query_of_the_board_has_data(run: Run, title: str, expression: str, legend: str) -> None:
    """Prometheus accepts each query, and it returns figures for the whole run, with the labels of its legend."""
    found = over(run, expression)
    assert found
    for series in found:
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= set(series["metric"])
        assert len(series["values"]) > 20


@pytest.mark.parametrize("expression", page_queries())
def test_a_query_of_a_page_has_data(run: Run, expression: str) -> None:
    """One of them joined series whose labels differ: Prometheus accepted it, and its answer was always empty."""
    assert over(run, expression.removesuffix(" > 0"))
