"""``tierkv ls`` and ``tierkv du``: what is stored where, by model, tenant, group, age or codec."""

from __future__ import annotations

import json
import time
from typing import Any

import click
from rich.text import Text

from tierkv.abc import DamagedEntry, StoredNamespace
from tierkv.cli.output import BAD, Cell, print_table, visible
from tierkv.cli.stores.output import Report, ago, counted, counted_namespaces, name_of, progress
from tierkv.cli.stores.target import PlaceChoice, Target, find_target, not_opened, place_options
from tierkv.errors import TierKVError
from tierkv.stores.findings import Finding, FindingKind, Progress
from tierkv.stores.places import Place
from tierkv.stores.selection import tenant_text
from tierkv.stores.store import Store
from tierkv.stores.summaries import GROUPINGS, Summary, Usage, add_usage, summarise
from tierkv.types.sizes import round_size


@click.command()
@click.argument("place")
@click.option("--chunks", is_flag=True, help="One line per chunk, as it is read; with --json one object per line.")
@place_options
@click.pass_context
def ls(
    ctx: click.Context,
    *,
    place: str,
    chunks: bool,
    choice: PlaceChoice,
    as_json: bool,
) -> None:
    """List the namespaces at PLACE: model, chunks, bytes, codecs, ages.

    PLACE is a stack file (all of its lower tiers), the path or URL of one tier, or an export folder. It is read beside
    a running engine; a backend that cannot do that says which process has it open. Exit code 1: something could not be
    listed.

    \b
    Examples:
      tierkv ls stack.toml
      tierkv ls s3://bucket/kv --json | jq '.namespaces[] | [.model, .chunks]'
      tierkv ls /var/cache/tierkv -n 'llama*' --chunks
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    target = find_target(place, choice)
    report = Report(as_json=as_json)
    report.add(target.findings)
    if chunks:
        _list_chunks(target, report, as_json=as_json)
        ctx.exit(1 if report.findings else 0)
    with progress("listing") as advance:
        summaries = [summarise(at, stored, progress=advance) for at, stored in target.stores]
    report.add(finding for each in summaries for finding in _problems(each))
    if not as_json and summaries:
        columns = (
            "tier",
            "model",
            "namespace",
            "chunks",
            "bytes",
            "on disk",
            "codec",
            "written",
            "last used",
            "open in",
        )
        print_table(place, columns, [_row(each) for each in summaries])
    chunks_sum, bytes_sum = sum(each.chunks for each in summaries), sum(each.frame_bytes for each in summaries)
    different = len({stored.namespace.fingerprint() for _, stored in target.stores})
    by_tier = {each.name: sum(at is each for at, _ in target.stores) for each in target.places}
    total = {"namespaces": different, "namespaces_by_tier": by_tier, "chunks": chunks_sum, "frame_bytes": bytes_sum}
    tiers = ", ".join(f"{count:,} in {name}" for name, count in by_tier.items())
    sentence = counted_namespaces(different) + (f" ({tiers})" if len(by_tier) > 1 else "")
    sentence += f", {counted(chunks_sum, bytes_sum)}" + (" in all tiers together" if len(by_tier) > 1 else "")
    report.end(ctx, sentence, place=place, namespaces=[_as_json(each) for each in summaries], total=total)


def _problems(summary: Summary) -> list[Finding]:
    fingerprint, name = summary.stored.namespace.fingerprint().hex(), summary.place.name
    found = []
    if summary.error:
        found.append(Finding(FindingKind.UNUSABLE, name, fingerprint, summary.stored.namespace.model, summary.error))
    if summary.damaged:
        reason = f"{summary.damaged} damaged entries; `tierkv verify` names them"
        found.append(Finding(FindingKind.DAMAGED, name, fingerprint, summary.stored.namespace.model, reason))
    return found


def _row(summary: Summary) -> list[Cell]:
    stored = summary.stored
    times = "unknown"
    if summary.oldest_s is not None:
        oldest, newest = ago(summary.oldest_s), ago(summary.newest_s)
        times = newest if oldest == newest else f"{oldest} to {newest}"
    is_known = not summary.error
    return [
        summary.place.name,
        Text(name_of(stored), "bold"),
        stored.namespace.fingerprint().hex()[:8],
        f"{summary.chunks:,}" if is_known else Text("unknown", BAD),
        round_size(summary.frame_bytes) if is_known else "",
        "unknown" if stored.held_bytes is None else round_size(stored.held_bytes),
        ", ".join(summary.codecs),
        times,
        ago(stored.last_used_s),
        stored.in_use_by or "",
    ]


def _as_json(summary: Summary) -> dict[str, Any]:
    stored = summary.stored
    return {
        "tier": summary.place.name,
        "where": summary.place.where,
        "model": stored.namespace.model,
        "fingerprint": stored.namespace.fingerprint().hex(),
        "chunks": None if summary.error else summary.chunks,
        "frame_bytes": None if summary.error else summary.frame_bytes,
        "held_bytes": stored.held_bytes,
        "damaged": summary.damaged,
        "codecs_sampled": summary.codecs,
        "oldest_s": summary.oldest_s,
        "newest_s": summary.newest_s,
        "last_used_s": stored.last_used_s,
        "in_use_by": stored.in_use_by,
        "namespace": stored.namespace.describe(),
    }


def _list_chunks(target: Target, report: Report, *, as_json: bool) -> None:
    for at, stored in target.stores:
        try:
            with Store(at, stored.namespace, writes=False) as store:
                for entry in store.list_frames():
                    if isinstance(entry, DamagedEntry):
                        reason = (FindingKind.DAMAGED, at.name, stored.namespace.fingerprint().hex())
                        report.add([Finding(*reason, entry.where, entry.reason)])
                        continue
                    row = {
                        "tier": at.name,
                        "model": stored.namespace.model,
                        "key": (entry.key or b"").hex(),
                        "tenant": tenant_text(entry.key or b""),
                        "frame_bytes": entry.frame_bytes,
                        "stored_at_s": entry.stored_at_s,
                    }
                    click.echo(json.dumps(row) if as_json else _chunk_line(row))
        except TierKVError as error:
            report.add([not_opened(at, stored, error)])


def _chunk_line(row: dict[str, Any]) -> str:
    at = row["stored_at_s"]
    when = "unknown" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    of = f"{row['tenant']:<19}  {row['tier']}  {visible(row['model'])}"
    return f"{row['key']}  {row['frame_bytes']:>10}  {when:<19}  {of}"


@click.command()
@click.argument("place")
@click.option(
    "--by",
    type=click.Choice(GROUPINGS),
    default="namespace",
    show_default=True,
    help="What to add up by. A codec costs a read of every chunk; a tenant or group costs a request per object in an "
    "object store.",
)
@place_options
@click.pass_context
def du(
    ctx: click.Context,
    *,
    place: str,
    by: str,
    choice: PlaceChoice,
    as_json: bool,
) -> None:
    """Add up the chunks and bytes at PLACE.

    PLACE is as for `tierkv ls`. Bytes are those of the frames; `tierkv ls` also shows what their files take. The age of
    a chunk is the time since its last write, as far as the backend knows it (object stores and export folders do; disk
    and LMDB tiers do not).

    \b
    Examples:
      tierkv du stack.toml --by tenant
      tierkv du s3://bucket/kv --by age --json
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    target = find_target(place, choice)
    report = Report(as_json=as_json)
    report.add(target.findings)
    rows: list[dict[str, Any]] = []
    with progress("counting") as advance:
        for at in target.places:
            usage = Usage()
            for _, stored in [each for each in target.stores if each[0] is at]:
                report.add(_count(at, stored, usage, by, advance))
            rows += [
                {"tier": at.name, by: label, "chunks": usage.chunks[label], "frame_bytes": size}
                for label, size in usage.frame_bytes.most_common()
            ]
    if not as_json:
        cells = [
            (each["tier"], visible(each[by]), f"{each['chunks']:,}", round_size(each["frame_bytes"])) for each in rows
        ]
        print_table(place, ("tier", by, "chunks", "bytes"), cells)
    total = counted(sum(each["chunks"] for each in rows), sum(each["frame_bytes"] for each in rows))
    report.end(ctx, total, place=place, by=by, usage=rows)


def _count(at: Place, stored: StoredNamespace, usage: Usage, by: str, advance: Progress) -> list[Finding]:
    try:
        with Store(at, stored.namespace, writes=False) as store:
            add_usage(store, usage, by, time.time(), progress=advance)
    except TierKVError as error:
        return [not_opened(at, stored, error)]
    return []
