"""Charts and pages as text: round ticks, nothing but text of their own, equal bytes for equal values."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.reports.axis import axis_for, log_ticks, plain, round_ticks
from tierkv.reports.bar_chart import BarChart
from tierkv.reports.line_chart import LineChart, Series
from tierkv.reports.page import Bullets, Facts, Heading, Page, Paragraph, Plots, Table

VALUES = st.floats(allow_nan=True, allow_infinity=True, width=32)


def line(points: list[tuple[float, float]], **fields: object) -> LineChart:
    """A chart of one line."""
    return LineChart("title", "x", "y", [Series("one", points)], **fields)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(low=st.floats(-1e6, 1e6), share=st.floats(1e-3, 1e3))
def test_ticks_are_few_round_and_cover_the_values(low: float, share: float) -> None:
    """A reader interpolates between labels: they must be round and enclose every value."""
    width = share * max(1.0, abs(low))
    ticks = round_ticks(low, low + width)
    assert 2 <= len(ticks) <= 9
    assert ticks[0] <= low + 1e-6 * width
    assert ticks[-1] >= low + width - 1e-6 * width
    steps = [b - a for a, b in pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


@settings(max_examples=100, deadline=None)
@given(low=st.floats(1e-6, 1e6), factor=st.floats(2, 1e9), base=st.sampled_from([2, 10]))
def test_ticks_of_a_logarithmic_axis_are_within_it(low: float, factor: float, base: int) -> None:
    """A tick outside of the values would stretch the axis."""
    ticks = log_ticks(low, low * factor, base)
    assert len(ticks) <= 9
    assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in ticks)
    axis = axis_for([low, low * factor], 0, 100, "log", base=base)
    assert axis.at(low) == pytest.approx(0)
    assert axis.at(low * factor) == pytest.approx(100)


@settings(max_examples=100, deadline=None)
@given(points=st.lists(st.tuples(VALUES, VALUES), max_size=30), scale=st.sampled_from(["linear", "log"]))
def test_any_values_make_a_well_formed_plot(points: list[tuple[float, float]], scale: str) -> None:
    """Reports are made of measurements: one that is infinite, missing or alone must not end a run of an hour."""
    root = ET.fromstring(line(points, x_scale=scale).svg())
    coordinates = re.findall(r"[-\d.]+", " ".join(element.get("points", "") for element in root.iter()))
    assert all(math.isfinite(float(one)) for one in coordinates)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.tuples(VALUES, VALUES), max_size=8), stacked=st.booleans())
def test_any_values_make_well_formed_bars(values: list[tuple[float, float]], *, stacked: bool) -> None:
    """The same holds for bars."""
    series = [("a", [one for one, _ in values]), ("b", [one for _, one in values])]
    ET.fromstring(BarChart("title", "x", ["label"] * len(values), series, stacked=stacked).svg())


def test_bars_are_as_long_as_their_values() -> None:
    """A bar of twice the value is twice as long; parts of a stacked bar follow each other."""
    root = ET.fromstring(BarChart("t", "x", ["a"], [("one", [10]), ("two", [20])], stacked=True).svg())
    bars = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("height") == "18"]
    (x0, w0), (x1, w1) = [(float(bar.get("x", 0)), float(bar.get("width", 0))) for bar in bars]
    assert w1 == pytest.approx(2 * w0, abs=0.2)
    assert x1 == pytest.approx(x0 + w0, abs=0.2)


def test_names_are_text_and_no_markup() -> None:
    """A tenant may be named after a script: a report must not run it."""
    evil = '<script>alert("x")</script>'
    chart = BarChart(evil, evil, [evil], [(evil, [1.0]), ("b", [2.0])])
    page = Page(
        evil,
        evil,
        (
            Heading(evil),
            Paragraph(evil),
            Bullets([evil]),
            Facts([(evil, evil)]),
            Table(evil, [evil], [[evil]]),
            Plots([(chart, evil), (LineChart(evil, evil, evil, [Series(evil, [(1, 1)])]), evil)]),
        ),
        evil,
    )
    assert "<script" not in page.html()
    assert page.html().count("&lt;script&gt;") >= 14


def test_equal_values_give_equal_bytes() -> None:
    """A plot in a repository changes with its figures only."""
    assert line([(1, 2), (3, 4)]).svg() == line([(1, 2), (3, 4)]).svg()


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (-0.001, "-1.0e-03"), (1234567, "1,234,567"), (2.5, "2.5"), (0.1 + 0.2, "0.3")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    """Labels have no digits that say nothing."""
    assert plain(value) == text
