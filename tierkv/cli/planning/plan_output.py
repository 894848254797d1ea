"""Output of ``tierkv plan``: tables for terminals, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import click

from tierkv.cli.output import print_table
from tierkv.config.units import format_size
from tierkv.planning.growth import Growth
from tierkv.planning.plan import chosen, equals, left_out
from tierkv.planning.results import Fleet, Plan, StackPlan, TierPlan
from tierkv.planning.traffic import Moved
from tierkv.types.sizes import round_size

_HOUR_S, _MINUTE_S = 3600.0, 60.0
NONE = "-"
WHOLE_MIN = 100
"""Price from which on it is shown without digits."""


def seconds(value_s: float) -> str:
    """Format a time with about three digits."""
    for unit_s, unit in ((_HOUR_S, "h"), (_MINUTE_S, "min")):
        if abs(value_s) >= 2 * unit_s:
            return f"{value_s / unit_s:,.1f} {unit}"
    return f"{value_s:.2f} s" if abs(value_s) >= 1 else f"{1000 * value_s:.0f} ms"


def money(value: float | None) -> str:
    """Format a price: whole, or with three digits."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= WHOLE_MIN else f"{value:.3g}"


def per_s(value: float) -> str:
    """Format a rate in bytes per second."""
    return f"{round_size(value)}/s"


def percent(part: float, whole: float) -> str:
    """Format a share."""
    return f"{_tenths(100 * part / whole):.1f} %" if whole else "0.0 %"


def _tenths(value: float) -> float:
    """Round, without a sign before zero."""
    return round(value, 1) + 0.0


StackRow = tuple[str, Callable[[Plan, StackPlan], str]]

STACK_ROWS: tuple[StackRow, ...] = (
    ("found", lambda _, one: f"{one.hit_percent:.1f} %"),
    ("too slow to use", lambda _, one: percent(one.slow, one.chunks)),
    ("computation saved", lambda plan, one: f"{percent(one.prefill_saved_s, plan.without.prefill_s)}"),
    ("computation left", lambda _, one: seconds(one.fleet.prefill_s)),
    ("engines needed, busiest hour", lambda _, one: f"{one.fleet.engines}"),
    ("engines saved", lambda _, one: f"{one.engines_saved}"),
    ("first token, median", lambda _, one: seconds(one.fleet.ttft_p50_s)),
    ("first token, 95 %", lambda _, one: seconds(one.fleet.ttft_p95_s)),
    ("price of the tiers", lambda _, one: money(one.price)),
    ("price of saved engines", lambda _, one: money(one.price_saved)),
    ("worst tenant", lambda _, one: worst_of(one)),
    ("hits from", lambda _, one: "stack distances" if one.is_exact_lru else "replay"),
)
"""Rows of the comparison: name, and text of a stack."""


def worst_of(one: StackPlan) -> str:
    """Tenant with the fewest hits."""
    if one.worst is None:
        return NONE
    return f"{one.worst.name or '(none)'}: {one.worst.hit_percent:.1f} % found"


def comparison(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the comparison. The first stack column is the fleet without a cache."""
    none = {
        "found": "0.0 %",
        "computation left": seconds(plan.without.prefill_s),
        "engines needed, busiest hour": f"{plan.without.engines}",
        "first token, median": seconds(plan.without.ttft_p50_s),
        "first token, 95 %": seconds(plan.without.ttft_p95_s),
    }
    rows = [[name, none.get(name, NONE), *(text(plan, one) for one in plan.stacks)] for name, text in STACK_ROWS]
    rows = [row for row in rows if any(cell != NONE for cell in row[1:])]
    return ["", "without", *(one.name for one in plan.stacks)], rows


TIER_COLUMNS = (
    "tier", "capacity", "found", "too slow", "read", "read, peak minute", "written", "written, peak minute",
    "written per day", "drive writes per day", "price",
)  # fmt: skip


def tier_row(plan: Plan, tier: TierPlan) -> list[str]:
    """Row of a tier in the table of a stack."""
    writes = tier.drive_writes_per_day
    return [
        tier.name,
        NONE if tier.capacity_bytes is None else format_size(tier.capacity_bytes),
        percent(tier.hits, plan.chunks),
        percent(tier.slow, plan.chunks),
        per_s(tier.read.bytes_per_s),
        peak(tier.read),
        per_s(tier.written.bytes_per_s),
        peak(tier.written),
        round_size(tier.written.bytes_per_day),
        NONE if writes is None else f"{writes:.2f}",
        money(tier.price),
    ]


def peak(moved: Moved) -> str:
    """Rate of the busiest minute, and its time since the first request."""
    if moved.peak_minute is None:
        return NONE
    hours, minutes = divmod(moved.peak_minute, 60)
    return f"{per_s(moved.peak_bytes_per_s)} at {hours}:{minutes:02} h"


def growth_line(plan: Plan, growth: Growth) -> str:
    """Line about more room: ``4 TiB more on disk: +3.3 % hits, ...``."""
    saved = percent(growth.prefill_saved_s, plan.without.prefill_s)
    price = "" if growth.price is None else f", for {money(growth.price)}"
    return (
        f"{round_size(growth.more_bytes)} more on {growth.tier}: {_tenths(growth.hit_points):+.1f} % hits, "
        f"{saved} of the computation{price}"
    )


def facts(plan: Plan) -> str:
    """Sentence about the trace and what was assumed."""
    assumed = plan.assumed
    return (
        f"{plan.requests:,} requests in {seconds(plan.span_s)} ask for {plan.chunks:,} chunks of "
        f"{assumed.chunk_tokens:,} tokens and {round_size(assumed.chunk_bytes)}, "
        f"{plan.distinct_chunks:,} of them different. An engine computes "
        f"{assumed.prefill_tokens_per_s:,.0f} tokens per second; first tokens are those of "
        f"{plan.engines} engine{'s' if plan.engines > 1 else ''}."
    )


def answer(plan: Plan) -> str:
    """Sentence that names the best stack."""
    best = chosen(plan.stacks)
    if best is None:
        return "There is no stack to compare."
    if all(one.hits == one.slow for one in plan.stacks):
        found = any(one.hits for one in plan.stacks)
        reason = "all hits are faster to compute than to load" if found else "nothing is found"
        return f"No stack saves anything: {reason}."
    return (
        f"{_reason(plan, best)}: {best.hit_percent:.1f} % of the chunks are found, "
        f"{best.engines_saved} of {plan.without.engines} engines are saved, and the median first token takes "
        f"{seconds(best.fleet.ttft_p50_s)} in place of {seconds(plan.without.ttft_p50_s)}."
    )


def _reason(plan: Plan, best: StackPlan) -> str:
    """Beginning of the answer: the best stack, and why."""
    if best.price is not None and best.price_saved is not None:
        if best.price_saved >= best.price:
            return f"{best.name} saves most for its price"
        lost = f"costs {money(best.price)} and saves engines for {money(best.price_saved)}"
        return f"No stack saves engines for its price; {best.name} comes closest, as it {lost}"
    others = [one for one in equals(plan.stacks) if one is not best]
    if not others:
        return f"{best.name} saves most"
    room = ", with less room" if all(best.room_bytes < one.room_bytes for one in others) else ""
    return f"{best.name} saves as much as {' and '.join(one.name for one in others)}{room}"


def print_plan(plan: Plan) -> None:
    """Print tables."""
    click.echo(facts(plan))
    columns, rows = comparison(plan)
    print_table("comparison", columns, rows)
    for one in plan.stacks:
        print_table(one.name, TIER_COLUMNS, [tier_row(plan, tier) for tier in one.tiers])
        for growth in one.growths:
            click.echo(f"  {growth_line(plan, growth)}")
    click.echo(answer(plan))
    click.echo("Left out:")
    for sentence in left_out(plan.span_s):
        click.echo(f"- {sentence}")


def as_json(plan: Plan) -> dict[str, object]:
    """Plan as plain values."""
    assumed = plan.assumed
    return {
        "requests": plan.requests,
        "chunks": plan.chunks,
        "distinct_chunks": plan.distinct_chunks,
        "is_cut": plan.is_cut,
        "span_s": plan.span_s,
        "assumed": asdict(assumed),
        "engines": plan.engines,
        "without": asdict(plan.without),
        "stacks": [_stack(plan, one) for one in plan.stacks],
        "answer": answer(plan),
        "best": None if (best := chosen(plan.stacks)) is None else best.name,
        "lru_curve": [{"bytes": size, "hit_percent": found} for size, found in plan.curve],
        "left_out": left_out(plan.span_s),
    }


def _stack(plan: Plan, one: StackPlan) -> dict[str, object]:
    return {
        "stack": one.name,
        "is_exact_lru": one.is_exact_lru,
        "hits": one.hits,
        "hit_percent": one.hit_percent,
        "slow_hits": one.slow,
        "prefill_saved_s": one.prefill_saved_s,
        "engines_saved": one.engines_saved,
        **_fleet(one.fleet),
        "price": one.price,
        "price_saved": one.price_saved,
        "worst_tenant": None if one.worst is None else asdict(one.worst),
        "tenants": [asdict(tenant) for tenant in one.tenants],
        "tiers": [_tier(tier) for tier in one.tiers],
        "growths": [asdict(growth) | {"line": growth_line(plan, growth)} for growth in one.growths],
    }


def _fleet(fleet: Fleet) -> dict[str, object]:
    return asdict(fleet)


def _tier(tier: TierPlan) -> dict[str, object]:
    moved: Sequence[tuple[str, Moved]] = (("read", tier.read), ("written", tier.written))
    return {
        "tier": tier.name,
        "capacity_bytes": tier.capacity_bytes,
        "hits": tier.hits,
        "slow_hits": tier.slow,
        "drive_writes_per_day": tier.drive_writes_per_day,
        "price": tier.price,
        **{
            name: {
                "bytes": one.total_bytes,
                "bytes_per_s": one.bytes_per_s,
                "bytes_per_day": one.bytes_per_day,
                "peak_bytes_per_s": one.peak_bytes_per_s,
                "peak_minute": one.peak_minute,
            }
            for name, one in moved
        },
    }
