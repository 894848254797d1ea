"""The first pages of the sections: every page under the heading of a reader, in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = re.compile(r"^- \[[^\]]+\]\(([\w/-]+)\.md\): .+\.$", flags=re.MULTILINE)
LINE_MAX = 120

SECTIONS = pytest.mark.parametrize("section", ["how-to", "reference", "explanation"])


def shown_and_listed(text: str) -> tuple[list[str], list[str]]:
    """Pages that the first page shows, and those of its hidden list, which orders the menu of the site."""
    shown, _, hidden = text.partition("```{toctree}")
    return PAGE.findall(shown), re.findall(r"^([\w/-]+)$", hidden, flags=re.MULTILINE)


@SECTIONS
def test_every_page_has_a_line_on_the_first_page(section: str) -> None:
    """A new page is placed where its reader looks, and the menu beside the page has the same order."""
    folder = DOCS / section
    shown, listed = shown_and_listed((folder / "index.md").read_text(encoding="utf-8"))
    pages = [page.stem for page in folder.glob("*.md") if page.stem != "index"]
    assert sorted(shown) == sorted([*pages, *(f"{page.parent.name}/index" for page in folder.glob("*/index.md"))])
    assert listed == shown, "the hidden list of index.md has another order than its lines"


@SECTIONS
def test_a_line_fits_a_line(section: str) -> None:
    """Readers skim this page: a page that takes a paragraph hides its neighbours."""
    lines = (DOCS / section / "index.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith("- ") and len(line) > LINE_MAX]


def test_a_missing_page_is_noticed() -> None:
    """The check can fail: for a page without a line, and for another order."""
    assert shown_and_listed("- [A](a.md): text.\n- [B](b/index.md)\n```{toctree}\n:hidden:\n\nb/index\na\n```\n") == (
        ["a"],
        ["b/index", "a"],
    )
