"""Scan of a tier at open: entries, or an error, within a time limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from dispatch_bench import KEYS, PATIENCE_S, dispatching
from tier_bench import Bench, make_bench

from tierkv.abc import Capabilities, Entry
from tierkv.testing import faults
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, Verb

SCAN = Capabilities(scan=True, authoritative_index=True)


def test_entries_of_every_tier_that_supports_scans(bench: Bench, tmp_path: Path) -> None:
    """The manager rebuilds its index from these entries after a restart. Tiers without scan are skipped."""
    other = make_bench(tmp_path / "other", beside=bench)
    with dispatching(bench, other.tier(), bench.tier(capabilities=SCAN)) as dispatch:
        dispatch.wait(*[dispatch.write(number, number, tier=1) for number in range(5)])
        (result,) = dispatch.dispatcher.scan_all(PATIENCE_S)
        assert (result.tier, result.error, result.timed_out) == (1, "", False)
        frame_bytes = bench.file(KEYS[0]).stat().st_size
        assert set(result.entries) == {(key, frame_bytes) for key in KEYS[:5]}
        assert dispatch.drain() == []


def test_an_async_backend_is_scanned_too(async_bench: Bench) -> None:
    """Its scan is an ordinary function. On the loop it would block every other tier."""
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=SCAN)) as dispatch:
        dispatch.wait(dispatch.write(3, 3))
        (result,) = dispatch.dispatcher.scan_all(PATIENCE_S)
        assert [key for key, _ in result.entries] == [KEYS[3]]


def failing_halfway() -> Iterator[object]:
    """Yield the first half of an index, then raise."""
    yield Entry(KEYS[0], 4096)
    raise OSError("bad sector")


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        (None, "TypeError"),
        ([Entry(KEYS[0], 1), "entry"], "invalid entry 'entry'"),
        ([Entry(Key(b""), 1)], "invalid entry"),
        ([Entry(Key(b"k" * 257), 1)], "invalid entry"),
        ([Entry("key", 1)], "invalid entry"),  # type: ignore[arg-type]  # the lie
        ([Entry(KEYS[0], -1)], "invalid entry"),
        ([Entry(KEYS[0], 1, -1)], "invalid entry"),
        ([Entry(KEYS[0], 1, 1 << 64)], "invalid entry"),
        ([Entry(KEYS[0], 1, 1.0)], "invalid entry"),  # type: ignore[arg-type]  # the lie
        ([Entry(KEYS[0], "1")], "invalid entry"),  # type: ignore[arg-type]  # the lie
        ("generator", "OSError: bad sector"),
    ],
)
def test_a_tier_whose_scan_fails_is_unusable(bench: Bench, entries: Any, error: str) -> None:
    """A partial index is useless: a chunk missing in it would be written twice, or never be evicted."""
    bench.backend.add("scan", faults.lie(lambda _: failing_halfway() if entries == "generator" else entries))
    with dispatching(bench, bench.tier(capabilities=SCAN)) as dispatch:
        (result,) = dispatch.dispatcher.scan_all(PATIENCE_S)
        assert error in result.error
        assert (list(result.entries), result.timed_out) == ([], False)
        dispatch.drain()
        assert dispatch.health() == [False]
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[OutcomeKind.REFUSED]]
        dispatch.clock.advance(1000.0)
        dispatch.wait_health(False, True)


def test_a_hanging_scan_is_abandoned(bench: Bench, tmp_path: Path, gate: Event) -> None:
    """A stack must open although one of its tiers does not answer. A late result is dropped."""
    other = make_bench(tmp_path / "other", beside=bench)
    bench.backend.add("scan", faults.hang_until(gate))
    with dispatching(bench, bench.tier(capabilities=SCAN), other.tier(capabilities=SCAN)) as dispatch:
        slow, fine = dispatch.dispatcher.scan_all(0.05)
        assert (slow.timed_out, "0.05 seconds" in slow.error, list(slow.entries)) == (True, True, [])
        assert (fine.timed_out, fine.error, list(fine.entries)) == (False, "", [])
        dispatch.drain()
        assert dispatch.health() == [False]
        gate.set()
