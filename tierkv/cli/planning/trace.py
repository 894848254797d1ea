"""``tierkv trace``: the requests in a record as a trace, for ``tierkv replay`` and ``tierkv plan``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import click

from tierkv.errors import ConfigError
from tierkv.recording.as_trace import RecordedTrace, trace_of
from tierkv.recording.reading import read_entries
from tierkv.types.sizes import round_size

_OTHER_COMPRESSIONS = frozenset((".bz2", ".lz4", ".xz", ".zip", ".zst"))
"""Endings of names that promise what this command cannot write."""


@click.command("trace")
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File for the trace; compressed if it ends with .gz. Default: standard output.",
)
def trace_command(*, record: Path, output: Path | None) -> None:
    """Turn the requests in RECORD into a trace that `tierkv replay` and `tierkv plan` read.

    RECORD: the file that a stack's description names under `record.path`; older files of it are included. A line of the
    trace has time, tenant, session, hints, lengths and chunks of one request, and none of its text. Exit code 0:
    success; 2: wrong use, no such record, or no request in it.

    \b
    Examples:
      tierkv trace run.jsonl > trace.jsonl
      tierkv trace run.jsonl --output trace.jsonl.gz
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    trace = trace_of(read_entries(record))
    if not trace.lines:
        raise ConfigError(f"{record}: no request is in this record; a stack writes it with each first lookup")
    lines = (json.dumps(line, separators=(",", ":")) for line in trace.lines)
    if output is None:
        for line in lines:
            click.echo(line)
    else:
        if output.suffix in _OTHER_COMPRESSIONS:
            raise ConfigError(
                f"--output {output}: {output.suffix} is not written; end the name with .jsonl or .jsonl.gz"
            )
        _write(output, lines)
    click.echo(_summary(trace), err=True)


def _write(output: Path, lines: Iterable[str]) -> None:
    try:
        with (
            gzip.open(output, "wt", encoding="utf-8")
            if output.suffix == ".gz"
            else output.open("w", encoding="utf-8") as file
        ):
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ConfigError(
            f"--output {output}: {error.strerror or error}; name a file in a folder that exists and may be written to"
        ) from error


def _summary(trace: RecordedTrace) -> str:
    parts = [f"{len(trace.lines):,} requests."]
    if trace.chunk_tokens and trace.chunk_bytes:
        tokens, size = ", ".join(map(str, sorted(trace.chunk_tokens))), max(trace.chunk_bytes)
        parts.append(
            f"A chunk has {tokens} tokens and {size} bytes ({round_size(size)}): "
            f"give --chunk-tokens {max(trace.chunk_tokens)} --chunk-bytes {size} to `tierkv plan`."
        )
    if len(trace.chunk_tokens) > 1:
        parts.append("The record has stacks with chunks of different lengths: their requests share no chunk.")
    if trace.cut:
        parts.append(f"Of {trace.cut:,} requests only the front is in the record.")
    if trace.lost:
        parts.append(f"{trace.lost:,} entries were lost, because the disk was slow.")
    return " ".join(parts)
