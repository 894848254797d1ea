"""Parts of the pictures in docs/pictures: boxes, arrows and texts of SVG, in the colours of the plots.

A picture is 420 units wide, so that a phone shows its texts at nearly their size.
"""

from __future__ import annotations

import html

from tierkv.reports.style import PLOT_CSS, SERIES, colours
from tierkv.reports.svg import number

WIDTH = 420
MARGIN = 12
CHAR, SMALL_CHAR = 8.3, 7.4
"""Width of a character of a text, and of a small text, about; wide enough for most fonts."""
FOLDER = "../pictures"
"""Folder of the pictures, seen from docs/reference."""

_CSS = (
    ".tk .box{fill:var(--panel);stroke-width:1.5}.tk .strong{font-weight:600}.tk .flow{fill:none;stroke:var(--dim);"
    "stroke-width:1.5}.tk .head{fill:var(--dim)}.tk .rail{stroke:var(--grid);stroke-width:2}"
    ".tk .loop{fill:none;stroke-width:2.5}.tk text.plain{stroke:none}"
    ".tk text.number{fill:var(--bg);stroke:none;font-weight:600}"
    + "".join(f".tk .b{i}{{stroke:var(--s{i})}}" for i in range(SERIES))
)


def width_of(content: str, *, small: bool = False) -> float:
    """Width of a text, about."""
    return len(content) * (SMALL_CHAR if small else CHAR)


def text(x: float, y: float, content: str, classes: str = "", anchor: str = "start") -> str:
    """Text at a position; ``anchor`` is start, middle or end.

    Raises:
        ValueError: the text would leave the picture.
    """
    width = width_of(content, small="small" in classes)
    left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
    if left < 0 or left + width > WIDTH:
        raise ValueError(f"{content!r} is {width:.0f} wide and begins at {left:.0f} of {WIDTH}; shorten or move it")
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{number(x)}" y="{number(y)}" class="{classes}"{placed}>{html.escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, colour: int) -> str:
    """Rounded box with an outline in the colour of a series."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect {place} rx="8" class="box b{colour}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Straight line, horizontal or vertical, with a head at its end."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    back_x, back_y = x2 - 8 * dx, y2 - 8 * dy
    corners = [(x2, y2), (back_x - 4 * dy, back_y - 4 * dx), (back_x + 4 * dy, back_y + 4 * dx)]
    points = " ".join(f"{number(x)},{number(y)}" for x, y in corners)
    path = f"M{number(x1)} {number(y1)}L{number(back_x)} {number(back_y)}"
    return f'<path d="{path}" class="flow"/><polygon points="{points}" class="head"/>'


def document(title: str, description: str, body: str, height: float) -> str:
    """Whole picture, for light and dark pages."""
    style = colours(".tk") + PLOT_CSS + _CSS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tk" viewBox="0 0 {WIDTH} {number(height)}" role="img" '
        f'aria-label="{html.escape(title)}"><title>{html.escape(title)}</title>'
        f"<desc>{html.escape(description)}</desc><style>{style}</style>"
        f'<rect width="{WIDTH}" height="{number(height)}" rx="8" style="fill:var(--bg)"/>{body}</svg>\n'
    )
