"""Flags in shared memory that report the end of a job when the engine's reports do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierkv.worker.completion_flags import JOBS_MAX, STORES_MAX, CompletionFlags, RankFlags


@pytest.fixture
def flags() -> Iterator[CompletionFlags]:
    """Flags of two workers."""
    flags = CompletionFlags(2)
    yield flags
    flags.close()


def test_a_job_has_ended_when_every_worker_has_flagged_it(flags: CompletionFlags) -> None:
    """After the flag of one worker the other may still read the slot."""
    ranks = [RankFlags(flags.handle, 2, rank) for rank in range(2)]
    first, second = flags.allocate(is_store=True), flags.allocate(is_store=False)
    ranks[0].set_ended(first)
    assert not flags.has_ended(first)
    ranks[1].set_ended(first)
    assert flags.has_ended(first)
    assert not flags.has_ended(second)
    for rank in ranks:
        rank.close()


def test_a_job_that_a_worker_could_not_complete_has_ended_without_success(flags: CompletionFlags) -> None:
    """Its slots are free, because nothing copies any more, but the engine must not use what the other worker copied."""
    ranks = [RankFlags(flags.handle, 2, rank) for rank in range(2)]
    number = flags.allocate(is_store=False)
    ranks[0].set_ended(number)
    assert not flags.has_succeeded(number)
    assert not flags.has_failed(number)
    ranks[1].set_ended(number, success=False)
    assert flags.has_ended(number)
    assert flags.has_failed(number)
    assert not flags.has_succeeded(number)
    ranks[1].set_ended(number)
    assert flags.has_succeeded(number)
    assert not flags.has_failed(number)
    for rank in ranks:
        rank.close()


def test_a_reused_cell_does_not_flag_the_new_job(flags: CompletionFlags) -> None:
    """Cells are not cleared: the flag of the previous job must not count for the current one."""
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
    """No later job gets the cell of a job in flight, however many there are."""
    kept = flags.allocate(is_store=False)
    for _ in range(2 * JOBS_MAX):
        number = flags.allocate(is_store=True)
        assert number % JOBS_MAX != kept % JOBS_MAX
        flags.release(number)


def test_stores_cannot_take_the_numbers_of_loads(flags: CompletionFlags) -> None:
    """A store can be refused, a promised load cannot. Job 0 never ends."""
    stores = [flags.allocate(is_store=True) for _ in range(STORES_MAX)]
    assert 0 not in stores
    assert flags.allocate(is_store=True) == 0
    loads = [flags.allocate(is_store=False) for _ in range(JOBS_MAX - STORES_MAX)]
    assert 0 not in loads
    assert flags.allocate(is_store=False) == 0
    assert not flags.has_ended(0)
    flags.release(stores[0])
    assert flags.allocate(is_store=True)
