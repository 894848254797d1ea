"""Slots that I/O fills, and their sources."""

from __future__ import annotations

import pytest

from tierkv.errors import InvariantError
from tierkv.manager.host import fills as module
from tierkv.manager.host.fills import Fills
from tierkv.types.cache_events import HOST

SLOTS = 40
RUN, SCATTERED = list(range(10, 20)), [3, 1, 30]


def test_stores_and_reads_are_told_apart() -> None:
    """A batch of adjacent slots, which is written at once, and one of others."""
    fills = Fills(SLOTS)
    fills.begin(RUN[::-1], HOST)
    fills.begin(SCATTERED, "disk")
    assert (fills.num_storing, fills.num_reading, len(fills)) == (10, 3, 13)
    assert [slot for slot in range(SLOTS) if slot in fills] == sorted(RUN + SCATTERED)
    assert fills.stored_among(range(SLOTS)) == RUN
    assert fills.read_among(range(SLOTS)) == sorted(SCATTERED)
    assert [fills.source(slot) for slot in (1, 10, 0)] == ["disk", HOST, HOST]
    assert fills.num_missing([0, None, 1, 10]) == 3
    assert fills.num_leading_idle([0, 2, 10, 4]) == 2


def test_an_end_counts_each_slot_once() -> None:
    """A chunk that was dropped may end with others that were not filled."""
    fills = Fills(SLOTS)
    fills.begin(RUN, HOST)
    fills.begin(SCATTERED, "disk")
    fills.end([*RUN[:5], 39, *SCATTERED])
    fills.end(RUN[:5])
    assert (fills.num_storing, fills.num_reading) == (5, 0)
    assert fills.read_among(range(SLOTS)) == []
    fills.end(RUN)
    assert not len(fills)
    assert fills.num_leading_idle(range(SLOTS)) == SLOTS


def test_a_tier_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attached again under its name, it needs no other; one name too many is an error that changes nothing."""
    monkeypatch.setattr(module, "_SOURCES_MAX", 4)
    fills = Fills(SLOTS)
    for slot, name in enumerate(["disk", "bucket", "disk", "bucket"]):
        fills.begin([slot], name)
    with pytest.raises(InvariantError, match="2 names of tiers"):
        fills.begin([9], "another")
    assert 9 not in fills
    assert [fills.source(slot) for slot in range(4)] == ["disk", "bucket", "disk", "bucket"]
