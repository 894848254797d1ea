"""Output of the commands on stores: findings as they come, progress, sizes and ages in words."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tierkv.abc import StoredNamespace
from tierkv.cli.output import BAD, console, print_json, visible
from tierkv.stores.findings import Finding
from tierkv.stores.findings import Progress as Advance
from tierkv.types.sizes import round_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FINDINGS_MAX = 1000
"""Findings in the JSON object; more are counted."""


class Report:
    """Findings of a command: printed as they come, or kept for the JSON object.

    Args:
        as_json: whether the command prints one JSON object.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._rows: list[dict[str, Any]] = []
        self.findings = 0
        """Number of findings so far."""

    def add(self, findings: Iterable[Finding]) -> None:
        """Take findings."""
        for finding in findings:
            self.findings += 1
            if not self._as_json:
                console().print(Text(visible(str(finding)), BAD), soft_wrap=True)
            elif len(self._rows) < FINDINGS_MAX:
                self._rows.append(asdict(finding))

    def end(self, ctx: click.Context, sentence: str, **fields: object) -> None:
        """Print the result, and end the command with 1 if anything was found."""
        if self._as_json:
            left_out = self.findings - len(self._rows)
            print_json({"ok": not self.findings, **fields, "findings": self._rows, "findings_left_out": left_out})
        else:
            click.echo(sentence)
        ctx.exit(1 if self.findings else 0)


def fields_of(sums: DataclassInstance) -> dict[str, Any]:
    """Return the sums of a command as fields of the JSON object, which has no use for their sets of keys."""
    return {name: value for name, value in asdict(sums).items() if not isinstance(value, set)}


@contextmanager
def progress(what: str) -> Iterator[Advance]:
    """Show chunks and bytes on the terminal, if standard error is one."""
    if not sys.stderr.isatty():
        yield lambda _chunks, _bytes: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[chunks]:,} chunks, {task.fields[size]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, chunks=0, size="0 B")
        chunks = size = 0

        def advance(more_chunks: int, more_bytes: int) -> None:
            nonlocal chunks, size
            chunks, size = chunks + more_chunks, size + more_bytes
            bar.update(task, chunks=chunks, size=round_size(size))

        yield advance


def name_of(stored: StoredNamespace) -> str:
    """Name a namespace for a reader: model, its revision and epoch where they say something, share of the model."""
    namespace = stored.namespace
    parts = [namespace.model]
    parts += [f"@{namespace.revision[:12]}"] if namespace.revision else []
    parts += [f" epoch {namespace.epoch}"] if namespace.epoch != "0" else []
    parts += [f" rank {namespace.rank}/{namespace.world_size}"] if namespace.world_size > 1 else []
    parts += [f" replica {namespace.replica}"] if namespace.replica else []
    return visible("".join(parts))


def counted(chunks: int, size: int) -> str:
    """Chunks and bytes in words."""
    return f"{chunks:,} chunk{'' if chunks == 1 else 's'} ({round_size(size)})"


def counted_namespaces(count: int) -> str:
    """Format a number of namespaces."""
    return f"{count:,} namespace{'' if count == 1 else 's'}"


def ago(at_s: float | None) -> str:
    """Age of a time in words; ``unknown`` without one."""
    if at_s is None:
        return "unknown"
    seconds = max(0.0, time.time() - at_s)
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
