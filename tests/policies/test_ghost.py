"""Ghosts against a naive queue."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from naive_ghosts import NaiveGhosts

from tierkv.policies.ghost import BUCKET_GHOSTS, MARK_BYTES, GhostTable, mark_of
from tierkv.types.keys import Key, make_key

MARKS = st.sampled_from([0, 1, 256, 0x01000000, 0x01010101, 0x00010000, 2**31 - 1, 7, 8, 9, 32, 64])
"""Some look like the seam between two others; some share a bucket of the larger tables, some do not."""


@given(
    ghosts_max=st.sampled_from([0, 1, 2, 3, 5, 2 * BUCKET_GHOSTS + 1]),
    note_bytes=st.integers(0, 2),
    verbs=st.lists(st.tuples(st.sampled_from(["push", "pop", "get", "drop"]), MARKS, st.integers(0, 255)), max_size=80),
)
def test_it_is_a_queue(ghosts_max: int, note_bytes: int, verbs: list[tuple[str, int, int]]) -> None:
    """Ghosts in buckets must be dropped in the same order as in one list."""
    table, queue = GhostTable(ghosts_max, note_bytes), NaiveGhosts(ghosts_max)
    for verb, mark, number in verbs:
        note = bytes([number] * note_bytes)
        if verb == "push":
            queue.push(mark, note)
            table.extend((mark,), note)
        elif verb == "pop":
            assert table.pop(mark) == queue.pop(mark)
        elif verb == "get":
            assert table.get(mark) == queue.get(mark)
        else:
            queue.drop_oldest()
            table.drop_oldest()
        assert len(table) == len(queue)
        assert (mark in table) == (mark in queue)


def test_many_ghosts_in_many_buckets() -> None:
    """The order must hold across hundreds of buckets, while a third of the ghosts is found early."""
    randomness = random.Random(5)
    table, queue = GhostTable(500), NaiveGhosts(500)
    marks = [mark_of(make_key(number.to_bytes(8, "big"), 0)) for number in range(3_000)]
    for number, mark in enumerate(marks):
        table.extend((mark,))
        queue.push(mark)
        if number % 3 == 0:
            found = marks[max(0, number - randomness.randrange(600))]
            assert table.pop(found) == queue.pop(found)
    assert [mark in table for mark in marks] == [mark in queue for mark in marks]
    assert sum(mark in table for mark in marks) == len(table)


def test_marks_that_look_like_a_seam_are_told_apart() -> None:
    """Two neighbours in a bucket can spell a third mark at their border; it must not be found, nor removed."""
    table = GhostTable(4)
    table.extend((0x01000000,))  # 00 00 00 01
    table.extend((0x00000002,))  # 02 00 00 00
    seam = int.from_bytes(b"\x00\x01\x02\x00", "little")
    assert seam not in table
    assert table.pop(seam) is None
    table.extend((seam,))
    assert table.pop(seam) == b""
    assert len(table) == 2


def test_holes_are_bounded() -> None:
    """One ghost is never requested, and all behind it are found: memory must not grow, so it is dropped in the end."""
    table = GhostTable(100)
    table.extend((1,))
    for mark in range(2, 10_000):
        table.extend((mark,))
        assert table.pop(mark) == b""
    assert 1 not in table
    assert sum(map(len, table._buckets)) <= 200 * MARK_BYTES
    assert len(table._turns) <= 402


def test_a_smaller_bound_takes_effect() -> None:
    """Policies whose memory follows the number of residents change the bound while it is in use."""
    table = GhostTable(10)
    for mark in range(10):
        table.extend((mark,))
    table.ghosts_max = 3
    table.extend((10,))
    assert [mark for mark in range(11) if mark in table] == [8, 9, 10]


def test_mark_is_the_same_in_every_process() -> None:
    """A mark that depends on the process's hash seed would make no replay repeatable."""
    assert mark_of(Key(b"tierkv")) == mark_of(Key(bytes(bytearray(b"tierkv")))) == 470995837
