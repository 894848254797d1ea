"""Page of a run: the name of each limit, and further figures in as few lines as they need."""

from __future__ import annotations

from benchmarks.measure import Cost
from benchmarks.page import FIGURES_MAX, benchmarks_page
from benchmarks.rows import Row
from benchmarks.tiers.bandwidth import Limit, bandwidth_row

COST = Cost(1.0, 1.0)


def test_a_limit_has_its_name() -> None:
    """A number without a name is no limit: beside what was it measured?"""
    html = benchmarks_page("here", {"one": [Row("put", "GB/s", 1.0, "plain socket", 2.0)]}).html()
    assert "2 plain socket" in html


def test_further_figures_have_a_column_each_while_they_are_few() -> None:
    """A line for each figure of each row fills screens, where a line for each row would do."""
    few = {f"figure {number}": 1.0 for number in range(FIGURES_MAX)}
    rows = [Row("put", "GB/s", 1.0, extra=few), Row("get", "GB/s", 1.0), Row("delete", "s", 1.0, extra={"figure 1": 7})]
    table = benchmarks_page("here", {"one": rows}).html().partition("Further figures")[2]
    assert table.count("<tr>") == 3
    assert "<td>get" not in table
    many = [Row("put", "GB/s", 1.0, extra={**few, "one more": 2.0})]
    assert (
        benchmarks_page("here", {"one": many}).html().partition("Further figures")[2].count("<tr>") == FIGURES_MAX + 2
    )


def test_a_row_without_a_share_has_no_target() -> None:
    """`ratio >= 0: met` says nothing, and looks like a promise that is kept."""
    assert bandwidth_row("put", 1, [COST], Limit("plain socket", [COST], 0.5)).target is not None
    assert bandwidth_row("redis-py alone", 1, [COST], Limit("plain socket", [COST], 0.0)).target is None
