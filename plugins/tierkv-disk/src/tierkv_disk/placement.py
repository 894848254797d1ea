"""From what the log says to what lies where: claims that contradict each other, space that is free, segments to cut.

All of it looks at places in the order in which they lie on the disk. Written for speed: there may be millions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from tierkv.types.keys import Key
from tierkv_disk.places import PAGE_BYTES, Location, Place, Run, location_at, page_of, place_at, place_of, segment_of
from tierkv_disk.table import NOWHERE, Entries

_BITS = 32
_MASK = (1 << _BITS) - 1
_ROUND = PAGE_BYTES - 1
_PAGE_BITS = PAGE_BYTES.bit_length() - 1

Scattered = dict[Key, tuple[Run, ...]]
Pages = Mapping[int, int]
"""Per segment, how many pages it has."""


class _Claim(NamedTuple):
    """Somebody says that these pages are theirs. Older claims have smaller numbers."""

    place: Place
    pages: int
    number: int
    key: Key


def used_runs(entries: Entries, scattered: Scattered, others: Iterable[Run] = ()) -> list[Location]:
    """All runs that are in use, as places with lengths, in the order in which they lie."""
    used = sorted(entries.values())
    while used and used[-1] >> _BITS == NOWHERE:
        used.pop()
    more = [run for runs in scattered.values() for run in runs]
    more += others
    if more:
        used += [location_at(run.place, run.pages * PAGE_BYTES) for run in more]
        used.sort()
    return used


Gap = tuple[int, int]
"""Where a used run ends, and where the next one begins, in another place."""

_BEFORE, _BEHIND = -1, 1 << 3 * _BITS
"""Ends the run before the first one; begins the run after the last one."""


def gaps_between(used: list[Location]) -> list[Gap]:
    """All places where one used run ends and the next does not begin, also before the first and after the last."""
    starts = [location >> _BITS for location in used]
    ends = [place + ((location & _MASK) + _ROUND >> _PAGE_BITS) for place, location in zip(starts, used, strict=True)]
    pairs = zip(chain((_BEFORE,), ends), chain(starts, (_BEHIND,)), strict=True)
    return [pair for pair in pairs if pair[0] != pair[1]]


def is_sound(gaps: list[Gap], pages: Pages) -> bool:
    """Whether all runs lie in segments that are there, and none in another."""
    for end, start in gaps:
        if end > start:
            return False
        if start >> _BITS != end >> _BITS and end != _BEFORE and end & _MASK > pages.get(end >> _BITS, 0):
            return False
    return True


def has_room(used: list[Location], run: Run, pages: Pages) -> bool:
    """Whether a run lies in a segment that is there, and no used one in it."""
    place, count = run
    if page_of(place) + count > pages.get(segment_of(place), 0):
        return False
    after = bisect_left(used, location_at(place, 0))
    if after < len(used) and place_of(used[after]) < place + count:
        return False
    return not after or place_of(used[after - 1]) + _pages(used[after - 1]) <= place


def lost_keys(entries: Entries, scattered: Scattered, pages: Pages) -> set[Key]:
    """The keys that must go so that what is left is sound.

    Pages belong to the last record that names them: an older claim can only stand there because the record that ended
    it was lost.
    """
    lost: set[Key] = set()
    claims: list[_Claim] = []
    for number, (key, location) in enumerate(entries.items()):
        size = (location & _MASK) + _ROUND >> _PAGE_BITS
        runs = scattered[key] if place_of(location) == NOWHERE else (Run(place_of(location), size),)
        if all(page_of(place) + count <= pages.get(segment_of(place), 0) for place, count in runs):
            claims += [_Claim(place, count, number, key) for place, count in runs]
        else:
            lost.add(key)
    claims.sort()
    holder: _Claim | None = None
    for claim in claims:
        if holder is not None and claim.place < holder.place + holder.pages:
            lost.add(min(claim, holder, key=lambda each: each.number).key)
            if claim.number < holder.number:
                continue
        holder = claim
    return lost


def free_runs(gaps: list[Gap], pages: Pages) -> Iterator[Run]:
    """What lies between used runs, and at the ends of segments. The gaps must be sound."""
    untouched = dict(pages)
    for end, start in gaps:
        segment, next_segment = end >> _BITS, start >> _BITS
        if segment == next_segment:
            yield Run(Place(end), start - end)
            continue
        if end != _BEFORE and pages[segment] > end & _MASK:
            yield Run(Place(end), pages[segment] - (end & _MASK))
        if untouched.pop(next_segment, 0) and start & _MASK:
            yield Run(place_at(next_segment, 0), start & _MASK)
    for segment, count in untouched.items():
        yield Run(place_at(segment, 0), count)


def cuts_for(excess: int, entries: Entries, used: list[Location], pages: Pages) -> dict[int, int]:
    """Which segments to make how short, so that they have ``excess`` pages less.

    First what is free at their ends, the last segments first. Then whole segments, in the order in which they were last
    written to, and the end of the last of them.
    """
    cuts: dict[int, int] = {}
    ends = {location >> 2 * _BITS: (location >> _BITS & _MASK) + _pages(location) for location in used}
    for segment in sorted(pages, reverse=True):
        tail = min(excess, pages[segment] - ends.get(segment, 0))
        if tail > 0:
            cuts[segment] = pages[segment] - tail
            excess -= tail
    if excess > 0:
        written = {location >> 2 * _BITS: number for number, location in enumerate(entries.values())}
        for segment in sorted(pages, key=lambda each: written.get(each, -1)):
            kept = max(0, cuts.get(segment, pages[segment]) - excess)
            excess -= cuts.get(segment, pages[segment]) - kept
            cuts[segment] = kept
            if excess <= 0:
                break
    return cuts


def _pages(location: Location) -> int:
    return (location & _MASK) + _ROUND >> _PAGE_BITS
