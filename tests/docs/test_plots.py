"""Plots of the documentation show the figures that its pages state."""

from __future__ import annotations

import re
from pathlib import Path

import plots
import pytest
from browser import CHROMIUM, look_at

ROOT = Path(__file__).resolve().parents[2]
PAGES = [path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("name", plots.figures())
def test_each_figure_of_a_plot_is_in_a_page(name: str) -> None:
    """A new measurement changes a table; the plot beside it must not keep the old one."""
    rows = [line for page in PAGES for line in page.splitlines() if line.startswith("|")]
    for cells, in_column in plots.cells_of(plots.figures()[name]):
        if in_column:
            found = all(any(cell in row for row in rows) for cell in cells)
        else:
            found = any(all(cell in row for cell in cells) for row in rows)
        assert found, f"{cells}: no table has them; change docs/_generate/figures.toml, then `nox -s generate`"


def test_every_plot_has_figures_and_is_shown() -> None:
    """A file without a source, or without a reader, is forgotten."""
    stems = {Path(name).stem for name in plots.PLOTS}
    assert stems == set(plots.figures())
    shown = {Path(found).stem for page in PAGES for found in re.findall(r"plots/([\w-]+\.svg)", page)}
    assert stems == shown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for found in re.findall(r"plots/([\w-]+)\.svg", readme):
        assert found in stems


def test_a_plot_is_one_file_for_light_and_dark() -> None:
    """A page on a dark site shows a dark plot, from the same file."""
    for name, render in plots.PLOTS.items():
        text = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")
        assert text == render(), "python -m nox -s generate"
        assert "prefers-color-scheme:dark" in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (apt-get install chromium)")
def test_no_label_of_a_plot_is_cut_off(tmp_path: Path) -> None:
    """Fonts differ from machine to machine: each label has room for a wider one."""
    page = tmp_path / "plots.html"
    page.write_text(f"<body>{''.join(render() for render in plots.PLOTS.values())}</body>", encoding="utf-8")
    seen = look_at(page, tmp_path)
    assert seen.facts["plots"] == len(plots.PLOTS)
    assert not seen.facts["texts_outside"]
