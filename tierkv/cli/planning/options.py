"""Options and progress that the commands over traces share."""

from __future__ import annotations

import math
from array import array

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkv.config.units import parse_size
from tierkv.planning.assumptions import TierSpeed
from tierkv.replay.trace import CHUNKS_MAX, count_misplaced
from tierkv.replay.trace_lines import MS

_LATENCY_S_MAX = 3600.0


class ChunkCount(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no type arguments
    """Number of chunks: 3000, 30k, 1m."""

    name = "chunks"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a count, with a suffix for thousands or millions."""
        text = str(value).strip().lower()
        factor = {"k": 1_000, "m": 1_000_000}.get(text[-1:], 1)
        digits = text[:-1] if factor > 1 else text
        if not digits.isascii() or not digits.isdigit() or not int(digits):
            self.fail(
                f"{value!r} is no number of chunks; give one such as 3000, 30k or 1m: bytes / bytes of a chunk",
                param,
                ctx,
            )
        return int(digits) * factor


class Size(click.ParamType):  # type: ignore[type-arg]  # (the same)
    """Size in bytes: 2MiB.

    Args:
        whence: where a user finds the value of an option that is required.
    """

    name = "size"

    def __init__(self, whence: str = "") -> None:
        self._whence = whence

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str | None:
        """Say where the value is found."""
        del param, ctx
        return self._whence or None

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size as in a configuration."""
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


WHENCE_CHUNK_BYTES = (
    "A trace counts chunks, and capacities are in bytes. `tierkv trace RECORD` prints the bytes of a chunk of your own "
    "traffic. `tierkv ls` at a tier has them as bytes / chunks. The guide 'Size a tier' computes them from a model."
)
"""Answer to a user who leaves the size of a chunk out."""


CHUNKS_MAX_OPTION = click.option(
    "--chunks-max",
    type=ChunkCount(),
    default=CHUNKS_MAX,
    show_default=True,
    help="Chunks of the trace to read, which bounds the memory: about 250 bytes each. The rest is left out, and a "
    "message says so.",
)


_UNITS = {"ms": MS, "s": 1.0}
RATE_MAX = 100.0
"""Requests per second, on average, beyond which a trace in milliseconds is taken for one in seconds."""
RATED_MIN = 100
"""Fewest requests that have a rate."""

TIMESTAMPS_OPTION = click.option(
    "--timestamps",
    "units_per_s",
    type=click.Choice(list(_UNITS)),
    callback=lambda _ctx, _param, unit: _UNITS[unit],
    default="ms",
    show_default=True,
    help="Unit of the trace's timestamps.",
)


class SpeedOf(click.ParamType):  # type: ignore[type-arg]  # (the same)
    """Speed of a tier: ``disk=3GB`` or ``disk=3GB,0.2ms``."""

    name = "name=bytes[,time]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, TierSpeed]:
        """Parse the name of a tier and its speed."""
        name, equals, rest = str(value).partition("=")
        rate, comma, latency = rest.partition(",")
        try:
            bytes_per_s = _rate(rate)
            latency_s = _seconds(latency) if comma else 0.0
        except ValueError as error:
            self.fail(f"{value!r}: {error}; give a speed such as disk=3GB,0.2ms", param, ctx)
        if not equals or not name.strip():
            self.fail(f"{value!r} names no tier; give a speed such as disk=3GB,0.2ms", param, ctx)
        return name.strip(), TierSpeed(float(bytes_per_s), latency_s)


class PriceOf(click.ParamType):  # type: ignore[type-arg]  # (the same)
    """Price per GiB of a tier, or of an engine: ``disk=0.08``."""

    name = "name=price"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Parse a name and its price."""
        name, _, text = str(value).partition("=")
        try:
            price = float(text)
        except ValueError:
            price = math.nan
        if not name.strip() or not math.isfinite(price) or price < 0:
            self.fail(f"{value!r} is no price; give one such as disk=0.08, per GiB", param, ctx)
        return name.strip(), price


def _rate(text: str) -> int:
    """Parse bytes per second such as ``3GB`` or ``3GB/s``.

    Raises:
        ValueError: it is none, or has no unit: 6 is meant as gigabytes more often than as bytes.
    """
    size = text.removesuffix("/s").strip()
    if size.replace(".", "", 1).isdecimal():
        raise ValueError(f"{size!r} has no unit")
    return parse_size(size)


def _seconds(text: str) -> float:
    """Parse a time such as ``0.2ms``.

    Raises:
        ValueError: it is none.
    """
    text = text.strip()
    unit = next((unit for unit in ("us", "ms", "s") if text.endswith(unit)), None)
    if unit is None:
        raise ValueError(f"{text!r} is no time: write it in us, ms or s")
    value = float(text.removesuffix(unit)) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    if not 0 <= value <= _LATENCY_S_MAX:
        raise ValueError(f"{text!r} is not from 0 to {_LATENCY_S_MAX:.0f} s")
    return value


def cut_notice(requests: int) -> str:
    """Message about a trace that was not read to its end."""
    return f"Only the first {requests:,} requests were read; raise --chunks-max for the rest."


def warn_of_misplaced(chunks: array[int], starts: array[int]) -> None:
    """Warn of ids that identify a chunk alone. Arguments as for :func:`~tierkv.replay.trace.count_misplaced`."""
    if count := count_misplaced(chunks, starts):
        click.echo(
            f"{count:,} ids follow different ids in different prompts, so they identify a chunk alone. "
            "More is found here than an engine would find: hash each chunk together with the id before it.",
            err=True,
        )


def warn_of_seconds(requests: int, first_s: float, last_s: float, units_per_s: float) -> None:
    """Warn of timestamps that are probably in seconds.

    Args:
        requests: number of requests.
        first_s: arrival of the first one, in seconds.
        last_s: arrival of the last one, in seconds.
        units_per_s: units of a timestamp per second, as given.
    """
    rate = requests / max(last_s - first_s, 1e-3)
    if units_per_s == MS and requests >= RATED_MIN and rate > RATE_MAX:
        click.echo(
            f"The trace has {rate:,.0f} requests per second. If its timestamps are in seconds, add --timestamps s.",
            err=True,
        )


def progress_bar() -> Progress:
    """Progress bar, disabled where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
