"""HTML reports of ``tierkv replay``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tierkv.replay.replaying import Replayed
from tierkv.replay.stack_player import PlayedStack
from tierkv.replay.tenants import tenant_hits
from tierkv.replay.trace import Trace
from tierkv.reports.bar_chart import BarChart
from tierkv.reports.line_chart import LineChart, Series
from tierkv.reports.page import Heading, Page, Paragraph, Plots, Section, Table
from tierkv.types.sizes import round_size


def policies_page(
    trace: Path, facts: str, results: Mapping[str, Mapping[int, Replayed]], bounds: Sequence[str]
) -> Page:
    """Make the page of policies and capacities. bounds: names of results that are no policies."""
    sizes = list(next(iter(results.values()), {}))

    def chart(title: str, unit: str, of: Mapping[str, Sequence[float]]) -> LineChart:
        series = [
            Series(name, list(zip(map(float, sizes), of[name], strict=True)), is_reference=name in bounds)
            for name in results
        ]
        return LineChart(title, "capacity in chunks", unit, series, x_scale="log")

    hits = {name: [by_size[size].hit_percent for size in sizes] for name, by_size in results.items()}
    writes = {name: [float(by_size[size].writes) for size in sizes] for name, by_size in results.items()}
    columns = ("policy", *(f"{size:,}" for size in sizes))
    return Page(
        "Policies and capacities",
        f"tierkv replay of {trace}",
        (
            Paragraph(facts),
            Plots(
                (
                    (chart("Chunks found", "% of the chunks asked for", hits), "Dashed: bounds, no policies."),
                    (chart("Chunks written", "chunks", writes), ""),
                )
            ),
            Table("Found, %", columns, [[name, *(f"{value:.1f}" for value in hits[name])] for name in results]),
            Table(
                "Chunks written", columns, [[name, *(f"{value:,.0f}" for value in writes[name])] for name in results]
            ),
        ),
        "Made by tierkv replay. Equal input gives an equal page.",
    )


def stacks_page(path: Path, facts: str, trace: Trace, results: Mapping[Path, PlayedStack], chunk_bytes: int) -> Page:
    """Make the page of whole stacks."""
    labels = [stack.name for stack in results]
    names = list(dict.fromkeys(name for played in results.values() for name in played.tiers))
    asked = max(1, len(trace.chunks))
    found = [(name, [100 * _hits(played, name) / asked for played in results.values()]) for name in names]
    sections: list[Section] = [
        Paragraph(facts),
        Plots(((BarChart("Chunks found, by tier", "% of the chunks asked for", labels, found, stacked=True), ""),)),
    ]
    for stack, played in results.items():
        sections += [Heading(str(stack)), _tiers(played, asked, chunk_bytes)]
        tenants = tenant_hits(trace, played)
        if [one.name for one in tenants] not in ([], [None]):
            rows = [[one.name or "(none)", f"{one.requests:,}", f"{one.hit_percent:.1f} %"] for one in tenants[:100]]
            sections.append(Table("Tenants", ("tenant", "requests", "found"), rows))
    return Page("Stacks on a trace", f"tierkv replay of {path}", tuple(sections), "Made by tierkv replay.")


def _hits(played: PlayedStack, tier: str) -> int:
    return int(played.hits[played.tiers.index(tier)].sum()) if tier in played.tiers else 0


def _tiers(played: PlayedStack, asked: int, chunk_bytes: int) -> Table:
    rows = []
    for traffic in played.traffic:
        hits, read, written = _hits(played, traffic.name), traffic.read.total(), traffic.written.total()
        moved = [f"{count:,} ({round_size(count * chunk_bytes)})" for count in (read, written)]
        rows.append([traffic.name, f"{hits:,}", f"{100 * hits / asked:.1f} %", *moved, f"{traffic.not_written:,}"])
    return Table("Tiers", ("tier", "chunks found", "of those asked for", "read", "written", "not written"), rows)
