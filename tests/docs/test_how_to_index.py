"""The first page of the how-to guides: every guide under the heading of a reader, in one line."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "how-to"
GUIDE = re.compile(r"^- \[[^\]]+\]\(([\w-]+)\.md\): .+\.$", flags=re.MULTILINE)
LINE_MAX = 120


def shown_and_listed(text: str) -> tuple[list[str], list[str]]:
    """Guides that the page shows, and those of its hidden list, which orders the menu of the site."""
    shown, _, hidden = text.partition("```{toctree}")
    return GUIDE.findall(shown), re.findall(r"^([\w-]+)$", hidden, flags=re.MULTILINE)


def test_every_guide_has_a_line_on_the_first_page() -> None:
    """A new guide is placed where its reader looks, and the menu beside the page has the same order."""
    text = (FOLDER / "index.md").read_text(encoding="utf-8")
    shown, listed = shown_and_listed(text)
    assert sorted(shown) == sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "index")
    assert listed == shown, "the hidden list of index.md has another order than its lines"


def test_a_line_fits_a_line() -> None:
    """Readers skim this page: a guide that takes a paragraph hides its neighbours."""
    lines = (FOLDER / "index.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith("- ") and len(line) > LINE_MAX]


def test_a_missing_guide_is_noticed() -> None:
    """The check can fail: for a guide without a line, and for another order."""
    assert shown_and_listed("- [A](a.md): text.\n- [B](b.md)\n```{toctree}\n:hidden:\n\nb\na\n```\n") == (
        ["a"],
        ["b", "a"],
    )
