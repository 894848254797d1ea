"""What lies in a tier already: asked once, at open, off the caller's thread and within a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from tierkv.abc.backend import Entry, SupportsScan
from tierkv.dispatch.spawn import Handle, OneShot, Spawn, wait_until
from tierkv.errors import BackendError
from tierkv.frames.frame import KEY_BYTES_MAX
from tierkv.tiers.results import describe, explain
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What one tier told: keys, each with the bytes of its frame, as plain tuples.

    ``error`` says why ``entries`` is empty; ``tier`` counts from 0. handle: the thread of a scan that goes on, late.
    """

    tier: int
    entries: Sequence[tuple[Key, int]] = field(default=(), repr=False)
    error: str = ""
    timed_out: bool = False
    handle: Handle | None = None


class _Scan:
    """One tier's scan. ``result`` is set when it has ended."""

    def __init__(self, index: int, tier: Tier) -> None:
        self._index = index
        self._tier = tier
        self.result: ScanResult | None = None

    def __call__(self) -> None:
        try:
            entries = _checked(cast("SupportsScan", self._tier.backend).scan(), self._tier.name)
            self.result = ScanResult(self._index, entries)
        except BaseException as error:  # noqa: BLE001 - a plugin may do anything; the tier starts without its past
            self.result = ScanResult(self._index, error=explain(error))


def scan_all(
    tiers: Sequence[Tier],
    timeout_s: float,
    clock: Callable[[], float],
    engine_sleep: Callable[[float], None],
    spawn: Spawn,
) -> list[ScanResult]:
    """Scan all tiers that can be, at once. One result each, in order. Waits ``timeout_s`` at most."""
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


def _checked(entries: Iterable[object], tier: str) -> list[tuple[Key, int]]:
    """Refuse what is no entry. Written for speed: there may be millions.

    Plain tuples, because garbage collections, which run meanwhile, take them off their list, and subclasses not.
    """
    told = []
    for entry in entries:
        if isinstance(entry, Entry):
            key, size = entry
            if type(key) is bytes and 1 <= len(key) <= KEY_BYTES_MAX and type(size) is int and size >= 0:
                told.append((key, size))
                continue
        raise BackendError(f"backend told the impossible entry {describe(entry)}", tier=tier)
    return told
