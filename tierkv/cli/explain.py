"""``tierkv explain``: show the events of a chunk or a request from the record of a stack."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import click

from tierkv.cli.output import print_json
from tierkv.recording.entries import Entry, matches
from tierkv.recording.reading import (
    EntryFilter,
    FailureFilter,
    KeyFilter,
    RequestFilter,
    filter_entries,
    follow_entries,
    last_entries,
    read_entries,
    similar_names,
)
from tierkv.recording.rendering import entry_line, explain_losses

KEY_DIGITS_MIN = 4
LINES = 200
ENTRIES_MAX = 100_000
"""Largest number of shown entries; the last ones are kept."""


@click.command()
@click.option(
    "--record",
    "path",
    type=click.Path(path_type=Path),
    required=True,
    help="File that the stack's configuration names in `record.path`. It may be in use.",
)
@click.option("--key", help="A chunk: its key in hex, or as written in the record; the first digits are enough.")
@click.option("--request", "request_id", help="A request, by its id in the engine.")
@click.option("--last-failures", is_flag=True, help="Recent failures: frames, reads, writes, copies, tiers.")
@click.option(
    "--lines",
    type=click.IntRange(min=1),
    default=LINES,
    show_default=True,
    help="Largest number of lines; the last ones are shown.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --follow, one per line.")
@click.option("--follow", "follows", is_flag=True, help="Continue with new events until interrupted.")
@click.pass_context
def explain(  # noqa: PLR0913 - one parameter per option
    ctx: click.Context,
    *,
    path: Path,
    key: str | None,
    request_id: str | None,
    last_failures: bool,
    lines: int,
    as_json: bool,
    follows: bool,
) -> None:
    """Show the events of a chunk or a request: lookups, waits, the tiers that served it, and losses.

    Needs a stack with a record: `path = "..."` in the section `[record]` of its configuration. Exit code 0: events were
    shown; 1: the record has no such chunk or request; 2: wrong use, or no such record.

    \b
    Examples:
      tierkv explain --record run.jsonl --request chatcmpl-17
      tierkv explain --record run.jsonl --key 5bb0ec31 --json | jq .summary
      tierkv explain --record run.jsonl --last-failures --follow
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    if (key is not None) + (request_id is not None) + last_failures != 1:
        raise click.UsageError("give one of --key, --request and --last-failures", ctx)
    selection, is_selected = _selection(key, request_id)
    if follows:
        _follow(path, selection, is_selected, as_json=as_json)
        return
    entries = last_entries(read_entries(path), selection, ENTRIES_MAX)
    unknown = _unknown(selection)
    if unknown:
        click.echo(unknown, err=True)
        ctx.exit(1)
    summary = list(explain_losses(entries, is_selected)) if isinstance(selection, KeyFilter) else []
    if as_json:
        print_json({"record": str(path), "entries": entries[-lines:], "summary": summary})
        return
    if len(entries) > lines:
        click.echo(f"({len(entries) - lines} earlier lines are omitted: --lines)")
    for entry in entries[-lines:]:
        click.echo(entry_line(entry, is_selected))
    for line in summary:
        click.echo(line)
    if not entries:
        click.echo("The record has no failures.")


def _selection(key: str | None, request_id: str | None) -> tuple[EntryFilter, Callable[[str], bool]]:
    if key is not None:
        wanted = key.strip().lower()
        if not re.fullmatch(rf"[0-9a-f]{{{KEY_DIGITS_MIN},}}(\.\d+)?", wanted):
            raise click.BadParameter(
                f"{key!r}: give at least {KEY_DIGITS_MIN} hexadecimal digits, optionally a dot and the group, such as "
                "5bb0ec31 or 5bb0ec31.0",
                param_hint="--key",
            )
        return KeyFilter(wanted), lambda short: matches(short, wanted)
    if request_id is not None:
        return RequestFilter(request_id), lambda _: False
    return FailureFilter(), lambda _: False


def _unknown(selection: EntryFilter) -> str:
    """Message where the record has no such chunk or request, or several of them; otherwise an empty string."""
    if isinstance(selection, KeyFilter):
        hashes = sorted({short.partition(".")[0] for short in selection.found})
        if len(hashes) > 1:
            return f"{len(hashes)} chunks begin with {selection.key}: {_some(hashes)}. Give more digits."
        if not hashes:
            return _nothing_of("chunk", selection.key, selection.known)
    if isinstance(selection, RequestFilter) and not selection.is_known:
        return _nothing_of("request", selection.request_id, selection.known)
    return ""


def _nothing_of(what: str, name: str, known: dict[str, None]) -> str:
    near = similar_names(name, known)
    like = f" Nearest: {_some(near)}." if near else ""
    return f"The record has no {what} {name}; it has {len(known)} others.{like}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")  # noqa: PLR2004 - as many as fit a line


def _follow(path: Path, selection: EntryFilter, is_selected: Callable[[str], bool], *, as_json: bool) -> None:
    try:
        for entry in filter_entries(follow_entries(path, time.sleep), selection):
            click.echo(_line(entry, is_selected, as_json=as_json))
    except KeyboardInterrupt:
        return


def _line(entry: Entry, is_selected: Callable[[str], bool], *, as_json: bool) -> str:
    return json.dumps(entry) if as_json else entry_line(entry, is_selected)
