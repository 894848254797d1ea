"""Replay of a trace through whole stacks, and its report by tier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from rich.progress import Progress, TaskID

from tierkv.cli.output import print_json, print_table
from tierkv.cli.pages import write_page
from tierkv.cli.planning.options import cut_notice, progress_bar, warn_of_misplaced, warn_of_seconds
from tierkv.cli.planning.replay_page import stacks_page
from tierkv.config.loading import load_config
from tierkv.config.resolving import resolve
from tierkv.plugins.registry import PluginRegistry
from tierkv.replay.stack_player import PlayedStack, play_stack
from tierkv.replay.tenants import TenantHits, tenant_hits
from tierkv.replay.trace import Trace, load_trace
from tierkv.types.sizes import round_size

TENANTS_SHOWN_MAX = 20
"""Tenants in a table: those that ask for most chunks."""


def replay_stacks(  # noqa: PLR0913, PLR0917 - one argument per option
    path: Path,
    stacks: Sequence[Path],
    registry: PluginRegistry,
    chunk_bytes: int,
    chunks_max: int,
    units_per_s: float,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    """Replay a trace through stacks, one after the other, and print the results."""
    resolved = {stack: resolve(load_config(stack), registry, str(stack)) for stack in dict.fromkeys(stacks)}
    trace = load_trace(path, chunks_max, units_per_s=units_per_s)
    if trace.is_cut:
        click.echo(cut_notice(len(trace)), err=True)
    warn_of_misplaced(trace.chunks, trace.starts)
    warn_of_seconds(len(trace), trace.at_s[0], trace.at_s[-1], units_per_s)
    results: dict[Path, PlayedStack] = {}
    with progress_bar() as progress:
        for stack, one in resolved.items():
            task = progress.add_task(stack.name, total=len(trace))
            step = partial(_advance, progress, task)
            results[stack] = play_stack(trace, one, registry, chunk_bytes, step)
    facts = f"{len(trace):,} requests ask for {len(trace.chunks):,} chunks, {trace.num_chunks:,} of them different."
    if html is not None:
        write_page(stacks_page(path, facts, trace, results, chunk_bytes), html)
    if as_json:
        stacks_json = [_as_json(trace, stack, played, chunk_bytes) for stack, played in results.items()]
        print_json({"trace": str(path), **_size_of(trace), "chunk_bytes": chunk_bytes, "stacks": stacks_json})
        return
    click.echo(f"{len(trace):,} requests ask for {len(trace.chunks):,} chunks, {trace.num_chunks:,} of them different.")
    for stack, played in results.items():
        _print(trace, stack, played, chunk_bytes)


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


def _size_of(trace: Trace) -> dict[str, object]:
    size = {"requests": len(trace), "chunks": len(trace.chunks), "distinct_chunks": trace.num_chunks}
    return {**size, "is_cut": trace.is_cut}


def _as_json(trace: Trace, stack: Path, played: PlayedStack, chunk_bytes: int) -> dict[str, object]:
    tiers = [
        {
            "tier": traffic.name,
            "hits": int(hits.sum()),
            "hit_percent": _percent(int(hits.sum()), len(trace.chunks)),
            "chunks_read": traffic.read.total(),
            "chunks_written": traffic.written.total(),
            "chunks_not_written": traffic.not_written,
            "bytes_read": traffic.read.total() * chunk_bytes,
            "bytes_written": traffic.written.total() * chunk_bytes,
        }
        for hits, traffic in zip(played.hits, played.traffic, strict=True)
    ]
    tenants = [
        {"tenant": one.name, "requests": one.requests, "chunks": one.chunks, "hits": one.hits}
        for one in tenant_hits(trace, played)
    ]
    found = int(played.hits.sum())
    total = {"hits": found, "hit_percent": _percent(found, len(trace.chunks))}
    return {"stack": str(stack), **total, "tiers": tiers, "tenants": tenants}


def _print(trace: Trace, stack: Path, played: PlayedStack, chunk_bytes: int) -> None:
    asked = len(trace.chunks)
    rows = [
        [
            traffic.name,
            f"{int(hits.sum()):,}",
            f"{_percent(int(hits.sum()), asked):.1f} %",
            _moved(traffic.read.total(), chunk_bytes),
            _moved(traffic.written.total(), chunk_bytes),
            f"{traffic.not_written:,}",
        ]
        for hits, traffic in zip(played.hits, played.traffic, strict=True)
    ]
    found = int(played.hits.sum())
    rows.append(["all tiers", f"{found:,}", f"{_percent(found, asked):.1f} %", "", "", ""])
    head = ("tier", "chunks found", "of those asked for", "read", "written", "not written")
    print_table(str(stack), head, rows)
    tenants = tenant_hits(trace, played)
    if [one.name for one in tenants] not in ([], [None]):
        print_table(f"{stack}: tenants", ("tenant", "requests", "found"), map(_tenant_row, tenants[:TENANTS_SHOWN_MAX]))


def _tenant_row(tenant: TenantHits) -> list[str]:
    name = "(none)" if tenant.name is None else tenant.name
    return [name, f"{tenant.requests:,}", f"{_percent(tenant.hits, tenant.chunks):.1f} %"]


def _moved(chunks: int, chunk_bytes: int) -> str:
    return f"{chunks:,} ({round_size(chunks * chunk_bytes)})"


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
