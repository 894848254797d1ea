"""Scan of the tiers' contents: once at open or attach, on threads of its own, within a time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierkv.dispatch.spawn import Handle, OneShot, Spawn, wait_until
from tierkv.tiers.results import explain
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Result of the scan of one tier."""

    tier: int
    """Position of the tier in the scanned sequence, from 0."""
    entries: Sequence[tuple[Key, int]] = field(default=(), repr=False)
    """Keys with the bytes of their frames; empty after an error."""
    ranks: Sequence[int] = field(default=(), repr=False)
    """Written rank of each; empty if none is known."""
    error: str = ""
    """Reason of a failure; empty after a success."""
    timed_out: bool = False
    """Whether the scan exceeded the time limit."""
    handle: Handle | None = None
    """Thread of a scan that timed out and may still run."""


class _Scan:
    """Scan of one tier. ``result`` is set when it has ended."""

    def __init__(self, index: int, tier: Tier) -> None:
        self._index = index
        self._tier = tier
        self.result: ScanResult | None = None

    def __call__(self) -> None:
        try:
            self.result = ScanResult(self._index, *self._tier.scan_entries())
        except BaseException as error:  # noqa: BLE001 - a plugin may raise anything; the tier starts without entries
            self.result = ScanResult(self._index, error=explain(error))


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
    scans = {index: _Scan(index, tier) for index, tier in enumerate(tiers) if tier.capabilities.scan}
    handles: dict[int, Handle] = {
        index: spawn(f"tierkv-{tiers[index].name}-scan", OneShot(scan)) for index, scan in scans.items()
    }
    wait_until(lambda: not any(handle.is_alive() for handle in handles.values()), timeout_s, clock, engine_sleep)
    late = f"scan did not end within {timeout_s:g} seconds"
    return [
        scan.result or ScanResult(index, error=late, timed_out=True, handle=handles[index])
        for index, scan in scans.items()
    ]
