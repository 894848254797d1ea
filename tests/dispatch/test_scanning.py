"""Scan of a tier at open: entries, or an error, within a time limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from at_rest import content_of
from dispatch_bench import KEYS, PATIENCE_S, DispatchBench, dispatching, wait_for
from tier_bench import Bench, make_bench

from tierkv.abc import Capabilities, Entry
from tierkv.testing import faults
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, TierListing, Verb

SCAN = Capabilities(scan=True, authoritative_index=True)


def test_entries_of_every_tier_that_supports_scans(bench: Bench, tmp_path: Path) -> None:
    """The manager rebuilds its index from these entries after a restart. Tiers without scan are skipped."""
    other = make_bench(tmp_path / "other", beside=bench)
    with dispatching(bench, other.tier(), bench.tier(capabilities=SCAN)) as dispatch:
        dispatch.wait(*[dispatch.write(number, number, tier=1) for number in range(5)])
        (result,) = dispatch.dispatcher.scan_all(PATIENCE_S)
        assert (result.tier, result.error, result.timed_out) == (1, "", False)
        frame_bytes = bench.file(KEYS[0]).stat().st_size
        assert set(result.content.keys) == set(KEYS[:5])
        assert list(result.content.frame_bytes) == [frame_bytes] * 5
        assert dispatch.drain() == []


def test_an_async_backend_is_scanned_too(async_bench: Bench) -> None:
    """Its scan is an ordinary function. On the loop it would block every other tier."""
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=SCAN)) as dispatch:
        dispatch.wait(dispatch.write(3, 3))
        (result,) = dispatch.dispatcher.scan_all(PATIENCE_S)
        assert list(result.content.keys) == [KEYS[3]]


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
        ([Entry(KEYS[0], 1 << 64)], "invalid entry"),
        ([*[Entry(key, 1) for key in KEYS], Entry(KEYS[0], 1, -1)], "invalid entry Entry(key=b'"),
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
        assert (list(result.content.keys), result.timed_out) == ([], False)
        dispatch.drain()
        assert dispatch.health() == [False]
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[OutcomeKind.REFUSED]]


def test_a_hanging_scan_is_abandoned(bench: Bench, tmp_path: Path, gate: Event) -> None:
    """A stack must open although one of its tiers does not answer. The tier serves when the late scan has ended."""
    other = make_bench(tmp_path / "other", beside=bench)
    bench.backend.add("scan", faults.hang_until(gate))
    with dispatching(bench, bench.tier(capabilities=SCAN), other.tier(capabilities=SCAN)) as dispatch:
        slow, fine = dispatch.dispatcher.scan_all(0.05)
        assert (slow.timed_out, "0.05 seconds" in slow.error, list(slow.content.keys)) == (True, True, [])
        assert (fine.timed_out, fine.error, list(fine.content.keys)) == (False, "", [])
        dispatch.drain()
        assert dispatch.health() == [False]
        dispatch.clock.advance(1000.0)
        dispatch.drain()
        assert bench.backend.calls == ["scan"], "a scan was started beside one that hangs"
        assert dispatch.dispatcher.pending_trials() == 1
        gate.set()
        dispatch.wait_health(False, True)
        assert listings(dispatch) == [TierListing(0, content_of([]), is_last=True)]


def listings(dispatch: DispatchBench) -> list[TierListing]:
    """Parts of contents that were reported."""
    return [report for report in dispatch.reports if isinstance(report, TierListing)]


def test_a_tier_serves_when_a_later_scan_has_listed_it(bench: Bench) -> None:
    """A disk that was not ready when the stack opened. Without its list, its chunks would fill it unseen, and a reset
    would leave them. Each trial scans; the content is reported in parts, before the tier is in service."""
    bench.backend.add("scan", faults.raise_error(lambda: OSError("not mounted")), times=2)
    with dispatching(bench, bench.tier(capabilities=SCAN)) as dispatch:
        dispatch.wait(*[dispatch.write(number, number) for number in range(6)])
        (result,) = dispatch.dispatcher.scan_all(PATIENCE_S)
        assert "not mounted" in result.error
        dispatch.drain()
        for scans in (2, 3):
            assert dispatch.health() == [False]
            dispatch.clock.advance(100.0)
            dispatch.drain(1)  # its trial is due
            relisting = dispatch.dispatcher._tier_states[0].relisting
            assert relisting is not None
            wait_for(lambda found=relisting: not found.is_running, "the end of the scan")
            assert bench.backend.calls.count("scan") == scans
            dispatch.drain(1)
        assert dispatch.health() == [False], "in service before it was listed"
        while dispatch.drain(1):
            pass
        assert dispatch.health() == [False, True]
        parts = listings(dispatch)
        assert [len(part.content) for part in parts] == [4, 2]
        assert [part.is_last for part in parts] == [False, True]
        assert {key for part in parts for key in part.content.keys} == set(KEYS[:6])
        assert dispatch.reports.index(parts[-1]) == len(dispatch.reports) - 2, "the tier is in service after the list"
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[OutcomeKind.OK]]
