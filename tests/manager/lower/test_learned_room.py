"""A tier that is full below its capacity keeps a smaller room, and tries in steps whether it may have more."""

from __future__ import annotations

import pytest

from tierkv.manager.lower.learned_room import EVICTED_FRAMES_MAX, RETRY_S, STEP_FRAMES, USED_RETRY_S, LearnedRoom

FRAME = 100


def refused_twice(room: LearnedRoom, used: int, now: float) -> None:
    """Two operations that find no room, one after the other."""
    room.refused(used, FRAME, now - 0.01)
    room.refused(used, FRAME, now)


def test_one_refusal_costs_no_room() -> None:
    """One failed sync that said "no space" cost a tier with a fifth of its capacity in use two thirds of its writes."""
    room = LearnedRoom(10_000)
    for now in (0.0, 0.0, RETRY_S, 2 * RETRY_S):  # an operation of two frames, and others much later
        assert room.refused(4_000, FRAME, now)
        assert room.bytes == 10_000
    room.refused(5_000, FRAME, 3 * RETRY_S - 0.1)
    assert room.bytes == 5_000
    room.refused(4_500, FRAME, 9 * RETRY_S)
    assert room.bytes == 4_500, "a room that is known is the place of a full disk"


@pytest.mark.parametrize("capacity", [None, 10_000])
def test_the_room_is_what_was_stored(capacity: int | None) -> None:
    """Refusals are the only sign of a small disk; bytes that are stored at that moment certainly fit."""
    room = LearnedRoom(capacity)
    assert room.bytes == capacity
    refused_twice(room, 4_000, 0.0)
    assert room.bytes == 4_000
    room.refused(5_000, FRAME, 1.0)
    assert room.bytes == 4_000, "deletions under way may have made room that is taken again"
    room.refused(0, FRAME, 2.0)
    assert room.bytes == STEP_FRAMES * FRAME, "a write is always tried, so that the end of a full disk is noticed"


def test_room_is_won_back_in_growing_steps() -> None:
    """A disk that was cleared is used again, and one that is still full refuses a few frames at a time."""
    room = LearnedRoom(10_000)
    refused_twice(room, 4_000, 0.0)
    room.retry(4_000, RETRY_S - 0.1)
    assert room.bytes == 4_000
    found = []
    for attempt in range(1, 5):
        room.retry(4_000, attempt * RETRY_S)
        room.retry(4_000, attempt * RETRY_S)
        found.append(room.bytes)
    assert found == [
        4_000 + STEP_FRAMES * FRAME,
        4_000 + 3 * STEP_FRAMES * FRAME,
        4_000 + 7 * STEP_FRAMES * FRAME,
        10_000,
    ]
    refused_twice(room, 6_000, 100.0)
    room.retry(6_000, 100.0 + RETRY_S)
    assert room.bytes == 6_000 + STEP_FRAMES * FRAME, "the step after a refusal is the shortest"


def test_room_that_is_used_grows_at_once() -> None:
    """A disk that was full for a second cost a tier a tenth of its hits for a minute, as room came back so slowly."""
    room, used = LearnedRoom(1_000_000), 400_000
    refused_twice(room, used, 0.0)
    for second in range(25):
        room.retry(used, float(second))
        used = min(used + 10 * FRAME, room.bytes or 0)  # the writes of a second
    assert used == 400_000 + 148 * FRAME, "no eviction from the second step on"
    room.refused(used, FRAME, 25.0)
    refused_room = room.bytes
    for second in range(10):
        room.retry(used, 25.0 + second)
    assert room.bytes == refused_room, "a refusal shows nothing but that the disk is full"
    room.retry(used, 25.0 + RETRY_S)
    room.retry(used, 25.0 + RETRY_S + USED_RETRY_S)
    assert room.bytes == used + STEP_FRAMES * FRAME, "a step that no write has used shows nothing"


def test_a_tier_without_a_bound_is_bounded_for_a_while() -> None:
    """Without a capacity the disk alone bounds the tier."""
    room = LearnedRoom(None)
    refused_twice(room, 4_000, 0.0)
    room.retry(4_000, RETRY_S)
    assert room.bytes == 4_000 + STEP_FRAMES * FRAME


def test_evictions_that_make_no_room_end() -> None:
    """A disk that is full of the files of others for a minute once cost the tier all of its chunks, one per write."""
    room, used = LearnedRoom(100_000), 50_000
    room.refused(used, FRAME, -0.01)
    for _ in range(10 * EVICTED_FRAMES_MAX):
        used -= FRAME * room.refused(used, FRAME, 0.0)
    assert used == 50_000 - EVICTED_FRAMES_MAX * FRAME
    assert room.bytes == used, "no further write evicts for itself, either"
    used -= FRAME * room.refused(used, FRAME, RETRY_S)
    assert used == 50_000 - (EVICTED_FRAMES_MAX + 1) * FRAME, "a disk that has become smaller is followed"


def test_evictions_go_on_while_writes_succeed() -> None:
    """Evictions that do make room let a tier of any size give way to a smaller disk."""
    room, used = LearnedRoom(100_000), 50_000
    for _ in range(10 * EVICTED_FRAMES_MAX):
        assert room.refused(used, FRAME, 0.0)
        used -= FRAME
        used += 2 * FRAME  # the next writes
