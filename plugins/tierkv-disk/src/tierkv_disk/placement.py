"""From what the log says to what lies where: claims that contradict each other, space that is free, segments to cut.

All of it looks at places in the order in which they lie on the disk. Written for speed: there may be millions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
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


def is_sound(used: list[Location], pages: Pages) -> bool:
    """Whether all runs lie in segments that are there, and none in another."""
    end = segment = 0
    limit = pages.get(0, 0)
    for location in used:
        place = location >> _BITS
        if place < end:
            return False
        if place >> _BITS != segment:
            segment = place >> _BITS
            limit = (segment << _BITS) + pages.get(segment, 0)
        end = place + ((location & _MASK) + _ROUND >> _PAGE_BITS)
        if end > limit:
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


def free_runs(used: list[Location], pages: Pages) -> Iterator[Run]:
    """The gaps between used runs, and the ends of segments. The runs must be sound."""
    left = dict(pages)
    segment, next_page = -1, 0
    for location in used:
        place = location >> _BITS
        if place >> _BITS != segment:
            yield from _tail(segment, next_page, left)
            segment, next_page = place >> _BITS, 0
        page = place & _MASK
        if page > next_page:
            yield Run(place_at(segment, next_page), page - next_page)
        next_page = page + ((location & _MASK) + _ROUND >> _PAGE_BITS)
    yield from _tail(segment, next_page, left)
    for untouched in list(left):
        yield from _tail(untouched, 0, left)


def _tail(segment: int, next_page: int, left: dict[int, int]) -> Iterator[Run]:
    pages = left.pop(segment, 0)
    if pages > next_page:
        yield Run(place_at(segment, next_page), pages - next_page)


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
