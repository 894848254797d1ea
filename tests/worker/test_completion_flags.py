"""Marks in shared memory: what tells that a transfer has ended when the engine's reports do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierkv.worker.completion_flags import JOBS_MAX, STORES_MAX, CompletionFlags, Marks


@pytest.fixture
def book() -> Iterator[CompletionFlags]:
    """Of two workers."""
    book = CompletionFlags(2)
    yield book
    book.close()


def test_a_job_has_ended_when_every_worker_says_so(book: CompletionFlags) -> None:
    """One worker's mark is not enough: the other may still read the slot."""
    ranks = [Marks(book.handle, 2, rank) for rank in range(2)]
    first, second = book.new(is_store=True), book.new(is_store=False)
    ranks[0].end(first)
    assert not book.ended(first)
    ranks[1].end(first)
    assert book.ended(first)
    assert not book.ended(second)
    for rank in ranks:
        rank.close()


def test_a_cell_that_is_used_again_says_nothing_of_the_new_job(book: CompletionFlags) -> None:
    """Cells are not cleared: the mark of the job before must not pass for that of the one now."""
    ranks = [Marks(book.handle, 2, rank) for rank in range(2)]
    old = book.new(is_store=True)
    for rank in ranks:
        rank.end(old)
    book.free(old)
    for _ in range(JOBS_MAX - 1):
        book.free(book.new(is_store=True))
    new = book.new(is_store=True)
    assert new % JOBS_MAX == old % JOBS_MAX
    assert not book.ended(new)
    for rank in ranks:
        rank.close()


def test_a_job_in_flight_keeps_its_cell(book: CompletionFlags) -> None:
    """However many jobs come and go, none gets the cell of one that may still end."""
    kept = book.new(is_store=False)
    for _ in range(2 * JOBS_MAX):
        number = book.new(is_store=True)
        assert number % JOBS_MAX != kept % JOBS_MAX
        book.free(number)


def test_stores_leave_numbers_for_loads(book: CompletionFlags) -> None:
    """A store can be refused, a load that was promised cannot. And 0 never ends."""
    stores = [book.new(is_store=True) for _ in range(STORES_MAX)]
    assert 0 not in stores
    assert book.new(is_store=True) == 0
    loads = [book.new(is_store=False) for _ in range(JOBS_MAX - STORES_MAX)]
    assert 0 not in loads
    assert book.new(is_store=False) == 0
    assert not book.ended(0)
    book.free(stores[0])
    assert book.new(is_store=True)
