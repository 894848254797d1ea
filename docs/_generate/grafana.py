"""The Grafana board: its panels as data, and docs/operate/board.json made from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OF = '{instance=~"$instance"}'
"""Selector of the chosen instances."""
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


SERVICE = Row(
    "Does it serve?",
    (
        Panel(
            "Firing alerts",
            "Alerts of docs/operate/alerts.yml. The page Operate tierkv says what each one calls for.",
            "none",
            (Query('count(ALERTS{alertname=~"Tierkv.*", alertstate="firing"}) or vector(0)', "alerts"),),
            width=4,
            kind="stat",
        ),
        Panel(
            "Tiers out of service",
            "Their chunks are misses until the cause ends.",
            "none",
            (Query(f"count(tierkv_tier_usable{OF} == 0) or vector(0)", "tiers"),),
            width=4,
            kind="stat",
        ),
        Panel(
            "Hit rate",
            "Share of the asked tokens that any tier delivered, without those that the engine had itself.",
            "percentunit",
            (Query(f"{_all('tokens_loaded_total')} / {_all('tokens_asked_total')}", "hits"),),
            width=4,
            kind="stat",
        ),
        Panel(
            "Service of each tier",
            "2: serves. 1: is only read. 0: out of service.",
            "none",
            (Query(f"{_level('tier_usable', 'min')} + {_level('tier_writable', 'min')}", "{{tier}}"),),
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
                Query(_rate("tokens_loaded_total", "tier"), "{{tier}}"),
                Query(_all("tokens_local_total"), "engine"),
            ),
            width=12,
            stacked=True,
        ),
        Panel(
            "Hit rate of each tier",
            "Share of the asked tokens that the tier delivered.",
            "percentunit",
            (
                Query(
                    f"{_rate('tokens_loaded_total', 'tier')} / on () group_left {_all('tokens_asked_total')}",
                    "{{tier}}",
                ),
            ),
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
            (Query(f"{_level('tier_held_bytes')} / {_level('tier_capacity_bytes')}", "{{tier}}"),),
            top=1,
        ),
        Panel(
            "Room below the capacity",
            "Bytes by which a storage is smaller than the configured capacity, because it reported that it is full.",
            "bytes",
            (Query(f"{_level('tier_capacity_bytes')} - {_level('tier_room_bytes')}", "{{tier}}"),),
        ),
        Panel(
            "Evictions",
            "Chunks evicted per second.",
            "short",
            (Query(_rate("evictions_total", "tier"), "{{tier}}"),),
        ),
        Panel("Bytes read", "Per second.", "Bps", (Query(_rate("tier_bytes_read_total", "tier"), "{{tier}}"),)),
        Panel("Bytes written", "Per second.", "Bps", (Query(_rate("tier_bytes_written_total", "tier"), "{{tier}}"),)),
        Panel(
            "Bytes between host and GPU",
            "Per second.",
            "Bps",
            (Query(_rate("transfer_bytes_sum", "transfer_type"), "{{transfer_type}}"),),
        ),
        Panel(
            "Time of a read, p95",
            "From its submission on, and the part of it that was spent in the queue.",
            "s",
            (
                Query(_p95("tier_read_seconds", "tier"), "{{tier}}"),
                Query(_p95("tier_read_queue_seconds", "tier"), "{{tier}}, queue"),
            ),
        ),
        Panel(
            "Time of a write, p95",
            "From its submission on, and the part of it that was spent in the queue.",
            "s",
            (
                Query(_p95("tier_write_seconds", "tier"), "{{tier}}"),
                Query(_p95("tier_write_queue_seconds", "tier"), "{{tier}}, queue"),
            ),
        ),
        Panel(
            "Operations",
            "In a call to the backend, and waiting for one. Late ones are past their deadline: a call may hang.",
            "short",
            (
                Query(_level("tier_running_ops"), "{{tier}}, in a call"),
                Query(_level("tier_late_ops"), "{{tier}}, late"),
                Query(_level("tier_queued_ops"), "{{tier}}, waiting"),
            ),
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
                Query(f"{_rate('cascades_total', 'tier')} + {_rate('demotions_total', 'tier')}", "{{tier}}, written"),
                Query(_rate("writes_skipped_total", "tier"), "{{tier}}, skipped"),
                Query(
                    f"{_rate('cascades_dropped_total', 'tier')} + {_rate('demotions_dropped_total', 'tier')}",
                    "{{tier}}, dropped",
                ),
            ),
        ),
        Panel(
            "Chunks that wait to be written",
            "In the write queue of each tier.",
            "short",
            (Query(_level("tier_waiting_chunks"), "{{tier}}"),),
        ),
        Panel(
            "Failures",
            "Chunks per second: the backend failed, a deadline passed, a frame was damaged, there was no space.",
            "short",
            (
                Query(_rate("tier_failed_total", "tier"), "{{tier}}, failed"),
                Query(_rate("tier_timed_out_total", "tier"), "{{tier}}, late"),
                Query(_rate("tier_corrupt_total", "tier"), "{{tier}}, damaged"),
                Query(_rate("tier_no_space_total", "tier"), "{{tier}}, no space"),
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
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
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
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
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
