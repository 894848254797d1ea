"""Links between files of the repository lead somewhere: Sphinx checks those of the site, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(ROOT.glob("plugins/*/README.md"))]
LINK = re.compile(r"\]\(([^)\s:#]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub and the site make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> Iterator[str]:
    """Relative links of a page to files or headings that are not there."""
    for name, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        if not target.exists():
            yield f"{page.name}: {name}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.name}: {name}#{anchor}"


def test_relative_links_lead_to_files_and_headings() -> None:
    """A reader on GitHub, or of a package's page, meets no dead end after a page has moved."""
    found = [one for page in PAGES for one in broken(page)]
    assert not found, "\n".join(found)


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    """The check can fail: for files and for headings."""
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](gone.md) [b](#a-title) [c](#none) [d](https://x.test/y)\n", encoding="utf-8")
    assert list(broken(page)) == ["page.md: gone.md", "page.md: #none"]
