"""Options and progress that the commands over traces share."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkv.config.units import parse_size
from tierkv.replay.trace import CHUNKS_MAX


class ChunkCount(click.ParamType[int]):
    """Number of chunks: 3000, 30k, 1m."""

    name = "chunks"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a count, with a suffix for thousands or millions."""
        text = str(value).strip().lower()
        factor = {"k": 1_000, "m": 1_000_000}.get(text[-1:], 1)
        digits = text[:-1] if factor > 1 else text
        if not digits.isascii() or not digits.isdigit() or not int(digits):
            self.fail(f"{value!r} is no number of chunks; give one such as 3000, 30k or 1m", param, ctx)
        return int(digits) * factor


class Size(click.ParamType[int]):
    """Size in bytes: 2MiB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size as in a configuration."""
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


CHUNKS_MAX_OPTION = click.option(
    "--chunks-max",
    type=ChunkCount(),
    default=CHUNKS_MAX,
    show_default=True,
    help="Chunks of the trace to read, which bounds the memory: about 250 bytes each. The rest is left out, and a "
    "message says so.",
)


def cut_notice(requests: int) -> str:
    """Message about a trace that was not read to its end."""
    return f"Only the first {requests:,} requests were read; raise --chunks-max for the rest."


def progress_bar() -> Progress:
    """Progress bar, disabled where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
