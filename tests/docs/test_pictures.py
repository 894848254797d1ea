"""Pictures of the documentation are what their generator draws, are shown, and are readable on a phone."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import drawing
import pages
import pictures
import pytest
import states
from browser import CHROMIUM, look_at

ROOT = Path(__file__).resolve().parents[2]
DRAWN = pictures.PICTURES | states.PICTURES


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_the_generator_draws(name: str) -> None:
    """A picture that was edited by hand, or not drawn again, differs from the code that it is about."""
    committed = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")
    assert committed == DRAWN[name](), "python -m nox -s generate"
    assert name in pages.PAGES


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_scales_follows_the_theme_and_can_be_read_aloud(name: str) -> None:
    """A phone shows it in its own width, a dark page in dark colours, and a screen reader reads its description."""
    text = DRAWN[name]()
    root = ET.fromstring(text)
    assert root.get("viewBox", "").startswith(f"0 0 {drawing.WIDTH} ")
    assert root.get("width") is None
    assert "prefers-color-scheme:dark" in text
    title, description = (root.find(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "desc"))
    assert title is not None
    assert title.text
    assert description is not None
    assert len(description.text or "") > 40


def test_every_picture_is_shown() -> None:
    """A picture that no page shows is forgotten; one that is missing is a hole in a page."""
    shown = {
        found
        for page in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
        for found in re.findall(r"pictures/([\w-]+\.svg)", page.read_text(encoding="utf-8"))
    }
    assert shown == {Path(name).name for name in DRAWN} == {path.name for path in ROOT.glob("docs/pictures/*")}


def test_a_text_that_would_leave_a_picture_is_refused() -> None:
    """A label that is cut off misleads, and nothing else would notice it."""
    with pytest.raises(ValueError, match="shorten or move it"):
        drawing.text(300, 20, "a text that is far too long for its place")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (apt-get install chromium)")
def test_no_text_of_a_picture_is_cut_off(tmp_path: Path) -> None:
    """The widths that the generator assumes hold for a browser's fonts, too."""
    page = tmp_path / "pictures.html"
    page.write_text(f"<body>{''.join(draw() for draw in DRAWN.values())}</body>", encoding="utf-8")
    seen = look_at(page, tmp_path, width=390)
    assert seen.facts["plots"] == len(DRAWN)
    assert not seen.facts["texts_outside"]
