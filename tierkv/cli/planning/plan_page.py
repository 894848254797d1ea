"""HTML report of ``tierkv plan``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tierkv.cli.planning.plan_output import (
    TIER_COLUMNS,
    answer,
    comparison,
    facts,
    growth_line,
    percent,
    seconds,
    tier_row,
)
from tierkv.config.units import parse_size
from tierkv.planning.plan import chosen, left_out
from tierkv.planning.results import Plan, StackPlan
from tierkv.reports.axis import plain
from tierkv.reports.bar_chart import BarChart
from tierkv.reports.line_chart import LineChart, Series
from tierkv.reports.page import Bullets, Facts, Heading, Page, Paragraph, Plots, Section, Table
from tierkv.types.sizes import round_size

POINTS_MAX = 400
"""Points of a line in the plot of traffic."""


def plan_page(trace: str, plan: Plan) -> Page:
    """Report with the answer first, then tables, plots, and the limits of the estimate."""
    return Page(
        "Which stack of tiers?",
        f"tierkv plan for {trace}",
        tuple(_sections(plan)),
        "Made by tierkv plan. Equal input gives an equal page.",
    )


def _sections(plan: Plan) -> Iterator[Section]:
    yield Paragraph(answer(plan), is_lead=True)
    best = chosen(plan.stacks)
    if best is not None:
        yield Facts(
            (
                (f"{best.hit_percent:.1f} %", f"of chunks found by {best.name}"),
                (percent(best.prefill_saved_s, plan.without.prefill_s), "of computation saved"),
                (f"{best.engines_saved} of {plan.without.engines}", "engines saved"),
                (seconds(best.fleet.ttft_p95_s), f"first token, 95 %; {seconds(plan.without.ttft_p95_s)} without"),
            )
        )
    yield Paragraph(facts(plan))
    columns, rows = comparison(plan)
    yield Table("Comparison", columns, rows)
    yield Plots(tuple(_comparing_plots(plan)))
    for one in plan.stacks:
        yield Heading(one.name)
        yield _tiers(plan, one)
        if one.growths:
            yield Bullets([growth_line(plan, growth) for growth in one.growths])
        yield Plots(
            (
                (
                    _traffic(one),
                    "Reads and writes of each tier by minute; in a long trace, each point is the busiest of some.",
                ),
            )
        )
    yield Heading("What this plan leaves out")
    yield Bullets(left_out(plan.span_s))


def _tiers(plan: Plan, one: StackPlan) -> Table:
    """Facts of each tier, one below the other: eleven columns are wider than a page."""
    (_, *names), *facts = zip(TIER_COLUMNS, *(tier_row(plan, tier) for tier in one.tiers), strict=True)
    return Table("Tiers", ["", *names], facts)


def _comparing_plots(plan: Plan) -> Iterator[tuple[BarChart | LineChart, str]]:
    names = list(dict.fromkeys(tier.name for one in plan.stacks for tier in one.tiers))
    by_tier = []
    for name in names:
        found = [sum(tier.hits for tier in one.tiers if tier.name == name) for one in plan.stacks]
        by_tier.append((name, [100 * hits / max(1, plan.chunks) for hits in found]))
    labels = [one.name for one in plan.stacks]
    yield BarChart("Chunks found, by tier", "% of the chunks asked for", labels, by_tier, stacked=True), ""
    fleets = [plan.without, *(one.fleet for one in plan.stacks)]
    waits = [("median", [one.ttft_p50_s for one in fleets]), ("95 %", [one.ttft_p95_s for one in fleets])]
    yield (
        BarChart("Time to the first token", "time", ["without", *labels], waits, x_format=seconds),
        f"With {plan.engines} engine{'s' if plan.engines > 1 else ''}. Estimated: see what is left out.",
    )
    if plan.curve:
        yield (
            LineChart(
                "Hits of one LRU cache, by its size",
                "size",
                "% of the chunks asked for",
                [Series("LRU", plan.curve)],
                x_scale="log",
                x_base=2,
                x_format=round_binary,
            ),
            "All sizes from one pass over the trace. Beyond the bend, more room brings little.",
        )


def round_binary(value: float) -> str:
    """Format a power of two in bytes: ``512 GiB``."""
    size, _, unit = round_size(value).partition(" ")
    return f"{plain(float(size))} {unit}"


def thinned(by_minute: Mapping[int, int]) -> list[tuple[float, int]]:
    """Points of a plot, each the busiest of some minutes: a burst that is left out would be a drive too small."""
    first, last = min(by_minute, default=0), max(by_minute, default=-1)
    step = max(1, -(-(last + 1 - first) // POINTS_MAX))
    busiest = dict.fromkeys(range(first, last + 1, step), 0)
    for minute, size in by_minute.items():
        start = minute - (minute - first) % step
        busiest[start] = max(busiest[start], size)
    return [(float(minute), size) for minute, size in busiest.items()]


def _traffic(one: StackPlan) -> LineChart:
    moves = [moved for tier in one.tiers for moved in (tier.read, tier.written)]
    largest = max((size for moved in moves for size in moved.by_minute.values()), default=0)
    unit = round_size(largest / 60).rpartition(" ")[2]
    unit_bytes = parse_size(f"1{unit}")
    series = []
    for tier in one.tiers:
        for verb, moved in (("read", tier.read), ("written", tier.written)):
            points = [(minute, size / 60 / unit_bytes) for minute, size in thinned(moved.by_minute)]
            series.append(Series(f"{tier.name}, {verb}", points, is_dashed=verb == "written"))
    return LineChart(f"{one.name}: traffic of the tiers", "minute of the trace", f"{unit} per second", series)
