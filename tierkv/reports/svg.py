"""Elements of SVG as text, and the frame that all plots share."""

from __future__ import annotations

import html
from collections.abc import Sequence

from tierkv.reports.axis import Axis, Format
from tierkv.reports.style import PLOT_CSS, SERIES, colours

WIDTH = 560
"""Width of a plot in its own units; it scales to the width of the page."""
MARGIN = 12
LINE = 20
"""Height of a line of text."""
_CHAR = 8.3  # average width of a character at 15 px


def text_width(text: str) -> float:
    """Width of a text at the size of labels, about."""
    return len(text) * _CHAR


def number(value: float) -> str:
    """Coordinate, with one decimal at most."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def text(x: float, y: float, content: str, classes: str = "", anchor: str = "start") -> str:
    """Text at a position; ``anchor`` is start, middle or end."""
    named = f' class="{classes}"' if classes else ""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{number(x)}" y="{number(y)}"{named}{placed}>{html.escape(content)}</text>'


def axis_label(content: str, start: float, end: float, y: float) -> str:
    """Label of a horizontal axis, in the middle of it where it fits."""
    half = text_width(content) * 0.45
    middle = min(max((start + end) / 2, half + MARGIN), max(WIDTH / 2, WIDTH - MARGIN - half))
    return text(middle, y, content, "dim small", "middle")


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    """Straight line."""
    return f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" class="{classes}"/>'


def colour_of(index: int, *, is_reference: bool) -> str:
    """Last letter of the class of a series' colour."""
    return "r" if is_reference else str(index % SERIES)


def legend(names: Sequence[str], marks: Sequence[str], y: float) -> tuple[str, float]:
    """Legend in as many rows as it needs. Returns it, and the position below it.

    marks: the last letter of each series' colour class.
    """
    parts, x = [], float(MARGIN)
    for name, mark in zip(names, marks, strict=True):
        width = 24 + text_width(name) + 18
        if x > MARGIN and x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + LINE
        parts.append(f'<rect x="{number(x)}" y="{number(y - 10)}" width="16" height="11" rx="2" class="f{mark}"/>')
        parts.append(text(x + 23, y, name))
        x += width
    return "".join(parts), y + 14


def horizontal_grid(axis: Axis, form: Format, left: float, right: float) -> str:
    """Lines and labels of a vertical axis."""
    parts = []
    for tick in axis.ticks:
        y = axis.at(tick)
        parts.append(line(left, y, right, y, "grid"))
        parts.append(text(left - 7, y + 4.5, form(tick), "dim small", "end"))
    return "".join(parts)


def vertical_grid(axis: Axis, form: Format, top: float, bottom: float) -> str:
    """Lines and labels of a horizontal axis, all within the plot. One that would touch the one before is left out."""
    parts, free_from = [], float("-inf")
    for tick in axis.ticks:
        x, label = axis.at(tick), form(tick)
        parts.append(line(x, top, x, bottom, "grid"))
        half = text_width(label) * 0.47
        middle = max(half + 2, min(x, WIDTH - half - 2))
        if middle - half >= free_from:
            parts.append(text(middle, bottom + 17, label, "dim small", "middle"))
            free_from = middle + half + 8
    return "".join(parts)


def document(title: str, description: str, body: str, height: float) -> str:
    """Whole plot. Its style needs nothing from outside and follows the reader's light or dark setting."""
    style = colours(".tk") + PLOT_CSS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tk" viewBox="0 0 {WIDTH} {number(height)}" role="img" '
        f'aria-label="{html.escape(title)}"><title>{html.escape(title)}</title>'
        f"<desc>{html.escape(description)}</desc><style>{style}</style>"
        f'<rect width="{WIDTH}" height="{number(height)}" rx="8" style="fill:var(--bg)"/>{body}</svg>'
    )
