"""Ghosts against a naive queue, and what many buckets do to their order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.policies.ghost import BUCKET_GHOSTS, GhostTable, mark_of
from tierkv.types.keys import Key, make_key

MARKS = st.sampled_from([0, 1, 256, 0x01000000, 0x01010101, 0x00010000, 2**32 - 1, 7, 8, 9])
"""Some look like the seam between two others."""


@given(
    ghosts_max=st.integers(0, 5),
    note_bytes=st.integers(0, 2),
    verbs=st.lists(st.tuples(st.sampled_from(["push", "pop", "get", "drop"]), MARKS, st.integers(0, 255)), max_size=60),
)
def test_one_bucket_is_a_queue(ghosts_max: int, note_bytes: int, verbs: list[tuple[str, int, int]]) -> None:
    """Policies are compared with their textbooks through this table, so up to a bucket it has to be a queue exactly."""
    table, queue = GhostTable(ghosts_max, note_bytes), dict[int, bytes]()
    for verb, mark, number in verbs:
        note = bytes([number] * note_bytes)
        if verb == "push":
            queue.pop(mark, None)
            queue[mark] = note
            while len(queue) > ghosts_max:
                del queue[next(iter(queue))]
            table.push(mark, note)
        elif verb == "pop":
            assert table.pop(mark) == queue.pop(mark, None)
        elif verb == "get":
            assert table.get(mark) == queue.get(mark)
        else:
            if queue:
                del queue[next(iter(queue))]
            table.drop_oldest(mark)
        assert len(table) == len(queue)
        assert (mark in table) == (mark in queue)


def test_marks_that_look_like_a_seam_are_told_apart() -> None:
    """Two neighbours in a bucket can spell a third mark where they meet; it must not be found, nor cut out."""
    table = GhostTable(4)
    table.push(0x01000000)  # 00 00 00 01
    table.push(0x00000002)  # 02 00 00 00
    seam = int.from_bytes(b"\x00\x01\x02\x00", "little")
    assert seam not in table
    assert table.pop(seam) is None
    table.push(seam)
    assert table.pop(seam) == b""
    assert len(table) == 2


@pytest.mark.parametrize("ghosts_max", [1_000, 20_000])
def test_many_buckets_remember_about_as_long_as_one_queue(ghosts_max: int) -> None:
    """A table that forgot the young and kept the old would make every policy over it worse, without any error."""
    table = GhostTable(ghosts_max)
    marks = [mark_of(make_key(number.to_bytes(8, "big"), 0)) for number in range(5 * ghosts_max)]
    for mark in marks:
        table.push(mark)
    assert len(table) == ghosts_max
    newest_first = marks[::-1]
    young = sum(mark in table for mark in newest_first[: ghosts_max // 2])
    old = sum(mark in table for mark in newest_first[2 * ghosts_max :])
    assert young > 0.98 * (ghosts_max // 2)
    assert old < 0.02 * ghosts_max


def test_buckets_stay_about_equally_full() -> None:
    """Ghosts that are found leave anywhere; a bucket that grew without bound would make each look into it slow."""
    ghosts_max, randomness = 3_200, random.Random(5)
    table = GhostTable(ghosts_max)
    marks = [randomness.getrandbits(32) for _ in range(60_000)]
    for number, mark in enumerate(marks):
        table.push(mark)
        if number % 3 == 0:
            table.pop(marks[max(0, number - randomness.randrange(ghosts_max))])
    longest = max(len(bucket) for bucket in table._buckets) // 4
    assert longest < 2 * BUCKET_GHOSTS


def test_a_smaller_bound_takes_effect() -> None:
    """Policies whose memory follows the number of residents change the bound while it is in use."""
    table = GhostTable(10)
    for mark in range(10):
        table.push(mark)
    table.ghosts_max = 3
    table.push(10)
    assert [mark for mark in range(11) if mark in table] == [8, 9, 10]


def test_mark_is_the_same_in_every_process() -> None:
    """A mark that hung on the process's hash seed would make no replay repeatable."""
    assert mark_of(Key(b"tierkv")) == mark_of(Key(bytes(bytearray(b"tierkv")))) == 941991674
