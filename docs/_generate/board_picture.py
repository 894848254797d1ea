"""Draw the board from answers of Prometheus: ``python docs/_generate/board_picture.py ANSWERS``.

Grafana is not needed for it: the queries are those of the board, and the drawing is ours. ``nox -s board`` writes the
answers. The result is docs/operate/board.svg, for light and dark pages.
"""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana import ROWS, WIDTH, Panel

OUT = Path(__file__).resolve().parents[1] / "operate/board.svg"
PAGE, GAP, PANEL, HEAD = 1200, 10, 168, 30
"""Pixels: width of the picture, between panels, height of a panel, height of a row's title."""
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 46, 20
"""Pixels around the plot inside a panel."""
COLOURS = 8
TICKS = 2
STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 12px; --page: #f4f5f5; --panel: #fff; --ink: #24292e;
  --pale: #6a737d; --grid: #e1e4e8; --c0: #3274d9; --c1: #e0752d; --c2: #37872d; --c3: #8f3bb8; --c4: #c4162a;
  --c5: #0a9ba8; --c6: #a16a03; --c7: #6b7280; }
@media (prefers-color-scheme: dark) { svg { --page: #111217; --panel: #1c1e24; --ink: #d8d9da; --pale: #9aa0a8;
  --grid: #2f3239; --c0: #6e9fff; --c1: #ff9830; --c2: #73bf69; --c3: #b877d9; --c4: #ff7383; --c5: #4fd1dc;
  --c6: #f2cc0c; --c7: #9ca3af; } }
text { fill: var(--ink); } .pale { fill: var(--pale); font-size: 10px; } .title { font-weight: 600; }
.head { font-size: 15px; font-weight: 600; } .stat { font-size: 40px; font-weight: 600; text-anchor: middle; }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One series: its name, and its values by time."""

    name: str
    values: Mapping[float, float]


def lines_of(answers: Sequence[Mapping[str, Any]], until_s: float) -> list[Line]:
    """Series of a panel, up to a time; without those that are zero throughout, if others are not."""
    lines = []
    for answer in answers:
        for series in answer["series"]:
            name = answer["legend"]
            for label, value in series["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            values = {float(at): float(value) for at, value in series["values"] if float(at) <= until_s}
            lines.append(Line(name, {at: value for at, value in values.items() if math.isfinite(value)}))
    return [line for line in lines if any(line.values.values())] or lines


def number(value: float, unit: str) -> str:
    """A value as Grafana shows it in that unit."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
    suffix = {"bytes": "B", "Bps": "B/s"}.get(unit, "")
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{suffix}".rstrip()
    return f"{value:.3g} {suffix}".rstrip()


def text(x: float, y: float, words: str, kind: str = "", **more: object) -> str:
    """An SVG text."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{attributes}>{html.escape(words)}</text>'


def top_of(lines: Sequence[Line], panel: Panel) -> float:
    """Upper end of the axis: 1, 2 or 5 times a power of ten."""
    if panel.top is not None:
        return panel.top
    if panel.stacked:
        times = {at for line in lines for at in line.values}
        highest = max((sum(line.values.get(at, 0.0) for line in lines) for at in times), default=0.0)
    else:
        highest = max((value for line in lines for value in line.values.values()), default=0.0)
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= highest)


@dataclass(frozen=True, slots=True)
class Frame:
    """Place of a plot on the page, and its axes."""

    x: float
    y: float
    width: float
    height: float
    began_s: float
    ended_s: float
    top: float
    """Value at the upper end."""

    def point(self, at_s: float, value: float) -> str:
        """Coordinates of a value."""
        share = (at_s - self.began_s) / (self.ended_s - self.began_s)
        level = min(1.0, max(0.0, value / self.top))
        return f"{self.x + share * self.width:.1f},{self.y + (1 - level) * self.height:.1f}"


def axes(frame: Frame, panel: Panel) -> Iterator[str]:
    """Lines of the grid with their numbers, and the time."""
    for i in range(TICKS + 1):
        y = frame.y + frame.height * (1 - i / TICKS)
        yield f'<path d="M{frame.x:.1f} {y:.1f}h{frame.width:.1f}" stroke="var(--grid)"/>'
        yield text(frame.x - 5, y + 3, number(frame.top * i / TICKS, panel.unit), "pale", text_anchor="end")
    for i in range(4):
        seconds = (frame.ended_s - frame.began_s) * i / 3
        anchor = ("start", "middle", "middle", "end")[i]
        words = f"{seconds:.0f} s"
        yield text(frame.x + frame.width * i / 3, frame.y + frame.height + 14, words, "pale", text_anchor=anchor)


def curves(frame: Frame, lines: Sequence[Line], *, stacked: bool) -> Iterator[str]:
    """The series, as lines or as areas on top of each other."""
    below: dict[float, float] = {}
    for i, line in enumerate(lines):
        colour = f"var(--c{i % COLOURS})"
        if not line.values:
            continue
        if stacked:
            upper = {at: below.get(at, 0.0) + value for at, value in line.values.items()}
            edge = [frame.point(at, value) for at, value in upper.items()]
            base = [frame.point(at, below.get(at, 0.0)) for at in reversed(upper)]
            yield f'<polygon points="{" ".join([*edge, *base])}" fill="{colour}" fill-opacity=".75"/>'
            below.update(upper)
        else:
            points = " ".join(frame.point(at, value) for at, value in line.values.items())
            yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def legend(x: float, y: float, width: float, lines: Sequence[Line]) -> Iterator[str]:
    """Names of the series, as many as fit."""
    end = x + width
    for i, line in enumerate(lines):
        needed = 20 + 6 * len(line.name)
        if x + needed + 70 > end and i < len(lines) - 1:
            yield text(x, y, f"and {len(lines) - i} more", "pale")
            return
        yield f'<rect x="{x:.1f}" y="{y - 8:.1f}" width="9" height="9" rx="2" fill="var(--c{i % COLOURS})"/>'
        yield text(x + 12, y, line.name, "pale")
        x += needed


def panel_of(
    panel: Panel, place: tuple[float, float, float], answers: Mapping[str, Any], began_s: float, ended_s: float
) -> list[str]:
    """One panel."""
    x, y, width = place
    lines = lines_of(answers["panels"][panel.title], ended_s)
    parts = [f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{PANEL}" rx="4" fill="var(--panel)"/>']
    parts.append(text(x + 10, y + 19, panel.title, "title"))
    if panel.kind == "stat":
        (latest,) = [list(line.values.values())[-1] for line in lines]
        parts.append(text(x + width / 2, y + 105, number(latest, panel.unit), "stat"))
        return parts
    inner = Frame(x + LEFT, y + TOP, width - LEFT - RIGHT, PANEL - TOP - BOTTOM, began_s, ended_s, top_of(lines, panel))
    return [
        *parts,
        *legend(x + 10, y + 37, width - 20, lines),
        *axes(inner, panel),
        *curves(inner, lines, stacked=panel.stacked),
    ]


def picture(answers: Mapping[str, Any]) -> str:
    """The whole board at the time when the last alert has begun to fire."""
    began_s = float(answers["began_s"])
    ended_s = max(float(fired_s) for _, fired_s, _ in answers["alerts"].values())
    parts: list[str] = []
    y: float = GAP
    for row in ROWS:
        parts.append(text(GAP, y + 18, row.title, "head"))
        x, y = 0.0, y + HEAD
        for panel in row.panels:
            width = (PAGE - GAP) * panel.width / WIDTH
            if x + width > PAGE:
                x, y = 0.0, y + PANEL + GAP
            parts += panel_of(panel, (GAP + x, y, width - GAP), answers, began_s, ended_s)
            x += width
        y += PANEL + GAP
    title = "The board of tierkv over a stack whose tiers fail and return, one fault per alert"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE} {y:.0f}" role="img" aria-label="{title}">'
    ground = f'<rect width="{PAGE}" height="{y:.0f}" fill="var(--page)"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    OUT.write_text(picture(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
