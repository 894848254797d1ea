"""``tierkv explain``: show the events of a chunk or a request from the record of a stack."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import click

from tierkv.cli.output import print_json, print_table
from tierkv.cli.values import WholeRange
from tierkv.recording.entries import Entry, matches, without_group
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
from tierkv.recording.waits import STATES, RequestWaits, longest_operation, slowest, waits_of

KEY_DIGITS_MIN = 4
LINES = 200
ENTRIES_MAX = 100_000
"""Largest number of shown entries; the last ones are kept."""


@click.command()
@click.argument("record", type=click.Path(path_type=Path), required=False)
@click.option("--record", "record_option", type=click.Path(path_type=Path), help="The same as RECORD.")
@click.option("--key", help="A chunk: its key in hex, or as written in the record; the first digits are enough.")
@click.option(
    "--request",
    "request_id",
    help="A request, by its id in the engine; or by that of its answer, which vLLM continues.",
)
@click.option("--slowest", "count", type=WholeRange(min=1), help="The requests that waited longest for their load.")
@click.option("--last-failures", is_flag=True, help="Recent failures: frames, reads, writes, copies, tiers.")
@click.option(
    "--lines",
    type=WholeRange(min=1),
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
    record: Path | None,
    record_option: Path | None,
    key: str | None,
    request_id: str | None,
    count: int | None,
    last_failures: bool,
    lines: int,
    as_json: bool,
    follows: bool,
) -> None:
    """Show the events of a chunk or a request: lookups, waits, the tiers that served it, and losses.

    RECORD: the file that the stack's configuration names in `record.path`; it may be in use. A stack has a record with
    `path = "..."` in the section `[record]`. A request ends with a line that says where its time went. Exit code 0:
    events were shown; 1: the record has no such chunk or request; 2: wrong use, or no such record.

    \b
    Examples:
      tierkv explain run.jsonl --slowest 10
      tierkv explain run.jsonl --request chatcmpl-17
      tierkv explain run.jsonl --key 5bb0ec31 --json | jq .summary
      tierkv explain run.jsonl --last-failures --follow
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    if (key is not None) + (request_id is not None) + (count is not None) + last_failures != 1:
        raise click.UsageError("give one of --key, --request, --slowest and --last-failures", ctx)
    path = record or record_option
    if path is None or record_option not in (None, path):
        raise click.UsageError("give one RECORD: the file that the stack's configuration names in record.path", ctx)
    if count is not None:
        if follows:
            raise click.UsageError("--slowest reads the record as it is: leave out --follow", ctx)
        _print_slowest(path, slowest(read_entries(path), count), as_json=as_json)
        return
    selection, is_selected = _selection(key, request_id if request_id is None else _engine_id(path, request_id))
    if follows:
        _follow(path, selection, is_selected, as_json=as_json)
        return
    entries = last_entries(read_entries(path), selection, ENTRIES_MAX)
    if unknown := _unknown(selection):
        click.echo(unknown, err=True)
        if as_json:
            print_json({"record": str(path), "entries": [], "summary": []})
        ctx.exit(1)
    summary = _summary(selection, entries, is_selected)
    if as_json:
        print_json({"record": str(path), "entries": entries[-lines:], "summary": summary})
    else:
        _print_entries(entries, lines, is_selected, summary)


def _summary(selection: EntryFilter, entries: list[Entry], is_selected: Callable[[str], bool]) -> list[str]:
    """Sentences at the end: where a chunk was lost, or where the time of a request went and which operation it took."""
    if isinstance(selection, KeyFilter):
        return list(explain_losses(entries, is_selected))
    if isinstance(selection, RequestFilter):
        sentences = [waits.describe() for waits in waits_of(entries) if waits.seconds]
        longest = longest_operation(entries)
        return [*sentences, longest] if longest else sentences
    return []


def _print_entries(entries: list[Entry], lines: int, is_selected: Callable[[str], bool], summary: list[str]) -> None:
    if len(entries) > lines:
        click.echo(f"({len(entries) - lines} earlier lines are omitted: --lines)")
    for entry in entries[-lines:]:
        click.echo(entry_line(entry, is_selected))
    for line in summary:
        click.echo(line)
    if not entries:
        click.echo("The record has no failures.")


def _engine_id(path: Path, name: str) -> str:
    """Id that the engine has for a request: vLLM appends a number and a random part to the id of the answer."""
    known = dict.fromkeys(entry["r"] for entry in read_entries(path) if "r" in entry)
    longer = [other for other in known if other.startswith(f"{name}-")]
    return longer[0] if name not in known and len(longer) == 1 else name


def _print_slowest(path: Path, found: list[RequestWaits], *, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "request": waits.request_id,
                "first_question_at": waits.first_at,
                "before_compute_s": waits.before_compute_s,
                "seconds": waits.seconds,
                "loaded_tokens": waits.loaded_tokens,
            }
            for waits in found
        ]
        print_json({"record": str(path), "requests": rows})
        return
    waiting = [state for state in STATES if state != "running"]
    columns = ["request", "first question", *(f"{state} ms" for state in waiting), "running ms", "tokens loaded"]
    rows_of = [
        [
            waits.request_id,
            waits.first_at,
            *(f"{1000 * waits.seconds.get(state, 0.0):.1f}" for state in (*waiting, "running")),
            ", ".join(f"{tokens} from {tier}" for tier, tokens in waits.loaded_tokens.items()),
        ]
        for waits in found
    ]
    print_table(f"{path}: the longest waits before the engine could compute", columns, rows_of)


def _selection(key: str | None, request_id: str | None) -> tuple[EntryFilter, Callable[[str], bool]]:
    if key is not None:
        wanted = key.strip().lower()
        if not re.fullmatch(rf"[0-9a-f]{{{KEY_DIGITS_MIN},}}(\.\d+)?(@[0-9a-f]*(\+[0-9a-f]*)?)?", wanted):
            raise click.BadParameter(
                f"{key!r}: give at least {KEY_DIGITS_MIN} hexadecimal digits, optionally a dot and the group, and @ "
                "and digits of the tenant, such as 5bb0ec31, 5bb0ec31.0 or 5bb0ec31@7c1f",
                param_hint="--key",
            )
        return KeyFilter(wanted), lambda short: matches(short, wanted)
    if request_id is not None:
        return RequestFilter(request_id), lambda _: False
    return FailureFilter(), lambda _: False


def _unknown(selection: EntryFilter) -> str:
    """Message where the record has no such chunk or request, or several of them; otherwise an empty string."""
    if isinstance(selection, KeyFilter):
        chunks = sorted(set(map(without_group, selection.found)))
        if len(chunks) > 1:
            more = "Give more digits."
            if len({chunk.partition("@")[0] for chunk in chunks}) == 1:
                more = "Give the tenant too, as shown; @ alone means no tenant."
            return f"{len(chunks)} chunks begin with {selection.key}: {_some(chunks)}. {more}"
        if not chunks:
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
