"""``tierkv plan``: which stack should I buy?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from rich.progress import Progress, TaskID

from tierkv.cli.output import print_json
from tierkv.cli.pages import HTML_OPTION, write_page
from tierkv.cli.planning.options import (
    CHUNKS_MAX_OPTION,
    TIMESTAMPS_OPTION,
    WHENCE_CHUNK_BYTES,
    ChunkCount,
    PriceOf,
    Size,
    SpeedOf,
    cut_notice,
    progress_bar,
    warn_of_misplaced,
    warn_of_seconds,
)
from tierkv.cli.planning.plan_output import as_json, print_plan
from tierkv.cli.planning.plan_page import plan_page
from tierkv.cli.values import FiniteRange, WholeRange
from tierkv.config.loading import load_config
from tierkv.config.resolving import ResolvedStack, resolve
from tierkv.planning.assumptions import Assumptions, TierSpeed
from tierkv.planning.plan import make_plan
from tierkv.planning.prompts import infer_chunk_tokens
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry
from tierkv.replay.trace import load_trace

PREFILL_MIN = 0.001
"""Smallest rate of a prefill, in tokens per second: a machine that is slower would serve nothing."""


@click.command("plan")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--stack",
    "stacks",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Description of a stack to compare; may be given several times.",
)
@click.option(
    "--prefill",
    type=FiniteRange(min=PREFILL_MIN),
    required=True,
    help="Prompt tokens that one engine computes per second.",
)
@click.option(
    "--chunk-bytes",
    type=Size(WHENCE_CHUNK_BYTES),
    required=True,
    help="Bytes of KV per chunk of the trace: 64MiB. `tierkv trace` prints that of your own traffic.",
)
@click.option(
    "--chunk-tokens", type=ChunkCount(), help="Tokens per chunk. Default: what fits the lengths in the trace."
)
@click.option(
    "--engines",
    type=WholeRange(min=1),
    help="Engines for the times to the first token. Default: as many as are needed without a cache.",
)
@click.option(
    "--speed",
    "speeds",
    type=SpeedOf(),
    multiple=True,
    help="Speed of reads from a tier or backend: disk=3GB, or with the time to the first byte: objects=1GB,20ms. "
    "Default: host=20GB,0.2ms, 2.5GB,1ms for local and 1GB,30ms for shared tiers.",
)
@click.option(
    "--price",
    "prices",
    type=PriceOf(),
    multiple=True,
    help="Price per GiB of a tier or backend, or of an engine, in any currency: host=3.5, disk=0.08, engine=30000.",
)
@click.option("--more", type=Size(), help="Room to add to each tier in turn: 4TiB. Default: as much as the tier has.")
@CHUNKS_MAX_OPTION
@TIMESTAMPS_OPTION
@HTML_OPTION
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def plan_command(  # noqa: PLR0913 - one argument per option
    *,
    trace: Path,
    stacks: Sequence[Path],
    prefill: float,
    chunk_bytes: int,
    chunk_tokens: int | None,
    engines: int | None,
    speeds: Sequence[tuple[str, TierSpeed]],
    prices: Sequence[tuple[str, float]],
    more: int | None,
    chunks_max: int,
    units_per_s: float,
    html: Path | None,
    is_json: bool,
) -> None:
    """Compare what stacks would save and cost on the requests of TRACE.

    TRACE: as for `tierkv replay`; `tierkv trace` makes one of your own traffic. For each stack: hits by tier, and those
    that are slower to load than to compute; seconds of computation and engines saved; times to the first token; bytes
    read and written, with the peak minute, and drive writes per day; the tenant with the fewest hits; the price; and
    what more room in a tier would bring. Stacks of LRU tiers are answered for all sizes at once; others serve the trace
    by their real scheduler, manager and policies. The output ends with what the plan leaves out. Exit code 0: success;
    2: wrong use, no such trace, or not a trace.

    \b
    Examples:
      tierkv plan trace.jsonl --stack small.toml --stack large.toml --prefill 8000 --chunk-bytes 64MiB
      tierkv plan trace.jsonl --stack a.toml --prefill 8000 --chunk-bytes 64MiB --more 4TiB --html plan.html
      tierkv plan trace.jsonl --stack a.toml --prefill 8000 --chunk-bytes 64MiB \\
        --price host=3.5 --price disk=0.08 --price engine=30000 --speed disk=6GB,0.2ms --json
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    registry = load_plugins()
    resolved = {name: _resolved(path, registry) for name, path in _names(stacks).items()}
    with progress_bar() as progress:
        reading = progress.add_task("reading", total=None)
        requests = load_trace(trace, chunks_max, lambda done: progress.update(reading, completed=done), units_per_s)
        progress.update(reading, total=len(requests))
        if requests.is_cut:
            click.echo(cut_notice(len(requests)), err=True)
        warn_of_misplaced(requests.chunks, requests.starts)
        warn_of_seconds(len(requests), requests.at_s[0], requests.at_s[-1], units_per_s)
        tokens = chunk_tokens or infer_chunk_tokens(requests)
        assumed = Assumptions(prefill, tokens, chunk_bytes, engines, dict(speeds), dict(prices), more)
        tasks: dict[str, TaskID] = {}
        plan = make_plan(requests, resolved, registry, assumed, partial(_show, progress, tasks, len(requests)))
    if html is not None:
        write_page(plan_page(str(trace), plan), html)
    if is_json:
        print_json({"trace": str(trace), **as_json(plan)})
    else:
        print_plan(plan)


def _show(progress: Progress, tasks: dict[str, TaskID], total: int, name: str, done: int) -> None:
    """Show the progress of one replay."""
    if name not in tasks:
        tasks[name] = progress.add_task(name, total=total)
    progress.update(tasks[name], completed=done)


def _names(stacks: Sequence[Path]) -> dict[str, Path]:
    """Name each stack after its file; by the whole path where two files have one name."""
    different = list(dict.fromkeys(stacks))
    stems = [path.stem for path in different]
    return {path.stem if stems.count(path.stem) == 1 else str(path): path for path in different}


def _resolved(path: Path, registry: PluginRegistry) -> ResolvedStack:
    return resolve(load_config(path), registry, str(path))
