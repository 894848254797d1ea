"""``tierkv copy`` and ``tierkv warm``: chunks from place to place, and up a stack before its engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

import click

from tierkv.abc import StoredNamespace
from tierkv.abc.places import exists
from tierkv.cli.check import run_check
from tierkv.cli.stores.missing_keys import report_missing, search_stores
from tierkv.cli.stores.output import Report, counted, fields_of, progress
from tierkv.cli.stores.target import (
    PlaceChoice,
    Target,
    chunk_filter,
    find_target,
    not_opened,
    place_options,
    tenant_option,
)
from tierkv.config.reading import SUFFIXES
from tierkv.errors import BackendError, ConfigError, TierKVError
from tierkv.plugins.loading import load_plugins
from tierkv.recording.reading import read_entries
from tierkv.stores.copying import Copied, StoreCopy, fitted, is_nested, is_same_place
from tierkv.stores.findings import Finding, Progress
from tierkv.stores.places import Place, find_places, folder_place, only_place
from tierkv.stores.selection import ChunkFilter, parse_key
from tierkv.stores.store import Store, namespace_at
from tierkv.types.keys import Tenant

KEY_CHARS_MAX = 4096
"""Characters of a line in a file of keys that are read at once."""

_DRY_RUN = click.option(
    "--dry-run",
    is_flag=True,
    help="Copy nothing; show what would be copied. A target that keeps nothing yet is checked, as by `tierkv check`.",
)
_NO_READ_BACK = click.option(
    "--no-read-back", is_flag=True, help="Do not read each written chunk from the target again to check it."
)


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--to-tier", metavar="NAME", help="The tier of the target's stack file.")
@click.option("--to-backend", metavar="NAME", help="Backend of the target's path or URL. Default: an export folder.")
@_NO_READ_BACK
@_DRY_RUN
@tenant_option
@place_options
@click.pass_context
def copy(  # noqa: PLR0913 - click passes each option
    ctx: click.Context,
    *,
    source: str,
    target: str,
    to_tier: str | None,
    to_backend: str | None,
    no_read_back: bool,
    dry_run: bool,
    tenant: Tenant | None,
    choice: PlaceChoice,
    as_json: bool,
) -> None:
    """Copy chunks from SOURCE to TARGET: tier to tier, to an export folder, or from one.

    Both are stack files (with --tier and --to-tier where they have several), paths or URLs of a tier, or export
    folders. A new TARGET directory becomes an export folder, unless --to-backend names another kind. Only chunks that
    pass all checks are copied, byte for byte, with their codec; each is read back and checked. What the target has
    already is skipped: a copy that was killed, or whose target was full, continues when it is repeated. The source may
    be in use by an engine; a disk or LMDB target may not. Exit code 1: something was not copied.

    \b
    Examples:
      tierkv copy stack.toml /backup/kv --tier disk        export to a folder
      tierkv copy /backup/kv stack.toml --to-tier disk     import on another machine
      tierkv copy /var/cache/tierkv s3://bucket/kv --to-backend fsspec -n 'llama*'
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    found = find_target(source, choice)
    origin = only_place(source, found.places, "--tier")
    goal = _target_place(target, to_tier, to_backend)
    if is_same_place(origin, goal):
        raise ConfigError(f"{source} and {target} are one place: give another target")
    if is_nested(origin, goal):
        raise ConfigError(f"{origin.where} and {goal.where}: one is inside of the other; give a target outside of it")
    report = Report(as_json=as_json)
    report.add(found.findings)
    sums = Copied()
    with progress("copying") as advance:
        for at, stored in found.stores:
            report.add(
                _copy(
                    at,
                    goal,
                    stored,
                    sums,
                    chunk_filter(tenant),
                    read_back=not no_read_back,
                    dry_run=dry_run,
                    advance=advance,
                )
            )
            if sums.is_full:
                break
    done = "would be copied" if dry_run else "copied"
    sentence = f"{counted(sums.chunks, sums.frame_bytes)} {done}, {sums.present:,} were there"
    report.end(ctx, sentence, source=source, target=target, dry_run=dry_run, **fields_of(sums))


def _target_place(target: str, tier: str | None, backend: str | None) -> Place:
    registry = load_plugins()
    path = Path(target)
    is_stack = path.suffix.lower() in SUFFIXES and not path.is_dir()
    if is_stack or backend is not None:
        return only_place(target, find_places(target, registry, tier=tier, backend=backend), "--to-tier")
    if "://" in target:
        raise ConfigError(f"{target}: name the kind of the target with --to-backend, such as --to-backend fsspec")
    if exists(path) and not path.is_dir():
        raise ConfigError(f"{target} is a file: give a new directory, a stack file, or a place with --to-backend")
    if not exists(path) or not any(path.iterdir()):
        return folder_place(target)
    return only_place(target, find_places(target, registry), "--to-tier")


def _copy(  # noqa: PLR0913 - the two ends, and how to copy
    source: Place,
    target: Place,
    stored: StoredNamespace,
    sums: Copied,
    chosen: ChunkFilter,
    *,
    read_back: bool,
    dry_run: bool,
    advance: Progress,
) -> Iterator[Finding]:
    """Copy one namespace. A store that cannot be opened is a finding."""
    with ExitStack() as opened:
        at = source
        try:
            reading = opened.enter_context(Store(source, stored.namespace, writes=False))
            at = target
            goal = namespace_at(target, stored.namespace)
            if not dry_run:
                room = fitted(target, goal, reading)
                writing: Store | None = opened.enter_context(Store(room, goal, writes=True))
            else:
                writing = _looked_at(target, goal, opened)
            copy = StoreCopy(
                reading,
                writing,
                target,
                sums,
                chosen=chosen,
                read_back=read_back,
                dry_run=dry_run,
                progress=advance,
            )
            yield from copy.run()
        except TierKVError as error:
            yield not_opened(at, stored, error)


def _looked_at(target: Place, namespace: object, opened: ExitStack) -> Store | None:
    """Open the target of a dry run for reading; None if it has nothing of this namespace yet.

    Raises:
        BackendError: it keeps nothing yet, and its check says that it cannot.
    """
    listed: list[StoredNamespace] = []
    with suppress(TierKVError):  # a new place
        listed += [each for each in target.list_namespaces() if isinstance(each, StoredNamespace)]
    for each in listed:
        if each.namespace == namespace:
            return opened.enter_context(Store(target, each.namespace, writes=False))
    if not listed and target.backend.check is not None:
        for result in run_check(partial(target.backend.check, target.options, None)):
            if not result.ok:
                raise BackendError(f"{result.detail}; {result.fix}", tier=target.name)
    return None


@click.command()
@click.argument("stack")
@click.option("--from", "from_tier", metavar="NAME", help="Tier to copy from. Default: all below the target.")
@click.option("--to", "to_tier", metavar="NAME", help="Tier to copy to. Default: the first one that can be written.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    help="Only the chunks that requests of this record used: the file that `record.path` of a stack names.",
)
@click.option("--request", "requests", multiple=True, help="Only those of this request of the record. May be repeated.")
@click.option(
    "--keys",
    "keys_file",
    type=click.File("r", encoding="utf-8", errors="replace"),
    help="Only these chunks: a file with one key per line, in hex or as hash.group; - for standard input.",
)
@_NO_READ_BACK
@_DRY_RUN
@tenant_option
@place_options
@click.pass_context
def warm(  # noqa: PLR0913 - click passes each option
    ctx: click.Context,
    *,
    stack: str,
    from_tier: str | None,
    to_tier: str | None,
    record: Path | None,
    requests: tuple[str, ...],
    keys_file: TextIO | None,
    no_read_back: bool,
    dry_run: bool,
    tenant: Tenant | None,
    choice: PlaceChoice,
    as_json: bool,
) -> None:
    """Copy chunks up the tiers of STACK before its engine starts: from the bucket to the local disk.

    Choose a model, a tenant, or the chunks of prompts: those that requests of a record used, or a list of keys. It ends
    when the upper tier is full, and says so; that is no failure. Keys that no tier has are named; exit code 1: no tier
    has any of them, or a chunk was not copied. The engine must not run: it owns its disk and LMDB tiers, and warms them
    itself as it serves.

    \b
    Examples:
      tierkv warm stack.toml -n llama-3-8b
      tierkv warm stack.toml --record record.jsonl --dry-run
      tierkv warm stack.toml --keys keys.txt
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    if choice.tier is not None or choice.backend is not None:
        raise click.UsageError("warm takes --from and --to, not --tier or --backend", ctx)
    if requests and record is None:
        raise click.UsageError("--request names a request of a record: give --record as well", ctx)
    found = find_target(stack, choice)
    goal, sources = _up(stack, found, from_tier, to_tier)
    chosen = chunk_filter(tenant, None, (*_keys_of(record, requests), *_keys_in(keys_file)))
    if chosen.keys is None and (record is not None or keys_file is not None):
        raise ConfigError("the record or the file of keys names no chunk")
    report = Report(as_json=as_json)
    report.add(each for each in found.findings if each.place in {place.name for place in sources})
    sums = Copied()
    with progress("warming") as advance:
        for at, stored in [each for each in found.stores if each[0] in sources]:
            copied = _copy(at, goal, stored, sums, chosen, read_back=not no_read_back, dry_run=dry_run, advance=advance)
            report.add(finding for finding in copied if not sums.is_full or "is full" not in finding.reason)
            if sums.is_full:
                break
    sums.present += search_stores(chosen, sums.named, [each for each in found.stores if each[0] is goal])
    if sums.is_full:  # the copy ended before it had listed all
        search_stores(chosen, sums.named, [each for each in found.stores if each[0] in sources])
    missing, fields = report_missing(report, stack, chosen, sums.named)
    done = "would be copied" if dry_run else "copied"
    sentence = f"{counted(sums.chunks, sums.frame_bytes)} {done} to {goal.name}, {sums.present:,} were there"
    sentence += f"; {goal.name} is full" if sums.is_full else ""
    report.end(ctx, sentence + missing, stack=stack, to=goal.name, dry_run=dry_run, **fields_of(sums), **fields)


def _up(stack: str, found: Target, from_tier: str | None, to_tier: str | None) -> tuple[Place, list[Place]]:
    """Return the tier to copy to, and those to copy from."""
    places = found.places
    names = [place.name for place in places]
    for option, name in (("--from", from_tier), ("--to", to_tier)):
        if name is not None and name not in names:
            raise ConfigError(f"{option} {name}: {stack} has {', '.join(names)}")
    writable = [place for place in places if not place.backend.capabilities.read_only]
    goal = next((place for place in writable if to_tier in (None, place.name)), None)
    if goal is None:
        raise ConfigError(f"{stack}: no tier to copy to can be written")
    below = places[places.index(goal) + 1 :]
    sources = [place for place in (below if from_tier is None else places) if from_tier in (None, place.name)]
    if goal in sources:
        raise ConfigError(f"--from {goal.name}: chunks would be copied to the tier itself; give another --from or --to")
    if not sources:
        raise ConfigError(f"{stack}: there is no tier below {goal.name!r} to copy from; choose with --from and --to")
    return goal, sources


def _keys_of(record: Path | None, requests: tuple[str, ...]) -> Iterator[str]:
    """Yield the short keys that requests of a record used."""
    if record is None:
        return
    for entry in read_entries(record):
        if requests and entry.get("r") not in requests:
            continue
        if entry.get("is") == "answer":
            yield from entry.get("wanted", ())
        elif entry.get("is") == "job":
            yield from entry.get("keys", ())


def _keys_in(file: TextIO | None) -> Iterator[str]:
    if file is not None:
        lines = iter(lambda: file.readline(KEY_CHARS_MAX), "")  # a file of anything may have no end of a line
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield parse_key(line)
                except ValueError as error:
                    raise ConfigError(f"{file.name}, line {number}: {error}") from error
