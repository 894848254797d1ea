"""Self-contained HTML pages."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tierkv.reports.style import PAGE_CSS, colours


class Chart(Protocol):
    """Chart of a page."""

    def svg(self) -> str:
        """Render as SVG."""


class Section(Protocol):
    """Part of a page."""

    def html(self) -> str:
        """Render as HTML."""


@dataclass(frozen=True, slots=True)
class Heading:
    """Heading of a section."""

    text: str

    def html(self) -> str:
        """Render as HTML."""
        return f"<h2>{html.escape(self.text)}</h2>"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Paragraph of text."""

    text: str
    is_lead: bool = False
    """Whether it is the answer that the page gives."""

    def html(self) -> str:
        """Render as HTML."""
        opening = '<p class="lead">' if self.is_lead else "<p>"
        return f"{opening}{html.escape(self.text)}</p>"


@dataclass(frozen=True, slots=True)
class Bullets:
    """List of sentences."""

    items: Sequence[str]

    def html(self) -> str:
        """Render as HTML."""
        return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in self.items)}</ul>"


@dataclass(frozen=True, slots=True)
class Facts:
    """Few figures, large: each a value and its meaning."""

    items: Sequence[tuple[str, str]]

    def html(self) -> str:
        """Render as HTML."""
        cells = (
            f'<div class="fact"><b>{html.escape(value)}</b>{html.escape(name)}</div>' for value, name in self.items
        )
        return f'<div class="facts">{"".join(cells)}</div>'


@dataclass(frozen=True, slots=True)
class Table:
    """Table. A column is aligned to the right if most of its cells begin with a digit, a sign or a dash."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def html(self) -> str:
        """Render as HTML."""
        marks = [' class="n"' if self._has_numbers(i) else "" for i in range(len(self.columns))]
        head = "".join(
            f'<th scope="col"{mark}>{html.escape(name)}</th>' for mark, name in zip(marks, self.columns, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(f"<td{mark}>{html.escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True))
            + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def _has_numbers(self, column: int) -> bool:
        cells = [row[column] for row in self.rows]
        numbers = [not cell or cell[0].isdigit() or cell[0] in "+-" for cell in cells]
        return column > 0 and 2 * sum(numbers) > len(numbers)


@dataclass(frozen=True, slots=True)
class Plots:
    """Charts side by side, where the page is wide enough. Each may have a sentence below it."""

    charts: Sequence[tuple[Chart, str]]

    def html(self) -> str:
        """Render as HTML."""
        figures = (
            f"<figure>{chart.svg()}{f'<figcaption>{html.escape(words)}</figcaption>' if words else ''}</figure>"
            for chart, words in self.charts
        )
        return f'<div class="plots">{"".join(figures)}</div>'


@dataclass(frozen=True, slots=True)
class Page:
    """Document with a title and sections, complete in itself."""

    title: str
    """Title."""
    subtitle: str
    """Line below the title: the input, and how to make the page again."""
    sections: Sequence[Section] = field(default_factory=tuple)
    """Parts, top to bottom."""
    footer: str = ""
    """Last line."""

    def html(self) -> str:
        """Render as HTML, with everything that it needs."""
        body = "".join(section.html() for section in self.sections)
        footer = f"<footer>{html.escape(self.footer)}</footer>" if self.footer else ""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{html.escape(self.title)}</title>'
            f"<style>{colours(':root')}{PAGE_CSS}</style></head><body><main>"
            f'<h1>{html.escape(self.title)}</h1><p class="dim">{html.escape(self.subtitle)}</p>{body}{footer}'
            "</main></body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page to a file.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_text(self.html(), encoding="utf-8")
