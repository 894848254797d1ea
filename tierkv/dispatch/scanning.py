"""Scan of the tiers' contents: once at open or attach, on threads of its own, within a time limit.

A tier whose scan fails when the stack opens is *unlisted*: it serves nothing until a later scan succeeds. Its former
chunks would otherwise stay at rest unaccounted, and a reset would not delete them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierkv.dispatch.threads.spawn import OneShot, Spawn, wait_until
from tierkv.tiers.results import explain
from tierkv.tiers.tier import Tier
from tierkv.types.tier_ops import LISTED_PER_KEY, TierContent, TierListing


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Result of the scan of one tier."""

    tier: int
    """Position of the tier in the scanned sequence, from 0."""
    content: TierContent = field(default_factory=TierContent, repr=False)
    """Its content; empty after an error."""
    error: str = ""
    """Reason of a failure; empty after a success."""
    timed_out: bool = False
    """Whether the scan exceeded the time limit. It may still run."""


class Scan:
    """Scan of one tier, on a thread of its own that starts at once.

    Args:
        index: number of the tier in results.
        tier: the tier.
        spawn: starts the thread.
    """

    def __init__(self, index: int, tier: Tier, spawn: Spawn) -> None:
        self.result: ScanResult | None = None
        """Its result; None until it has ended."""
        self.index = index
        """Number of the tier in results."""
        self._tier = tier
        self._spawn = spawn
        self._handle = spawn(f"tierkv-{tier.name}-scan", OneShot(self._run))

    @property
    def is_running(self) -> bool:
        """Whether it may still call the backend."""
        return self._handle.is_alive()

    def again(self) -> Scan:
        """Start another scan of the tier."""
        return Scan(self.index, self._tier, self._spawn)

    def _run(self) -> None:
        try:
            self.result = ScanResult(self.index, self._tier.scan_content())
        except BaseException as error:  # noqa: BLE001 - a plugin may raise anything; the tier starts without entries
            self.result = ScanResult(self.index, error=explain(error))


class Relisting:
    """Content of an unlisted tier: scanned again until a scan succeeds, then reported in parts. Engine's thread.

    Args:
        scan: the scan that failed. If it is only late, and still running, its result is used.
    """

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._reported = 0

    @property
    def is_running(self) -> bool:
        """Whether a scan may still call the backend."""
        return self._scan.is_running

    @property
    def has_failed(self) -> bool:
        """Whether the latest scan ended with an error."""
        return self._scan.result is None or bool(self._scan.result.error)

    def begin(self) -> None:
        """Scan again. Where no thread can be started, the latest scan stays the failed one."""
        with contextlib.suppress(RuntimeError):
            self._scan = self._scan.again()

    def take(self, keys_max: int) -> TierListing:
        """Take the next part of the content, at the cost of up to ``keys_max`` key operations, or one."""
        result, first = self._scan.result or ScanResult(self._scan.index), self._reported
        stop = self._reported = first + max(1, keys_max) * LISTED_PER_KEY
        return TierListing(result.tier, result.content.part(first, stop), stop >= len(result.content))


def scan_all(
    tiers: Sequence[Tier],
    timeout_s: float,
    clock: Callable[[], float],
    engine_sleep: Callable[[float], None],
    spawn: Spawn,
) -> list[ScanResult]:
    """Scan concurrently all tiers whose backends support it. Waits up to ``timeout_s`` on the caller's thread.

    Returns:
        One result per scanned tier, in the order of ``tiers``.
    """
    scans = start_scans(tiers, timeout_s, clock, engine_sleep, spawn)
    return [result_of(scan, timeout_s) for scan in scans]


def start_scans(
    tiers: Sequence[Tier],
    timeout_s: float,
    clock: Callable[[], float],
    engine_sleep: Callable[[float], None],
    spawn: Spawn,
) -> list[Scan]:
    """Scan as :func:`scan_all`. Returns the scans, of which those that are late still run."""
    scans = [Scan(index, tier, spawn) for index, tier in enumerate(tiers) if tier.capabilities.scan]
    wait_until(lambda: not any(scan.is_running for scan in scans), timeout_s, clock, engine_sleep)
    return scans


def result_of(scan: Scan, timeout_s: float) -> ScanResult:
    """Result of a scan that had ``timeout_s`` seconds."""
    late = f"scan did not end within {timeout_s:g} seconds"
    return scan.result or ScanResult(scan.index, error=late, timed_out=True)
