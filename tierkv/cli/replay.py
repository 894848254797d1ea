"""``tierkv replay``: compare policies and capacities of a tier on the requests of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkv.abc import EvictionPolicy
from tierkv.cli.output import print_json, print_table
from tierkv.config.units import parse_size, round_size
from tierkv.errors import PluginError
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry
from tierkv.replay.bounds import FifoPolicy, clairvoyant
from tierkv.replay.replaying import Replayed, replay
from tierkv.replay.trace import TraceRequest, read_trace

BOUND, FLOOR = "(knows the future)", "(first in, first out)"
DEFAULT_SHARES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Capacities to try, as shares of the different chunks of a trace."""


class _Capacity(click.ParamType[int]):
    name = "chunks"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a count, with a suffix for thousands or millions."""
        text = str(value).strip().lower()
        factor = {"k": 1_000, "m": 1_000_000}.get(text[-1:], 1)
        digits = text[:-1] if factor > 1 else text
        if not digits.isascii() or not digits.isdigit() or not int(digits):
            self.fail(f"{value!r} is no number of chunks; give one such as 3000, 30k or 1m", param, ctx)
        return int(digits) * factor


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size as in a configuration."""
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--capacity",
    "capacities",
    type=_Capacity(),
    multiple=True,
    help="Capacity of the tier in chunks: 3000, 30k, 1m. May be given several times. "
    "Default: six, from 0.3 % of the trace's different chunks to all of them.",
)
@click.option(
    "--policy", "policies", multiple=True, help="A policy to try; may be given several times. Default: all installed."
)
@click.option("--chunk-bytes", type=_Size(), help="Size of a chunk, to show capacities in bytes as well: 2MiB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay_command(
    *, trace: Path, capacities: Sequence[int], policies: Sequence[str], chunk_bytes: int | None, as_json: bool
) -> None:
    """Replay the requests of TRACE against policies and capacities, and show hits and writes.

    TRACE: one JSON object per line with `timestamp` (milliseconds) and `hash_ids` (a prompt's chunks from its front;
    an id identifies its chunk and all chunks before it), plain or in gzip. Hits are chunks found from the front of a
    prompt without a gap. Two bounds are shown beside the policies: the best result with knowledge of the future, and
    first in, first out. Nothing is stored, and no engine is needed. Exit code 0: success; 2: wrong use, no such trace,
    or not a trace.

    \b
    Examples:
      tierkv replay trace.jsonl.gz
      tierkv replay trace.jsonl --capacity 10k --capacity 100k --chunk-bytes 2MiB
      tierkv replay trace.jsonl --policy lru --policy arc --json | jq '.results[] | .hit_percent'
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    registry = load_plugins()
    names = list(dict.fromkeys(policies)) or sorted(registry.policies)
    for name in names:
        registry.require_policy(name)
    requests = list(read_trace(trace))
    distinct = len({key for request in requests for key in request.keys})
    sizes = sorted(set(capacities)) or sorted({max(1, round(share * distinct)) for share in DEFAULT_SHARES})
    results: dict[str, dict[int, Replayed]] = {}
    with _progress() as progress:
        task = progress.add_task("replaying", total=len(sizes) * (len(names) + 2))
        for size, name, played in _played(registry, names, requests, sizes, distinct):
            results.setdefault(name, {})[size] = played
            progress.advance(task)
    if as_json:
        print_json(_as_json(trace, requests, distinct, results, chunk_bytes))
    else:
        _print(requests, distinct, results, chunk_bytes)


def _progress() -> Progress:
    """Progress bar, disabled where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _played(
    registry: PluginRegistry,
    names: Sequence[str],
    requests: Sequence[TraceRequest],
    sizes: Sequence[int],
    distinct: int,
) -> Iterator[tuple[int, str, Replayed]]:
    """Replay each size with each policy. Sizes beyond the number of different chunks are cut to it."""
    for size in sizes:
        enough = min(size, max(distinct, 1))
        for name in names:
            yield size, name, _with_a_policy(registry, name, requests, enough)
        yield size, FLOOR, replay(requests, FifoPolicy(enough), enough)
        yield size, BOUND, clairvoyant(requests, enough)


def _with_a_policy(registry: PluginRegistry, name: str, requests: Sequence[TraceRequest], size: int) -> Replayed:
    found = registry.require_policy(name)
    try:
        policy: EvictionPolicy = found.plugin.open(size)
        return replay(requests, policy, size)
    except Exception as error:
        raise PluginError(f"policy {name!r} of {found.origin} failed at {size} chunks: {error!r}") from error


def _as_json(
    trace: Path,
    requests: Sequence[TraceRequest],
    distinct: int,
    results: Mapping[str, Mapping[int, Replayed]],
    chunk_bytes: int | None,
) -> dict[str, object]:
    return {
        "trace": str(trace),
        "requests": len(requests),
        "chunks": sum(len(request.keys) for request in requests),
        "distinct_chunks": distinct,
        "results": [
            {
                "policy": {BOUND: "belady", FLOOR: "fifo"}.get(name, name),
                "is_bound": name in {BOUND, FLOOR},
                "capacity_chunks": size,
                "capacity_bytes": None if chunk_bytes is None else size * chunk_bytes,
                "hits": played.hits,
                "hit_percent": played.hit_percent,
                "writes": played.writes,
            }
            for name, by_size in results.items()
            for size, played in by_size.items()
        ],
    }


def _print(
    requests: Sequence[TraceRequest],
    distinct: int,
    results: Mapping[str, Mapping[int, Replayed]],
    chunk_bytes: int | None,
) -> None:
    asked = sum(len(request.keys) for request in requests)
    sizes = list(next(iter(results.values())))
    heads = [f"{size:,}" + (f" ({round_size(size * chunk_bytes)})" if chunk_bytes else "") for size in sizes]
    hits = [[name, *(f"{by_size[size].hit_percent:.1f}" for size in sizes)] for name, by_size in results.items()]
    writes = [[name, *(f"{by_size[size].writes:,}" for size in sizes)] for name, by_size in results.items()]
    click.echo(f"{len(requests):,} requests ask for {asked:,} chunks, {distinct:,} of them different.")
    print_table("found, %, by capacity in chunks", ("policy", *heads), hits)
    print_table("chunks written, by capacity in chunks", ("policy", *heads), writes)
