"""Presence hints: bounds, lifetimes, and changes by other threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tierkv_fsspec.presence_hints import ABSENT_S, LISTED_S, AbsentNames, ListedNames

NAMES = [f"{number:032x}" for number in range(100)]


class Clock:
    """Clock that a test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """Clock at some time."""
    return Clock()


def test_a_listed_name_answers_once(clock: Clock) -> None:
    """The framework caches the answer for the configured time; the next lookup must be sent."""
    listed = ListedNames(100, 10.0, clock)
    listed.add_pages([["place/aa/" + NAMES[1], NAMES[2]]])
    assert [listed.take_listed(name) for name in NAMES[:4]] == [False, True, True, False]
    assert [listed.take_listed(name) for name in NAMES[:4]] == [False] * 4


def test_foreign_names_are_skipped(clock: Clock) -> None:
    """Manifests, temporary files and foreign objects are no chunks."""
    listed = ListedNames(100, 10.0, clock)
    listed.add_pages([["namespace.json", "x" * 32, "ab", "", NAMES[1][:-1], "tmp/" + NAMES[3]]])
    assert len(listed) == 1


def test_a_listing_expires(clock: Clock) -> None:
    """Other engines delete: a name that was listed long ago is looked up again."""
    listed = ListedNames(100, 10.0, clock)
    listed.add_pages([NAMES])
    clock.now_s += LISTED_S + 1
    assert not listed.take_listed(NAMES[0])
    assert len(listed) == 0


def pages(clock: Clock, seconds: float, seen: list[int]) -> Iterator[Sequence[str]]:
    """Ten names per page, one page every ``seconds`` seconds."""
    for number in range(10):
        clock.now_s += seconds
        seen.append(number)
        yield NAMES[10 * number : 10 * number + 10]


def test_bounds_end_a_listing(clock: Clock) -> None:
    """Neither a large bucket nor a slow server may prolong the listing: no further page is requested."""
    seen: list[int] = []
    ListedNames(25, 100.0, clock).add_pages(pages(clock, 1.0, seen))
    assert seen == [0, 1, 2]
    seen.clear()
    listed = ListedNames(1000, 5.0, clock)
    listed.add_pages(pages(clock, 2.0, seen))
    assert seen == [0, 1, 2]
    assert len(listed) == 30
    seen.clear()
    listed = ListedNames(1000, 5.0, clock)
    listed.stop()
    listed.add_pages(pages(clock, 0.0, seen))
    assert seen == [0]


def test_memory_is_bounded_to_the_name(clock: Clock) -> None:
    """A page that exceeds the bound is cut."""
    listed = ListedNames(25, 100.0, clock)
    listed.add_pages([NAMES[:20], NAMES[20:]])
    assert len(listed) == 25


def test_changes_by_this_process_override_the_listing(clock: Clock) -> None:
    """A page may be older than a deletion by this process: it must not restore the chunk."""
    listed = ListedNames(100, 10.0, clock)
    listed.forget_name(NAMES[1])
    listed.add_pages([NAMES[:3]])
    assert [listed.take_listed(name) for name in NAMES[:3]] == [True, False, True]
    listed = ListedNames(100, 10.0, clock)
    listed.add_pages([NAMES[:3]])
    listed.forget_name(NAMES[1])
    assert [listed.take_listed(name) for name in NAMES[:3]] == [True, False, True]


def test_an_absence_is_used_once_and_not_for_long(clock: Clock) -> None:
    """It only saves a lookup before an upload; the older it is, the likelier another engine has stored the chunk."""
    absent = AbsentNames(clock)
    absent.note_absent("one")
    absent.note_absent("two")
    assert absent.take_absent("one")
    assert not absent.take_absent("one")
    clock.now_s += ABSENT_S
    assert not absent.take_absent("two")


def test_absences_are_bounded(clock: Clock) -> None:
    """Lookups that never lead to a store must not fill the memory; the oldest names go first."""
    absent = AbsentNames(clock, names_max=3)
    for name in ("one", "two", "three", "one", "four"):
        absent.note_absent(name)
    assert [absent.take_absent(name) for name in ("one", "two", "three", "four")] == [True, False, True, True]
