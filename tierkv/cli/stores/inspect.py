"""``tierkv inspect``: one chunk, its frame, and whether it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from tierkv.abc import StoredFrame, StoredNamespace
from tierkv.cli.output import print_table
from tierkv.cli.stores.output import Report, ago, name_of
from tierkv.cli.stores.target import KEY, PlaceChoice, find_target, not_opened, place_options
from tierkv.errors import TierKVError
from tierkv.recording.entries import matches, short_key
from tierkv.stores.findings import Finding, FindingKind
from tierkv.stores.places import Place
from tierkv.stores.selection import tenant_text
from tierkv.stores.store import ReadFrame, Store
from tierkv.types.keys import Key, split_key
from tierkv.types.sizes import round_size

SHOWN_MAX = 20
"""Chunks that are shown; a short beginning of a key may match many."""


@click.command()
@click.argument("place")
@click.argument("key", type=KEY)
@place_options
@click.pass_context
def inspect(
    ctx: click.Context,
    *,
    place: str,
    key: str,
    choice: PlaceChoice,
    as_json: bool,
) -> None:
    """Show the chunks with KEY at PLACE: header, codec, sizes, checksums, and whether the frame is whole.

    KEY is a whole key in hex, as `tierkv ls --chunks` and log lines have it; the short form of a record (hash.group),
    as `tierkv explain` has it; or the beginning of a hash. A whole key is looked up; the others are searched in the
    listing. Exit code 1: it is damaged, or at no place.

    \b
    Examples:
      tierkv inspect stack.toml 5f0c4b7e9d1a2c3b.0
      tierkv inspect /var/cache/tierkv 5f0c --json
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    target = find_target(place, choice)
    report = Report(as_json=as_json)
    report.add(target.findings)
    rows: list[dict[str, Any]] = []
    for at, stored in target.stores:
        try:
            with Store(at, stored.namespace, writes=False) as store:
                for found in _found(store, key):
                    if found.header is None and found.error is None:
                        continue
                    rows.append(_described(at, stored, found))
                    report.add(_damage(at, stored, found))
                    if not as_json:
                        _print(rows[-1])
        except TierKVError as error:
            report.add([not_opened(at, stored, error)])
    if not rows:
        report.add([Finding(FindingKind.MISSING, place, "", key, "no store has a chunk with this key")])
    report.end(ctx, f"{len(rows)} found", place=place, chunks=rows)


def _found(store: Store, wanted: str) -> Iterator[ReadFrame]:
    """Yield the chunks of a store that match, read and checked."""
    try:
        whole = Key(bytes.fromhex(wanted))
    except ValueError:
        whole = Key(b"")
    if whole and store.contains([whole])[0] is True:
        yield store.read_one(StoredFrame(whole, 0))
        return
    listed = (each for each in store.list_frames() if isinstance(each, StoredFrame))
    shown = 0
    for each in listed:
        if each.key is not None and (each.key == whole or matches(short_key(each.key), wanted)):
            yield store.read_one(each)
            shown += 1
            if shown == SHOWN_MAX:
                return


def _described(at: Place, stored: StoredNamespace, found: ReadFrame) -> dict[str, Any]:
    header, key = found.header, found.listed.key or b""
    try:
        group: int | None = split_key(key)[1]
    except ValueError:
        group = None
    row: dict[str, Any] = {
        "tier": at.name,
        "where": at.where,
        "model": name_of(stored),
        "namespace": stored.namespace.fingerprint().hex(),
        "key": key.hex(),
        "short_key": short_key(key),
        "group": group,
        "tenant": tenant_text(key),
        "stored_at_s": found.listed.stored_at_s,
        "rank": found.listed.rank or None,
        "whole": header is not None,
        "reason": "" if found.error is None else str(found.error),
    }
    if header is not None:
        row |= {
            "codec": header.codec,
            "raw_bytes": header.raw_bytes,
            "stored_bytes": header.stored_bytes,
            "stored_checksum": header.stored_checksum.hex(),
            "raw_checksum": None if header.withheld else header.raw_checksum.hex(),
            "parts": len(header.part_checksums) or 1,
            "approximate": header.approximate,
        }
    return row


def _damage(at: Place, stored: StoredNamespace, found: ReadFrame) -> list[Finding]:
    if found.error is None:
        return []
    key = (found.listed.key or b"").hex()
    return [Finding(FindingKind.DAMAGED, at.name, stored.namespace.fingerprint().hex(), key, str(found.error))]


def _print(row: dict[str, Any]) -> None:
    shown = dict(row)
    shown["stored_at_s"] = ago(row["stored_at_s"])
    for name in ("raw_bytes", "stored_bytes"):
        if name in row:
            shown[name] = f"{row[name]:,} ({round_size(row[name])})"
    names = {"stored_at_s": "written"}
    cells = [
        (names.get(name, name.replace("_", " ")), "unknown" if value is None else str(value))
        for name, value in shown.items()
    ]
    print_table(row["short_key"], ("field", "value"), cells)
