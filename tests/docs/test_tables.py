"""Tables of the documentation: every row has the cells of its head."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("plugins/*/README.md")]
BAR = re.compile(r"(?<!\\)\|")


def uneven_rows(text: str) -> Iterator[str]:
    """Rows with another number of cells than the head of their table; the site drops cells of such a row."""
    bars, is_code = 0, False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if is_code or not line.startswith("|"):
            bars = 0
            continue
        bars = bars or len(BAR.findall(line))
        if len(BAR.findall(line)) != bars:
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_has_the_cells_of_its_head(page: Path) -> None:
    """A type such as `int | None` made two cells, and the meaning of the field was not shown."""
    assert not list(uneven_rows(page.read_text(encoding="utf-8")))


def test_an_uneven_row_is_noticed() -> None:
    """The check can fail; a bar behind a backslash, and one in code, divide nothing."""
    assert list(uneven_rows("| a | b |\n|---|---|\n| int | None | x |\n| a \\| b | c |\n```\n| d |\n```\n")) == [
        "| int | None | x |"
    ]
