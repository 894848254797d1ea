"""Columns: one number per chunk, in memory that grows in place.

A column whose length is not known from the start grows a little at a time, and whatever is in it stays where it is: the
allocator moves the pages of a large one without a copy. So one more chunk costs the same in a tier of a million.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from tierkv.types.keys import Key

GROWTH_NUMBERS = 1024
"""Numbers by which a column grows at once, or more if it is needed."""

RUN_MIN = 8
"""Shortest run of numbers that is worth a slice of each column in place of a loop."""

Code = Literal["H", "I", "Q", "i"]
_CODES: dict[str, Code] = {"H": "H", "I": "I", "Q": "Q", "i": "i"}


def column(code: Code, length: int) -> memoryview[int]:
    """Column of zeros. code: "H", "I" or "Q", an unsigned integer of 2, 4 or 8 bytes; "i", a signed one of 4.

    It is a memory view, because reading and writing take two thirds of the time of an ``array``.
    """
    return memoryview(bytearray(length * array(code).itemsize)).cast(code)


def longer(old: memoryview[int], length: int) -> memoryview[int]:
    """Append zeros to a column up to ``length``. Returns its new view; the old one must not be used any more.

    The memory is the same, unless another component keeps a view of it, as a policy may of the pins that it was given.
    """
    memory, code, added = old.obj, _CODES[old.format], bytes(old.itemsize * (length - len(old)))
    if not isinstance(memory, bytearray):
        raise TypeError("this column was not made by column() or longer()")
    try:
        old.release()
        memory += added
    except BufferError:
        memory = memory + added  # a copy, since it cannot grow
    return memoryview(memory).cast(code)


KeyColumn = npt.NDArray[np.object_]
"""Key by number, 8 bytes each. No garbage collection walks over it, as it would over a list of a million keys."""


def key_column(length: int) -> KeyColumn:
    """Column of empty keys."""
    return np.full(length, Key(b""), np.object_)


def longer_keys(column: KeyColumn, length: int) -> None:
    """Append empty keys to a column up to ``length``, in place: the allocator moves its pages without a copy."""
    before = len(column)
    column.resize(length, refcheck=False)
    column[before:] = Key(b"")


def longer_bytes(old: bytearray, length: int) -> None:
    """Append zeros to a column of bytes up to ``length``, in place."""
    old.extend(bytes(max(0, length - len(old))))


def grown(length: int, needed: int) -> int:
    """Length of a column that has ``length`` numbers and must have ``needed``."""
    return max(needed, length + GROWTH_NUMBERS)


def run_of(numbers: Sequence[int]) -> slice | None:
    """Slice of columns that has just these numbers; None if there are few, or some do not follow one another."""
    count = len(numbers)
    if count < RUN_MIN:
        return None
    first, last = numbers[0], numbers[-1]
    step = 1 if last > first else -1
    if (last - first) * step != count - 1:
        return None
    run = range(first, last + step, step)
    if numbers != run and [*numbers] != [*run]:  # the first comparison finds ranges, of a million as well
        return None
    return slice(first, last + 1) if step > 0 else slice(last, first + 1)
