"""Reports in headless Chromium: they load without a network, in light and dark, on a desk and on a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import CHROMIUM, look_at

from tierkv.reports.bar_chart import BarChart
from tierkv.reports.line_chart import LineChart, Series
from tierkv.reports.page import Bullets, Facts, Heading, Page, Paragraph, Plots, Table

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (apt-get install chromium)")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of section, and with long names."""
    long = "a name of a stack that is quite long, as paths are"
    series = [Series(f"{long} {i}", [(2.0**n, (n + 1.0) * (i + 1)) for n in range(20)]) for i in range(7)]
    ends = ("Bars", "GiB per second", [long, "b"], [("one", [1e6, 2]), ("two", [3, 4])])
    bars = BarChart(*ends, x_format="{:g} seconds".format, reference=2)
    stacked = BarChart("Parts", "%", ["a", "b"], [(long, [10, 20]), ("two", [30, 80])], stacked=True, x_high=100)
    sections = [
        Paragraph("The answer.", is_lead=True),
        Facts([("12 %", "of something"), ("3 s", "of something else")]),
        Table("Numbers", ["name", *(f"column {i}" for i in range(14))], [[long, *(["1,234,567.8"] * 14)]]),
        Heading("Plots"),
        Plots([(LineChart("Lines", "size", "hits", series, x_scale="log", x_base=2), long), (bars, ""), (stacked, "")]),
        Plots([(LineChart("Nothing", "x", "y", []), "")]),
        Bullets([long] * 3),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    Page("A report", "made by a test", sections, "The end.").write(path)
    return path


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_page_needs_nothing_and_follows_the_readers_setting(page: Path, tmp_path: Path, *, is_dark: bool) -> None:
    """A report is mailed, and read in a train at night: no request, no error, and the colours of the reader."""
    seen = look_at(page, tmp_path, is_dark=is_dark)
    assert not seen.facts["requests"]
    assert not seen.console
    ground = "rgb(18, 22, 28)" if is_dark else "rgb(255, 255, 255)"
    assert seen.facts["background"] == seen.facts["plot"] == ground
    assert seen.facts["ink"] != ground
    assert seen.facts["plots"] == 4
    assert len(set(seen.facts["plot_widths"])) == 1, "a plot alone in its row has larger letters"
    assert not seen.facts["texts_outside"]


def test_a_page_that_needs_something_is_found(page: Path, tmp_path: Path) -> None:
    """The test above can fail: a picture from elsewhere and an error of a script are both noticed."""
    worse = tmp_path / "worse.html"
    more = '<img src="http://127.0.0.1:9/x.png"><script>console.error("bad")</script></main>'
    worse.write_text(page.read_text(encoding="utf-8").replace("</main>", more), encoding="utf-8")
    seen = look_at(worse, tmp_path)
    assert seen.facts["requests"] == ["http://127.0.0.1:9/x.png"]
    assert any("bad" in line for line in seen.console)


def test_a_page_is_no_wider_than_a_phone(page: Path, tmp_path: Path) -> None:
    """Wide tables scroll by themselves; the page does not, and no label of a plot is cut off."""
    seen = look_at(page, tmp_path, width=390)
    assert seen.facts["page_width"] <= seen.facts["window_width"]
    assert not seen.facts["texts_outside"]
