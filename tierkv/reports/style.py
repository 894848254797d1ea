"""Colours and fonts of plots and pages, light and dark.

The hues differ for readers who do not distinguish red and green. Text has a contrast of at least 4.5 to 1, lines and
bars of 3 to 1.
"""

from __future__ import annotations

SERIES = 6
"""Number of colours of series; further series repeat them with dashes."""

_LIGHT = {
    "bg": "#ffffff",
    "panel": "#f6f7f9",
    "fg": "#1c2530",
    "dim": "#566170",
    "grid": "#dfe3e8",
    "s0": "#1f6fb4",
    "s1": "#b85a12",
    "s2": "#1f8257",
    "s3": "#7a56a8",
    "s4": "#b2344c",
    "s5": "#0f7d8a",
    "ref": "#7b8490",
}
_DARK = {
    "bg": "#12161c",
    "panel": "#1b212a",
    "fg": "#e6eaef",
    "dim": "#a3adba",
    "grid": "#313a46",
    "s0": "#6fb1f2",
    "s1": "#f0a35e",
    "s2": "#5fc795",
    "s3": "#bda0ea",
    "s4": "#f28497",
    "s5": "#55c5d1",
    "ref": "#8f99a6",
}

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def colours(selector: str) -> str:
    """CSS that sets the colours for a selector."""
    dark = f"@media (prefers-color-scheme:dark){{{selector}{{{_variables(_DARK)}}}}}"
    return f"{selector}{{{_variables(_LIGHT)}}}{dark}"


PLOT_CSS = (
    f".tk text{{font-family:{FONT};font-size:15px;fill:var(--fg);"
    "paint-order:stroke;stroke:var(--bg);stroke-width:3px;stroke-linejoin:round}"
    ".tk .dim{fill:var(--dim)}.tk .title{font-weight:600;font-size:17px}.tk .small{font-size:13.5px}"
    ".tk .grid{stroke:var(--grid);stroke-width:1}.tk .axis{stroke:var(--dim);stroke-width:1}"
    ".tk .line{fill:none;stroke-width:2.5;stroke-linejoin:round;stroke-linecap:round}"
    + "".join(
        f".tk .c{i}{{stroke:var(--s{i})}}.tk .f{i}{{fill:var(--s{i})}}.tk .t{i}{{fill:var(--s{i})}}"
        for i in range(SERIES)
    )
    + ".tk .cr{stroke:var(--ref)}.tk .fr{fill:var(--ref)}.tk .tr{fill:var(--ref)}"
)
"""CSS of plots, with the colours of :func:`colours`."""

PAGE_CSS = (
    f"*{{box-sizing:border-box}}html{{color-scheme:light dark}}body{{margin:0;background:var(--bg);color:var(--fg);"
    f"font:16px/1.55 {FONT}}}main{{max-width:62rem;margin:0 auto;padding:2rem 1.25rem 4rem}}"
    "h1{font-size:1.7rem;line-height:1.25;margin:0 0 .25rem}h2{font-size:1.25rem;margin:2.5rem 0 .75rem}"
    "p{max-width:46rem;margin:.5rem 0}.lead{font-size:1.1rem}.dim{color:var(--dim)}"
    "ul{max-width:46rem;padding-left:1.2rem}"
    ".scroll{overflow-x:auto;margin:1rem 0;border:1px solid var(--grid);border-radius:8px}"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
    "th,td{padding:.45rem .6rem;text-align:left;border-bottom:1px solid var(--grid);vertical-align:top}"
    "tr:last-child td{border-bottom:0}th{background:var(--panel);font-weight:600;vertical-align:bottom}"
    "td:first-child:not(:only-child){min-width:8.5rem}"
    "td.n{white-space:nowrap}td.n,th.n{text-align:right}caption{text-align:left;padding:.6rem;font-weight:600}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,27rem),1fr));gap:1rem;margin:1rem 0}"
    "figure{margin:0;max-width:46rem;padding:.75rem;border:1px solid var(--grid);border-radius:8px}"
    "figure svg{display:block;width:100%;height:auto}figcaption{font-size:.9rem;color:var(--dim);margin-top:.4rem}"
    ".facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.75rem;margin:1.25rem 0}"
    ".fact{background:var(--panel);border-radius:8px;padding:.75rem .9rem}.fact b{display:block;font-size:1.35rem}"
    "footer{margin-top:3rem;font-size:.9rem;color:var(--dim)}code{font-family:ui-monospace,Menlo,Consolas,monospace;"
    "font-size:.92em}"
)
"""CSS of pages."""
