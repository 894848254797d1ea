"""``tierkv replay``: compare policies and capacities of a tier on the requests of a trace."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from tierkv.abc import EvictionPolicy
from tierkv.cli.output import print_json, print_table
from tierkv.cli.pages import HTML_OPTION, write_page
from tierkv.cli.planning.options import (
    CHUNKS_MAX_OPTION,
    TIMESTAMPS_OPTION,
    ChunkCount,
    Size,
    cut_notice,
    progress_bar,
    warn_of_misplaced,
    warn_of_seconds,
)
from tierkv.cli.planning.replay_page import policies_page
from tierkv.cli.planning.replay_stacks import replay_stacks
from tierkv.errors import PluginError
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry
from tierkv.replay.bounds import FifoPolicy, clairvoyant
from tierkv.replay.replaying import Replayed, replay
from tierkv.replay.trace import TraceRequest, read_trace, require_requests
from tierkv.types.keys import Key
from tierkv.types.sizes import round_size

BOUND, FLOOR = "(knows the future)", "(first in, first out)"
DEFAULT_SHARES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Capacities to try, as shares of the different chunks of a trace."""


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--capacity",
    "capacities",
    type=ChunkCount(),
    multiple=True,
    help="Capacity of the tier in chunks: 3000, 30k, 1m. May be given several times. "
    "Default: six, from 0.3 % of the trace's different chunks to all of them.",
)
@click.option(
    "--policy", "policies", multiple=True, help="A policy to try; may be given several times. Default: all installed."
)
@click.option("--chunk-bytes", type=Size(), help="Size of a chunk, to show capacities in bytes as well: 2MiB.")
@click.option(
    "--stack",
    "stacks",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Description of a stack to play the trace through, in place of single policies; may be given several times. "
    "Needs --chunk-bytes.",
)
@CHUNKS_MAX_OPTION
@TIMESTAMPS_OPTION
@HTML_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay_command(  # noqa: PLR0913 - one argument per option
    *,
    trace: Path,
    capacities: Sequence[int],
    policies: Sequence[str],
    chunk_bytes: int | None,
    stacks: Sequence[Path],
    chunks_max: int,
    units_per_s: float,
    html: Path | None,
    as_json: bool,
) -> None:
    """Replay the requests of TRACE against policies and capacities, or through whole stacks; show hits and writes.

    TRACE: one JSON object per line with `timestamp` (milliseconds, or see --timestamps) and `hash_ids` (a prompt's
    chunks from its front; an id identifies its chunk and all chunks before it), plain or in gzip. Optional are
    `tenant`, `session`, `hints`, `input_length` and `output_length`. `tierkv trace` makes a trace of one's own traffic.
    Hits are chunks found from the front of a prompt without a gap. Two bounds are shown beside the policies: the best
    result with knowledge of the future, and first in, first out. With --stack, the real scheduler, manager and policies
    serve the trace, and hits, reads and writes are shown by tier. Nothing is stored, and no engine is needed. Exit code
    0: success; 2: wrong use, no such trace, or not a trace.

    \b
    Examples:
      tierkv replay trace.jsonl.gz
      tierkv replay trace.jsonl --capacity 10k --capacity 100k --chunk-bytes 2MiB
      tierkv replay trace.jsonl --policy lru --policy arc --json | jq '.results[] | .hit_percent'
      tierkv replay trace.jsonl --html replay.html
      tierkv replay trace.jsonl --stack stack.toml --stack larger.toml --chunk-bytes 2MiB
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    registry = load_plugins()
    if stacks:
        _check_stack_options(capacities, policies, chunk_bytes)
        replay_stacks(trace, stacks, registry, chunk_bytes or 0, chunks_max, units_per_s, html, as_json=as_json)
        return
    names = list(dict.fromkeys(policies)) or sorted(registry.policies)
    for name in names:
        registry.require_policy(name)
    requests = _requests(trace, chunks_max, units_per_s)
    distinct = _count_distinct(requests)
    sizes = sorted(set(capacities)) or sorted({max(1, round(share * distinct)) for share in DEFAULT_SHARES})
    results: dict[str, dict[int, Replayed]] = {}
    with progress_bar() as progress:
        task = progress.add_task("replaying", total=len(sizes) * (len(names) + 2))
        for size, name, played in _played(registry, names, requests, sizes, distinct):
            results.setdefault(name, {})[size] = played
            progress.advance(task)
    if html is not None:
        write_page(policies_page(trace, _facts(requests, distinct), results, (BOUND, FLOOR)), html)
    if as_json:
        print_json(_as_json(trace, requests, distinct, results, chunk_bytes))
    else:
        _print(requests, distinct, results, chunk_bytes)


def _check_stack_options(capacities: Sequence[int], policies: Sequence[str], chunk_bytes: int | None) -> None:
    if capacities or policies:
        raise click.UsageError("--stack has its own capacities and policies: leave --capacity and --policy out")
    if chunk_bytes is None:
        raise click.UsageError(
            "--stack needs the size of a chunk, since capacities are in bytes: add --chunk-bytes, such as 2MiB"
        )


def _requests(path: Path, chunks_max: int, units_per_s: float) -> list[TraceRequest]:
    """Requests of a trace, up to the bound on chunks."""
    requests: list[TraceRequest] = []
    chunks = 0
    for request in read_trace(path, units_per_s):
        chunks += len(request.keys)
        if chunks > chunks_max:
            require_requests(path, len(requests), chunks_max)
            click.echo(cut_notice(len(requests)), err=True)
            break
        requests.append(request)
    warn_of_seconds(len(requests), requests[0].at_s, requests[-1].at_s, units_per_s)
    return requests


def _count_distinct(requests: Sequence[TraceRequest]) -> int:
    """Return the number of different chunks, and warn of ids that identify a chunk alone."""
    numbers: dict[Key, int] = {}
    chunks, starts = array("I"), array("Q", [0])
    for request in requests:
        chunks.extend([numbers.setdefault(key, len(numbers)) for key in request.keys])
        starts.append(len(chunks))
    warn_of_misplaced(chunks, starts)
    return len(numbers)


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


def _facts(requests: Sequence[TraceRequest], distinct: int) -> str:
    asked = sum(len(request.keys) for request in requests)
    return f"{len(requests):,} requests ask for {asked:,} chunks, {distinct:,} of them different."


def _print(
    requests: Sequence[TraceRequest],
    distinct: int,
    results: Mapping[str, Mapping[int, Replayed]],
    chunk_bytes: int | None,
) -> None:
    sizes = list(next(iter(results.values())))
    heads = [f"{size:,}" + (f" ({round_size(size * chunk_bytes)})" if chunk_bytes else "") for size in sizes]
    hits = [[name, *(f"{by_size[size].hit_percent:.1f}" for size in sizes)] for name, by_size in results.items()]
    writes = [[name, *(f"{by_size[size].writes:,}" for size in sizes)] for name, by_size in results.items()]
    click.echo(_facts(requests, distinct))
    print_table("found, %, by capacity in chunks", ("policy", *heads), hits)
    print_table("chunks written, by capacity in chunks", ("policy", *heads), writes)
