"""Arithmetic on the pages that a log claims, beside sets of pages."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tierkv.types.keys import Key
from tierkv_disk.extents import PAGE_BYTES, Extent, Run, address_at, extent_at, page_of, segment_of
from tierkv_disk.recovery.claims import free_runs, gaps_between, has_room, is_sound, lost_keys, used_runs
from tierkv_disk.space.table import SCATTERED

PAGES = {0: 40, 1: 25, 5: 60}


def pages_of(runs: Iterable[Run]) -> list[tuple[int, int]]:
    """Segment and page of every page of these runs."""
    return [(segment_of(at), page_of(at) + page) for at, pages in runs for page in range(pages)]


def random_run(chance: random.Random) -> Run:
    """Run in one of the segments, or beyond its end, or in one that does not exist."""
    return Run(address_at(chance.choice((0, 0, 1, 5, 5, 5, 7)), chance.randrange(60)), chance.randrange(1, 4))


@pytest.mark.parametrize("seed", range(60))
def test_claims_agree_with_sets_of_pages(seed: int) -> None:
    """A log contradicts itself only after an error of ours: then frames are lost, and no byte is wrong."""
    chance = random.Random(seed)
    there = {(segment, page) for segment, count in PAGES.items() for page in range(count)}
    runs_of: dict[Key, tuple[Run, ...]] = {}
    taken: set[tuple[int, int]] = set()
    for number in range(chance.randrange(20)):
        runs = tuple(random_run(chance) for _ in range(chance.choice((1, 1, 1, 3))))
        pages = pages_of(runs)
        is_fit = len(set(pages)) == len(pages) and there.issuperset(pages) and taken.isdisjoint(pages)
        if is_fit or chance.random() < 0.05:  # most claims are as they should be
            runs_of[Key(b"%d" % number)] = runs
            taken.update(pages)
    entries: dict[Key, Extent] = {}
    for key, runs in runs_of.items():
        is_whole = len(runs) == 1
        size = sum(run.pages for run in runs) * PAGE_BYTES - is_whole * chance.randrange(PAGE_BYTES)
        entries[key] = extent_at(runs[0].address if is_whole else SCATTERED, size, 0)
    scattered = {key: runs for key, runs in runs_of.items() if len(runs) > 1}
    claimed = [page for runs in runs_of.values() for page in pages_of(runs)]
    is_good = len(set(claimed)) == len(claimed) and there.issuperset(claimed)
    assert is_sound(used_runs(entries, scattered), PAGES) is is_good
    for key in lost_keys(entries, scattered, PAGES):
        del entries[key], runs_of[key]
        scattered.pop(key, None)
    used, left = used_runs(entries, scattered), {page for runs in runs_of.values() for page in pages_of(runs)}
    assert is_sound(used, PAGES)
    assert sorted(pages_of(free_runs(gaps_between(used), PAGES))) == sorted(there - left)
    for run in (random_run(chance) for _ in range(50)):
        pages = pages_of([run])
        assert has_room(used, run, PAGES) is (there.issuperset(pages) and left.isdisjoint(pages))
