"""Output of commands: one JSON object for programs, or tables for terminals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierkv.cli.streams import HAS_JSON

GOOD = "green"
BAD = "bold red"
DOUBTFUL = "yellow"
DIM = "dim"

_PIPE_COLUMNS = 160
"""Width where output is no terminal. A table wrapped at 80 columns is hard to read in a log."""

_COLUMN_WIDTH_MIN = 8
"""Characters per column below which a table breaks most words."""

Cell = str | Text


def console() -> Console:
    """Console on the present standard output; plain text, and wide, where that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False, soft_wrap=False)


def print_json(value: object) -> None:
    """Print the JSON object of the command. Values that JSON lacks, such as paths, become text."""
    click.echo(json.dumps(value, indent=2, default=str))
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[HAS_JSON] = True


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Print a table; on a terminal that is too narrow for it, a list.

    Cells are shown literally: text in brackets is no markup.
    """
    shown = console()
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    table = Table(title=Text(title), title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column.endswith(" ms") else "left")
    for row in texts:
        table.add_row(*row)
    if shown.width >= _COLUMN_WIDTH_MIN * len(columns):
        shown.print(table)
        return
    shown.print(Text(title, "bold"), soft_wrap=True)
    for row in texts:
        for column, cell in zip(columns, row, strict=True):
            if cell.plain:
                shown.print(Text.assemble((f"{column}: ", DIM), cell), soft_wrap=True)
        shown.print()


def visible(text: str) -> str:
    """Return a text of unknown origin, such as the name of a stored model, so that a terminal does not act on it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def verdict(*, ok: bool, warns: bool = False) -> Text:
    """``ok``, ``warn`` or ``fail``, in its colour."""
    if not ok:
        return Text("fail", BAD)
    return Text("warn", DOUBTFUL) if warns else Text("ok", GOOD)
