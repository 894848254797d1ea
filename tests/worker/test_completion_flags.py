"""Marks in shared memory: what tells that a transfer has ended when the engine's reports do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierkv.worker.completion_flags import JOBS_MAX, STORES_MAX, CompletionFlags, RankFlags


@pytest.fixture
def flags() -> Iterator[CompletionFlags]:
    """Of two workers."""
    flags = CompletionFlags(2)
    yield flags
    flags.close()


def test_a_job_has_ended_when_every_worker_says_so(flags: CompletionFlags) -> None:
    """One worker's mark is not enough: the other may still read the slot."""
    ranks = [RankFlags(flags.handle, 2, rank) for rank in range(2)]
    first, second = flags.allocate(is_store=True), flags.allocate(is_store=False)
    ranks[0].set_ended(first)
    assert not flags.has_ended(first)
    ranks[1].set_ended(first)
    assert flags.has_ended(first)
    assert not flags.has_ended(second)
    for rank in ranks:
        rank.close()


def test_a_cell_that_is_used_again_says_nothing_of_the_new_job(flags: CompletionFlags) -> None:
    """Cells are not cleared: the mark of the job before must not pass for that of the one now."""
    ranks = [RankFlags(flags.handle, 2, rank) for rank in range(2)]
    old = flags.allocate(is_store=True)
    for rank in ranks:
        rank.set_ended(old)
    flags.release(old)
    for _ in range(JOBS_MAX - 1):
        flags.release(flags.allocate(is_store=True))
    new = flags.allocate(is_store=True)
    assert new % JOBS_MAX == old % JOBS_MAX
    assert not flags.has_ended(new)
    for rank in ranks:
        rank.close()


def test_a_job_in_flight_keeps_its_cell(flags: CompletionFlags) -> None:
    """However many jobs come and go, none gets the cell of one that may still end."""
    kept = flags.allocate(is_store=False)
    for _ in range(2 * JOBS_MAX):
        number = flags.allocate(is_store=True)
        assert number % JOBS_MAX != kept % JOBS_MAX
        flags.release(number)


def test_stores_leave_numbers_for_loads(flags: CompletionFlags) -> None:
    """A store can be refused, a load that was promised cannot. And 0 never ends."""
    stores = [flags.allocate(is_store=True) for _ in range(STORES_MAX)]
    assert 0 not in stores
    assert flags.allocate(is_store=True) == 0
    loads = [flags.allocate(is_store=False) for _ in range(JOBS_MAX - STORES_MAX)]
    assert 0 not in loads
    assert flags.allocate(is_store=False) == 0
    assert not flags.has_ended(0)
    flags.release(stores[0])
    assert flags.allocate(is_store=True)
