"""Check of a scan: no work in Python per chunk, since a tier may have millions."""

from __future__ import annotations

from calls import calls_of

from tierkv.abc import Entry
from tierkv.tiers.results import checked_content
from tierkv.types.keys import Key


def test_entries_cost_no_call_each() -> None:
    """An open waits for the scan of every tier."""
    entries = [Entry(Key(number.to_bytes(36, "big")), 4096, 1 + number) for number in range(10_000)]
    assert calls_of(checked_content, entries, "disk") < len(entries) // 20
