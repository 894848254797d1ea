"""HTML report of the demo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tierkv.reports.bar_chart import BarChart
from tierkv.reports.page import Facts, Page, Paragraph, Plots, Section, Table
from tierkv.types.sizes import round_size


def demo_page(report: Mapping[str, Any]) -> Page:
    """Make the page of a demo from its report as one object."""
    return Page(
        "tierkv demo",
        "Conversations were served through a stack; a new process continued them, and every token was compared.",
        tuple(_sections(report)),
        f"Model {report['engine']['model']}. Made by tierkv demo.",
    )


def _sections(report: Mapping[str, Any]) -> Iterator[Section]:
    problems, requests = report["problems"], report["requests"]
    good = "Every generated token equals the run without tierkv."
    yield Paragraph("; ".join(problems) if problems else good, is_lead=True)
    computed, without = report["tokens_computed"], report["tokens_computed_without_tierkv"]
    yield Facts(
        (
            (f"{computed:,}", f"tokens computed; {without:,} without tierkv"),
            (_ms(report["ttft_warm_s"]), f"first token of a returning conversation; {_ms(report['ttft_cold_s'])} cold"),
            (f"{report['chunks_corrupt']:,}", f"corrupt chunks detected; {report['frames_damaged']:,} frames damaged"),
            (round_size(report["bytes_verified"]), "verified"),
        )
    )
    names = [request["conversation"] for request in requests]
    tiers = list(report["tokens_loaded"])
    parts = [(f"from {tier}", [request["tokens_loaded"].get(tier, 0) for request in requests]) for tier in tiers]
    parts += [("GPU cache", [request["tokens_cached"] for request in requests])]
    parts += [("computed", [request["tokens_computed"] for request in requests])]
    times = [
        ("without tierkv", [1000 * request["ttft_cold_s"] for request in requests]),
        ("with tierkv", [1000 * request["ttft_warm_s"] for request in requests]),
    ]
    shown = [(name, values) for name, values in parts if any(values)]
    yield Plots(
        (
            (BarChart("Prompt tokens of returning conversations", "tokens", names, shown, stacked=True), ""),
            (
                BarChart("Time to the first token", "ms", names, times, x_format=_whole),
                "In a new process; nothing is on the GPU.",
            ),
        )
    )
    yield Table(
        "Returning conversations",
        (
            "conversation",
            "prompt",
            "computed",
            *(f"from {tier}" for tier in tiers),
            "deferrals",
            "cold",
            "warm",
            "tokens",
        ),
        [
            [
                request["conversation"],
                f"{request['prompt_tokens']:,}",
                f"{request['tokens_computed']:,}",
                *(f"{request['tokens_loaded'].get(tier, 0):,}" for tier in tiers),
                f"{request['deferrals']}",
                _ms(request["ttft_cold_s"]),
                _ms(request["ttft_warm_s"]),
                "equal" if request["tokens_equal"] else "DIFFER",
            ]
            for request in requests
        ],
    )
    phases = report["phases"].values()
    yield Table(
        "Tiers, both processes together",
        ("tier", "written", "read", "verified"),
        [
            [tier, *(round_size(sum(phase["tiers"].get(tier, {}).get(f"bytes_{verb}", 0) for phase in phases))
                     for verb in ("written", "read", "verified"))]
            for tier in next(iter(phases))["tiers"]
        ],
    )  # fmt: skip


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
