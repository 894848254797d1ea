"""Arithmetic on the positions that a log claims: contradictory claims, free runs, segments to shorten.

All functions process addresses in disk order. They are written for speed: there may be millions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from tierkv.types.keys import Key
from tierkv_disk.extents import (
    PAGE_BYTES,
    RANK_BITS,
    Extent,
    PageAddress,
    Run,
    address_at,
    address_of,
    extent_at,
    extent_of,
    page_of,
    segment_of,
)
from tierkv_disk.space.table import SCATTERED, Entries

_BITS = 32
_MASK = (1 << _BITS) - 1
_ROUND = PAGE_BYTES - 1
_PAGE_BITS = PAGE_BYTES.bit_length() - 1

Scattered = dict[Key, tuple[Run, ...]]
Pages = Mapping[int, int]
"""Number of pages of each segment."""


class _Claim(NamedTuple):
    """Pages claimed by a key. Older claims have smaller numbers."""

    address: PageAddress
    pages: int
    number: int
    key: Key


def used_runs(entries: Entries, scattered: Scattered) -> list[Extent]:
    """All used runs, as extents in disk order."""
    used: list[Any] = [entry >> RANK_BITS for entry in sorted(entries.values())]  # extent_of, without a call
    while used and used[-1] >> _BITS == SCATTERED:
        used.pop()
    more = [run for runs in scattered.values() for run in runs]
    if more:
        used += [extent_at(run.address, run.pages * PAGE_BYTES) for run in more]
        used.sort()
    return used


Gap = tuple[int, int]
"""End of a used run, and start of the next one at another address."""

_BEFORE, _BEHIND = -1, 1 << 3 * _BITS
"""End of an imaginary run before the first one; start of an imaginary run after the last one."""


def gaps_between(used: list[Extent]) -> list[Gap]:
    """Gaps between used runs, including those before the first and after the last run."""
    starts = [extent >> _BITS for extent in used]
    ends = [address + ((extent & _MASK) + _ROUND >> _PAGE_BITS) for address, extent in zip(starts, used, strict=True)]
    pairs = zip(chain((_BEFORE,), ends), chain(starts, (_BEHIND,)), strict=True)
    return [pair for pair in pairs if pair[0] != pair[1]]


def is_sound(gaps: list[Gap], pages: Pages) -> bool:
    """Whether all runs are within existing segments, and no two overlap."""
    for end, start in gaps:
        if end > start:
            return False
        if start >> _BITS != end >> _BITS and end != _BEFORE and end & _MASK > pages.get(end >> _BITS, 0):
            return False
    return True


def has_room(used: list[Extent], run: Run, pages: Pages) -> bool:
    """Whether a run is within an existing segment and overlaps no used run."""
    address, count = run
    if page_of(address) + count > pages.get(segment_of(address), 0):
        return False
    after = bisect_left(used, extent_at(address, 0))
    if after < len(used) and address_of(used[after]) < address + count:
        return False
    return not after or address_of(used[after - 1]) + _pages(used[after - 1]) <= address


def lost_keys(entries: Entries, scattered: Scattered, pages: Pages) -> set[Key]:
    """Keys to drop so that the remaining ones are sound.

    Pages belong to the last record that names them. An older claim remains only if the record that ended it was lost.
    """
    lost: set[Key] = set()
    claims: list[_Claim] = []
    for number, (key, entry) in enumerate(entries.items()):
        extent = extent_of(entry)
        size = (extent & _MASK) + _ROUND >> _PAGE_BITS
        runs = scattered[key] if address_of(extent) == SCATTERED else (Run(address_of(extent), size),)
        if all(page_of(address) + count <= pages.get(segment_of(address), 0) for address, count in runs):
            claims += [_Claim(address, count, number, key) for address, count in runs]
        else:
            lost.add(key)
    claims.sort()
    holder: _Claim | None = None
    for claim in claims:
        if holder is not None and claim.address < holder.address + holder.pages:
            lost.add(min(claim, holder, key=lambda each: each.number).key)
            if claim.number < holder.number:
                continue
        holder = claim
    return lost


def free_runs(gaps: list[Gap], pages: Pages) -> Iterator[Run]:
    """Runs between used runs and at the ends of segments. The gaps must be sound."""
    untouched = dict(pages)
    for end, start in gaps:
        segment, next_segment = end >> _BITS, start >> _BITS
        if segment == next_segment:
            yield Run(PageAddress(end), start - end)
            continue
        if end != _BEFORE and pages[segment] > end & _MASK:
            yield Run(PageAddress(end), pages[segment] - (end & _MASK))
        if untouched.pop(next_segment, 0) and start & _MASK:
            yield Run(address_at(next_segment, 0), start & _MASK)
    for segment, count in untouched.items():
        yield Run(address_at(segment, 0), count)


def cuts_for(excess: int, entries: Entries, used: list[Extent], pages: Pages) -> dict[int, int]:
    """New lengths in pages of the segments to shorten, so that ``excess`` pages are removed.

    Free pages at the ends of segments go first, last segment first. Then whole segments go, in the order in which
    they were last written, and finally the end of one segment.
    """
    cuts: dict[int, int] = {}
    ends = {extent >> 2 * _BITS: (extent >> _BITS & _MASK) + _pages(extent) for extent in used}
    for segment in sorted(pages, reverse=True):
        tail = min(excess, pages[segment] - ends.get(segment, 0))
        if tail > 0:
            cuts[segment] = pages[segment] - tail
            excess -= tail
    if excess > 0:
        written = {extent_of(entry) >> 2 * _BITS: number for number, entry in enumerate(entries.values())}
        for segment in sorted(pages, key=lambda each: written.get(each, -1)):
            kept = max(0, cuts.get(segment, pages[segment]) - excess)
            excess -= cuts.get(segment, pages[segment]) - kept
            cuts[segment] = kept
            if excess <= 0:
                break
    return cuts


def _pages(extent: Extent) -> int:
    return (extent & _MASK) + _ROUND >> _PAGE_BITS
