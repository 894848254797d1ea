"""``tierkv rm`` and ``tierkv gc``: remove chosen chunks, or the oldest ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from tierkv.abc import StoredNamespace
from tierkv.cli.stores.missing_keys import report_missing
from tierkv.cli.stores.output import Report, counted, counted_namespaces, fields_of, name_of, progress
from tierkv.cli.stores.target import (
    AGE,
    KEY,
    PlaceChoice,
    chunk_filter,
    find_target,
    need_match,
    place_options,
    tenant_option,
)
from tierkv.config import parse_size
from tierkv.errors import TierKVError
from tierkv.stores.findings import Finding, FindingKind, Progress
from tierkv.stores.places import Place
from tierkv.stores.removal import (
    Removed,
    chosen_frames,
    collect,
    finish_removals,
    give_up_room,
    plan_collection,
    refusal,
    remove_chunks,
    remove_namespace,
)
from tierkv.stores.selection import ChunkFilter
from tierkv.stores.store import Store
from tierkv.types.keys import Tenant
from tierkv.types.sizes import round_size

_DRY_RUN = click.option("--dry-run", is_flag=True, help="Change nothing; show what would go.")
_YES = click.option("--yes", is_flag=True, help="Do not ask.")


@click.command()
@click.argument("place")
@click.option(
    "--key",
    "keys",
    type=KEY,
    multiple=True,
    help="Only this chunk: a whole key in hex, or hash.group as a record has it. May be repeated.",
)
@click.option("--older-than", "older_than_s", type=AGE, help="Only chunks written longer ago, such as 7d.")
@click.option("--unused-for", "unused_for_s", type=AGE, help="Only namespaces that no process has opened for so long.")
@click.option("--all", "everything", is_flag=True, help="All chunks of all namespaces.")
@_DRY_RUN
@_YES
@tenant_option
@place_options
@click.pass_context
def rm(  # noqa: PLR0913 - click passes each option
    ctx: click.Context,
    *,
    place: str,
    keys: tuple[str, ...],
    older_than_s: float | None,
    unused_for_s: float | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
    tenant: Tenant | None,
    choice: PlaceChoice,
    as_json: bool,
) -> None:
    """Remove chunks at PLACE: of a model, a tenant, an age, or single ones.

    Choices combine: a chunk goes if all of them match. A namespace that is chosen whole goes with its files. A disk or
    LMDB tier that an engine has open refuses, and says which process that is; chunks of an object store go while
    engines use it, and become misses. Exit code 1: something was left, or no chunk has any of the keys.

    \b
    Examples:
      tierkv rm stack.toml -n old-model --dry-run
      tierkv rm s3://bucket/kv --older-than 30d --yes
      tierkv rm stack.toml --tier disk --tenant "$SALT"
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    chosen = chunk_filter(tenant, older_than_s, keys)
    if chosen.is_open and not choice.names and unused_for_s is None and not everything:
        raise click.UsageError(
            "choose what to remove: --namespace, --tenant, --older-than, --unused-for or --key; or --all", ctx
        )
    target = find_target(place, choice, unused_for_s=unused_for_s, may_be_empty=True)
    report = Report(as_json=as_json)
    report.add(target.findings)
    finished_bytes = 0 if dry_run else _finish_removals(target.places, report)
    if not finished_bytes:
        need_match(place, choice, target)
    _confirm(ctx, [f"{at.name}: {name_of(stored)}" for at, stored in target.stores], skip=dry_run or yes)
    sums = Removed()
    with progress("removing") as advance:
        for at, stored in target.stores:
            try:
                report.add(_remove(at, stored, chosen, sums, dry_run=dry_run, advance=advance))
            except TierKVError as error:
                report.add([refusal(at, stored, error)])
    report.add(_unknown_ages(sums, place))
    missing, fields = report_missing(report, place, chosen, sums.named)
    done = "would be removed" if dry_run else "removed"
    sentence = f"{counted(sums.chunks, sums.frame_bytes)} {done}"
    sentence += f", and the files of {counted_namespaces(sums.namespaces)}" if sums.namespaces else ""
    sentence += f"; {round_size(finished_bytes)} that a killed removal had left" if finished_bytes else ""
    fields["finished_bytes"] = finished_bytes
    report.end(ctx, sentence + missing, place=place, dry_run=dry_run, **fields_of(sums), **fields)


def _finish_removals(places: list[Place], report: Report) -> int:
    """Remove files of killed removals. Returns their bytes."""
    done = list(finish_removals(places))
    report.add([each for each in done if isinstance(each, Finding)])
    return sum(each for each in done if isinstance(each, int))


def _remove(  # noqa: PLR0913 - what to remove, and how
    at: Place, stored: StoredNamespace, chosen: ChunkFilter, sums: Removed, *, dry_run: bool, advance: Progress
) -> Iterator[Finding]:
    if dry_run and stored.in_use_by is not None:
        yield _in_use(at, stored)
    elif chosen.is_open:
        yield from remove_namespace(at, stored, sums, dry_run=dry_run, progress=advance)
    else:
        with Store(at, stored.namespace, writes=not dry_run, is_upkeep=True) as store:
            yield from remove_chunks(store, chosen_frames(store, chosen, sums), sums, dry_run=dry_run, progress=advance)


def _in_use(at: Place, stored: StoredNamespace) -> Finding:
    reason = f"{stored.in_use_by} has it open, so nothing would be removed: stop it first"
    return refusal(at, stored, TierKVError(reason))


def _unknown_ages(sums: Removed, place: str) -> list[Finding]:
    if not sums.unknown_age:
        return []
    reason = (
        f"{sums.unknown_age} chunks were kept: their backend does not know when a chunk was stored. Choose whole "
        "namespaces with --unused-for, or use `tierkv gc --to SIZE`, which removes the oldest first"
    )
    return [Finding(FindingKind.INCOMPLETE, place, "", "age", reason)]


def _confirm(ctx: click.Context, lines: list[str], *, skip: bool) -> None:
    if skip or not lines:
        return
    for line in lines:
        click.echo(f"  {line}", err=True)
    if not sys.stdin.isatty():
        raise click.UsageError("chunks of these namespaces go: confirm with --yes, or look first with --dry-run", ctx)
    click.confirm("Remove chunks of these namespaces?", abort=True, err=True)


@click.command()
@click.argument("place")
@click.option("--to", "to_size", metavar="SIZE", help="Bytes of frames that may stay, such as 100GiB.")
@click.option("--older-than", "older_than_s", type=AGE, help="Remove chunks written longer ago, such as 30d.")
@click.option(
    "--shrink",
    is_flag=True,
    help="Give free room at the ends of a disk tier's files back to the file system as well. No chunk goes with it.",
)
@_DRY_RUN
@_YES
@place_options
@click.pass_context
def gc(  # noqa: PLR0913 - click passes each option
    ctx: click.Context,
    *,
    place: str,
    to_size: str | None,
    older_than_s: float | None,
    shrink: bool,
    dry_run: bool,
    yes: bool,
    choice: PlaceChoice,
    as_json: bool,
) -> None:
    """Remove the oldest chunks at PLACE, down to a size or an age.

    The size counts for all chosen namespaces of one tier together. The age of a chunk is the time since its last write.
    A backend that does not know it (disk, LMDB) removes the namespaces that were not used for longest first, and within
    one the chunks in the order in which they were written. Exit code 1: something was left.

    \b
    Examples:
      tierkv gc stack.toml --tier disk --to 200GiB --dry-run
      tierkv gc s3://bucket/kv --older-than 30d --yes
      tierkv gc /var/cache/tierkv --to 50GiB --shrink --yes
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    if (to_size is None) == (older_than_s is None):
        raise click.UsageError("give --to SIZE or --older-than AGE, one of them", ctx)
    to_bytes = None if to_size is None else _size(ctx, to_size)
    target = find_target(place, choice)
    report = Report(as_json=as_json)
    report.add(target.findings)
    _confirm(ctx, [f"{at.name}: {name_of(stored)}" for at, stored in target.stores], skip=dry_run or yes)
    sums = Removed()
    with progress("removing") as advance:
        for at in target.places:
            stores = [each for each in target.stores if each[0] is at]
            report.add(_collected(stores, to_bytes, older_than_s, sums, dry_run=dry_run, advance=advance))
        given_up = sum(_shrunk(at, stored, report) for at, stored in target.stores) if shrink and not dry_run else 0
    report.add(_unknown_ages(sums, place))
    done = "would be removed" if dry_run else "removed"
    sentence = f"{counted(sums.chunks, sums.frame_bytes)} {done}"
    if shrink and not dry_run:
        sentence += f"; {round_size(given_up)} of files given back"
        if given_up < sums.frame_bytes:
            sentence += (
                ", the rest stays between chunks, for new ones: `tierkv copy` to a new place makes files without it"
            )
    report.end(ctx, sentence, place=place, dry_run=dry_run, given_up_bytes=given_up, **fields_of(sums))


def _size(ctx: click.Context, text: str) -> int:
    try:
        return 0 if text.strip() == "0" else parse_size(text if not text.isdigit() else int(text))
    except ValueError as error:
        raise click.UsageError(f"--to {text}: {error}", ctx) from error


def _collected(  # noqa: PLR0913 - what to remove, and how
    stores: list[tuple[Place, StoredNamespace]],
    to_bytes: int | None,
    older_than_s: float | None,
    sums: Removed,
    *,
    dry_run: bool,
    advance: Progress,
) -> Iterator[Finding]:
    if to_bytes is None:
        chosen = chunk_filter(None, older_than_s)
        for at, stored in stores:
            try:
                yield from _remove(at, stored, chosen, sums, dry_run=dry_run, advance=advance)
            except TierKVError as error:
                yield refusal(at, stored, error)
        return
    try:
        plan = plan_collection(stores, to_bytes)
    except TierKVError as error:
        at = stores[0][0]
        reason = f"nothing was removed, since not all of it can be counted: {error}"
        yield Finding(FindingKind.UNUSABLE, at.name, "", at.where, reason)
        return
    for at, stored in stores if plan.last_bytes else []:
        if dry_run and stored.in_use_by is not None:
            yield _in_use(at, stored)
            continue
        try:
            yield from collect(at, stored, plan, sums, dry_run=dry_run, progress=advance)
        except TierKVError as error:
            yield refusal(at, stored, error)


def _shrunk(at: Place, stored: StoredNamespace, report: Report) -> int:
    try:
        return give_up_room(at, stored) or 0
    except TierKVError as error:
        report.add([refusal(at, stored, error)])
        return 0
