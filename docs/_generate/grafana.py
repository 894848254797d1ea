"""The Grafana board: its panels as data, and docs/operate/board.json made from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OF = '{instance=~"$instance"}'
"""Selector of the chosen instances."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""The Prometheus that the reader chooses."""
WINDOW = "[$__rate_interval]"
WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHT = 7
"""Grid rows of a panel."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    expression: str
    """PromQL, with Grafana's variables."""
    legend: str
    """Name of its series."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: a number or a plot over time."""

    title: str
    text: str
    """Meaning of its figures."""
    unit: str
    """Grafana's name of the unit."""
    queries: tuple[Query, ...]
    width: int = 8
    kind: str = "timeseries"
    """``timeseries`` or ``stat``."""
    stacked: bool = False
    top: float | None = None
    """Upper end of the axis, where it is known."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate(tierkv_{metric}{OF}{WINDOW}))"


def _all(metric: str) -> str:
    return f"sum(rate(tierkv_{metric}{OF}{WINDOW}))"


def _level(metric: str, function: str = "sum") -> str:
    return f"{function} by (tier) (tierkv_{metric}{OF})"


def _p95(metric: str, *by: str) -> str:
    return f"histogram_quantile(0.95, {_rate(f'{metric}_bucket', 'le', *by)})"


def _tier_rate(*metrics: str) -> str:
    """Sum of the rates of counters, by tier."""
    return " + ".join(_rate(f"{metric}_total", "tier") for metric in metrics)


def _by_tier(expression: str, what: str = "") -> Query:
    """Query with a series per tier; ``what`` tells several queries of one panel apart."""
    return Query(expression, f"{{{{tier}}}}, {what}" if what else "{{tier}}")


def _stat(title: str, text: str, unit: str, query: Query) -> Panel:
    return Panel(title, text, unit, (query,), width=4, kind="stat")


def _bytes_moved(title: str, *queries: Query) -> Panel:
    return Panel(title, "Per second.", "Bps", queries)


def _time_of(verb: str) -> Panel:
    """Panel of the time of a read or a write."""
    whole = _by_tier(_p95(f"tier_{verb}_seconds", "tier"))
    queue = _by_tier(_p95(f"tier_{verb}_queue_seconds", "tier"), "queue")
    text = "From its submission on, and the part of it that was spent in the queue."
    return Panel(f"Time of a {verb}, p95", text, "s", (whole, queue))


SERVICE = Row(
    "Does it serve?",
    (
        _stat(
            "Firing alerts",
            "Alerts of docs/operate/alerts.yml. The page Operate tierkv says what each one calls for.",
            "none",
            Query('count(ALERTS{alertname=~"Tierkv.*", alertstate="firing"}) or vector(0)', "alerts"),
        ),
        _stat(
            "Tiers out of service",
            "Their chunks are misses until the cause ends.",
            "none",
            Query(f"count(tierkv_tier_usable{OF} == 0) or vector(0)", "tiers"),
        ),
        _stat(
            "Hit rate",
            "Share of the asked tokens that any tier delivered, without those that the engine had itself.",
            "percentunit",
            Query(f"{_all('tokens_loaded_total')} / {_all('tokens_asked_total')}", "hits"),
        ),
        Panel(
            "Service of each tier",
            "2: serves. 1: is only read. 0: out of service.",
            "none",
            (_by_tier(f"{_level('tier_usable', 'min')} + {_level('tier_writable', 'min')}"),),
            width=12,
            top=2,
        ),
    ),
)
HITS = Row(
    "What does it save?",
    (
        Panel(
            "Tokens asked, by where they came from",
            "Each asked token is in the engine already, is loaded from a tier, or is computed.",
            "short",
            (
                Query(_all("tokens_computed_total"), "computed"),
                _by_tier(_tier_rate("tokens_loaded")),
                Query(_all("tokens_local_total"), "engine"),
            ),
            width=12,
            stacked=True,
        ),
        Panel(
            "Hit rate of each tier",
            "Share of the asked tokens that the tier delivered.",
            "percentunit",
            (_by_tier(f"{_tier_rate('tokens_loaded')} / on () group_left {_all('tokens_asked_total')}"),),
            width=6,
        ),
        Panel(
            "Wait of deferred lookups, p95",
            "Seconds from the first deferral of a request to its answer. A slow tier shows here first.",
            "s",
            (Query(_p95("deferred_seconds"), "p95"),),
            width=6,
        ),
    ),
)
TIERS = Row(
    "How do the tiers do?",
    (
        Panel(
            "Fill",
            "Bytes held of the capacity. A cache that is full is normal: it evicts.",
            "percentunit",
            (_by_tier(f"{_level('tier_held_bytes')} / {_level('tier_capacity_bytes')}"),),
            top=1,
        ),
        Panel(
            "Room below the capacity",
            "Bytes by which a storage is smaller than the configured capacity, because it reported that it is full.",
            "bytes",
            (_by_tier(f"{_level('tier_capacity_bytes')} - {_level('tier_room_bytes')}"),),
        ),
        Panel("Evictions", "Chunks evicted per second.", "short", (_by_tier(_tier_rate("evictions")),)),
        _bytes_moved("Bytes read", _by_tier(_tier_rate("tier_bytes_read"))),
        _bytes_moved("Bytes written", _by_tier(_tier_rate("tier_bytes_written"))),
        _bytes_moved(
            "Bytes between host and GPU", Query(_rate("transfer_bytes_sum", "transfer_type"), "{{transfer_type}}")
        ),
        _time_of("read"),
        _time_of("write"),
        Panel(
            "Operations",
            "In a call to the backend, and waiting for one. Late ones are past their deadline: a call may hang.",
            "short",
            (
                _by_tier(_level("tier_running_ops"), "in a call"),
                _by_tier(_level("tier_late_ops"), "late"),
                _by_tier(_level("tier_queued_ops"), "waiting"),
            ),
        ),
        Panel(
            "Requests that wait to be read",
            "For slots of the host tier, or for the first reads from a tier of unknown speed.",
            "short",
            (Query(f"sum by (reason) (tierkv_waiting_requests{OF})", "{{reason}}"),),
        ),
    ),
)
WRITES = Row(
    "Does everything arrive?",
    (
        Panel(
            "Chunks written, skipped and dropped",
            "Skipped: the tier has the chunk already. Dropped: the tier is slower than the engine stores.",
            "short",
            (
                _by_tier(_tier_rate("cascades", "demotions"), "written"),
                _by_tier(_tier_rate("writes_skipped"), "skipped"),
                _by_tier(_tier_rate("cascades_dropped", "demotions_dropped"), "dropped"),
            ),
        ),
        Panel(
            "Chunks that wait to be written",
            "In the write queue of each tier.",
            "short",
            (_by_tier(_level("tier_waiting_chunks")),),
        ),
        Panel(
            "Failures",
            "Chunks per second: the backend failed, a deadline passed, a frame was damaged, there was no space.",
            "short",
            (
                _by_tier(_tier_rate("tier_failed"), "failed"),
                _by_tier(_tier_rate("tier_timed_out"), "late"),
                _by_tier(_tier_rate("tier_corrupt"), "damaged"),
                _by_tier(_tier_rate("tier_no_space"), "no space"),
            ),
        ),
    ),
)
ROWS = (SERVICE, HITS, TIERS, WRITES)


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        stacking = "normal" if panel.stacked else "none"
        defaults["custom"] = {"fillOpacity": 60 if panel.stacked else 10, "stacking": {"mode": stacking}}
    targets = [
        {"refId": chr(ord("A") + i), "expr": query.expression, "legendFormat": query.legend}
        for i, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def _placed() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "collapsed": False, "gridPos": place})
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += HEIGHT
    return panels


def board() -> str:
    """The board as Grafana imports it."""
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "instance",
            "type": "query",
            "label": "Instance",
            "datasource": SOURCE,
            "query": "label_values(tierkv_lookups_total, instance)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    whole = {
        "title": "tierkv",
        "uid": "tierkv",
        "description": "KV cache in tiers: service, hits, tiers, writes. Made from docs/_generate/grafana.py.",
        "tags": ["tierkv"],
        "schemaVersion": 38,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": _placed(),
    }
    return json.dumps(whole, indent=2) + "\n"
