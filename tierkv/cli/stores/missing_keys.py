"""Chosen keys that no store has: named in the output, and a failure where no store has any of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from tierkv.abc import StoredFrame, StoredNamespace
from tierkv.cli.stores.output import FINDINGS_MAX, Report
from tierkv.errors import TierKVError
from tierkv.stores.findings import Finding, FindingKind
from tierkv.stores.places import Place
from tierkv.stores.selection import ChunkFilter
from tierkv.stores.store import Store

SHOWN_MAX = 5
"""Missing keys in a sentence; the JSON object has more."""


def search_stores(chosen: ChunkFilter, named: set[str], stores: Iterable[tuple[Place, StoredNamespace]]) -> int:
    """List further stores for the chosen keys that are not in ``named`` yet, and add those that are there.

    A store that cannot be listed is passed over. Returns the chunks found.
    """
    found = 0
    wanted = len(chosen.keys or ())
    for at, stored in stores:
        if len(named) == wanted:
            break
        with contextlib.suppress(TierKVError), Store(at, stored.namespace, writes=False, is_upkeep=True) as store:
            for entry in store.list_frames():
                if isinstance(entry, StoredFrame) and (names := chosen.names_of(entry) - named):
                    named |= names
                    found += 1
    return found


def report_missing(report: Report, place: str, chosen: ChunkFilter, named: set[str]) -> tuple[str, dict[str, Any]]:
    """Add a finding if all stores were searched, and none has any of the chosen keys.

    Returns:
        The end of a sentence about the missing keys, and the fields of the JSON object about them.
    """
    if chosen.keys is None:
        return "", {}
    missing = sorted(chosen.keys - named)
    fields = {"not_found": missing[:FINDINGS_MAX], "not_found_count": len(missing)}
    if not missing:
        return "", fields
    keys = ", ".join(missing[:SHOWN_MAX])
    keys += f" and {len(missing) - SHOWN_MAX:,} more" if len(missing) > SHOWN_MAX else ""
    if not named and not report.findings:  # with one, a store was not searched
        reason = "no chosen namespace has a chunk with this key; the beginning of a key is not enough"
        report.add([Finding(FindingKind.MISSING, place, "", keys, reason)])
        return "", fields
    return f"; {len(missing):,} of {len(chosen.keys):,} chosen keys not found: {keys}", fields
