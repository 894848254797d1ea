"""Arithmetic on the positions that a log claims: contradictory claims, free runs, segments to shorten.

All functions process addresses in disk order. They are written for speed: there may be millions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.types.keys import Key
from tierkv_disk.extents import (
    PAGE_BYTES,
    PageAddress,
    Run,
    address_at,
    columns_of,
    page_of,
    pages_for,
    read_extent,
    segment_of,
)
from tierkv_disk.space.table import SCATTERED, Entries

_BITS = 32
_MASK = (1 << _BITS) - 1

Scattered = dict[Key, tuple[Run, ...]]
Pages = Mapping[int, int]
"""Number of pages of each segment."""


class _Claim(NamedTuple):
    """Pages claimed by a key. Older claims have smaller numbers."""

    address: PageAddress
    pages: int
    number: int
    key: Key


class UsedRuns(NamedTuple):
    """Used runs in disk order, by column."""

    starts: npt.NDArray[np.int64]
    """Address of each run."""
    pages: npt.NDArray[np.int64]

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Address of the page behind each run."""
        return self.starts + self.pages

    def with_runs(self, runs: Iterable[Run]) -> UsedRuns:
        """Used runs and further ones."""
        more = np.array([(address, pages) for address, pages in runs], np.int64).reshape(-1, 2)
        starts, pages = np.concatenate((self.starts, more[:, 0])), np.concatenate((self.pages, more[:, 1]))
        order = np.argsort(starts, kind="stable")
        return UsedRuns(starts[order], pages[order])


def used_runs(entries: Entries, scattered: Scattered) -> UsedRuns:
    """All used runs."""
    columns = columns_of(entries.values())
    if scattered:
        columns = columns[columns["address"] != SCATTERED]
    whole = UsedRuns(columns["address"].astype(np.int64), -(-columns["frame_bytes"].astype(np.int64) // PAGE_BYTES))
    return whole.with_runs(chain.from_iterable(scattered.values()))


Gap = tuple[int, int]
"""End of a used run, and start of the next one at another address."""

_BEFORE, _BEHIND = -1, 1 << 3 * _BITS
"""End of an imaginary run before the first one; start of an imaginary run after the last one."""


def gaps_between(used: UsedRuns) -> list[Gap]:
    """Gaps between used runs, including those before the first and after the last run."""
    starts, ends = used.starts, used.ends
    if not len(starts):
        return [(_BEFORE, _BEHIND)]
    apart = np.flatnonzero(ends[:-1] != starts[1:])
    between = zip(ends[apart].tolist(), starts[apart + 1].tolist(), strict=True)
    return [(_BEFORE, int(starts[0])), *between, (int(ends[-1]), _BEHIND)]


def is_sound(used: UsedRuns, pages: Pages) -> bool:
    """Whether all runs are within existing segments, and no two overlap."""
    segments = used.starts >> _BITS
    known = np.unique(segments)
    lengths = np.array([pages.get(segment, 0) for segment in known.tolist()], np.int64)
    is_within = (used.starts & _MASK) + used.pages <= lengths[np.searchsorted(known, segments)]
    return bool(is_within.all() and (used.ends[:-1] <= used.starts[1:]).all())


def has_room(used: UsedRuns, run: Run, pages: Pages) -> bool:
    """Whether a run is within an existing segment and overlaps no used run."""
    address, count = run
    if page_of(address) + count > pages.get(segment_of(address), 0):
        return False
    after = int(np.searchsorted(used.starts, address))
    if after < len(used.starts) and used.starts[after] < address + count:
        return False
    return not after or bool(used.ends[after - 1] <= address)


def lost_keys(entries: Entries, scattered: Scattered, pages: Pages) -> set[Key]:
    """Keys to drop so that the remaining ones are sound.

    Pages belong to the last record that names them. An older claim remains only if the record that ended it was lost.
    """
    lost: set[Key] = set()
    claims: list[_Claim] = []
    for number, (key, extent) in enumerate(entries.items()):
        first, frame_bytes, _ = read_extent(extent)
        runs = scattered[key] if first == SCATTERED else (Run(first, pages_for(frame_bytes)),)
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


def cuts_for(excess: int, entries: Entries, used: UsedRuns, pages: Pages) -> dict[int, int]:
    """New lengths in pages of the segments to shorten, so that ``excess`` pages are removed.

    Free pages at the ends of segments go first, last segment first. Then whole segments go, in the order in which
    they were last written, and finally the end of one segment.
    """
    cuts: dict[int, int] = {}
    ends = dict(zip((used.starts >> _BITS).tolist(), ((used.starts & _MASK) + used.pages).tolist(), strict=True))
    for segment in sorted(pages, reverse=True):
        tail = min(excess, pages[segment] - ends.get(segment, 0))
        if tail > 0:
            cuts[segment] = pages[segment] - tail
            excess -= tail
    if excess > 0:
        segments = (columns_of(entries.values())["address"] >> _BITS).tolist()
        written = {segment: number for number, segment in enumerate(segments)}
        for segment in sorted(pages, key=lambda each: written.get(each, -1)):
            kept = max(0, cuts.get(segment, pages[segment]) - excess)
            excess -= cuts.get(segment, pages[segment]) - kept
            cuts[segment] = kept
            if excess <= 0:
                break
    return cuts
