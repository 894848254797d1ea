"""Numbers for keys, and columns by number: what is known of a million chunks without an object per chunk."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

from tierkv.errors import InvariantError
from tierkv.types.keys import GROUP_BYTES, Key

Shards = list[dict[Key, int]]
"""Key -> number, by ``shards[key[SHARD_BYTE]]``."""

SHARD_BYTE = -GROUP_BYTES - 1
"""Index of the last byte of the hash, before the group index. It differs most where hashes are counters."""

KEY_BYTES_MIN = -SHARD_BYTE
"""Shortest length of a key that contains a hash."""

PAGE_KEYS = 170
"""Keys per page: the most that a dict with 256 places takes before it grows."""

GROWTH_NUMBERS_MIN = 4096
"""Columns whose length is not known from the start grow by this many numbers, or by an eighth if that is more."""


def new_shards() -> Shards:
    """256 empty dicts, one for each value of the shard byte."""
    return [{} for _ in range(256)]


def shards_len(shards: Shards) -> int:
    """Number of keys in all shards together."""
    return sum(map(len, shards))


def column(code: Literal["H", "I", "Q"], length: int) -> memoryview[int]:
    """Column of zeros. code: "H", "I" or "Q", an unsigned integer of 2, 4 or 8 bytes.

    It is a memory view, because reading and writing take two thirds of the time of an ``array``.
    """
    return memoryview(bytearray(length * array(code).itemsize)).cast(code)


def longer(old: memoryview[int], length: int) -> memoryview[int]:
    """Copy of a column with zeros appended up to ``length``. The old column must not be used any more."""
    new = column("I" if old.itemsize == column("I", 1).itemsize else "Q", length)
    new[: len(old)] = old
    return new


class KeyColumn:
    """Column of keys. Hot loops read ``pages[number // PAGE_KEYS][number % PAGE_KEYS]`` themselves.

    A page is a dict from small integers, which the interpreter shares, so an entry costs 26 bytes. In a list it would
    cost 8, but every full garbage collection would walk over all keys.
    """

    __slots__ = ("pages",)

    def __init__(self, length: int) -> None:
        self.pages: list[dict[int, Key]] = []
        self.grow(length)

    def grow(self, length: int) -> None:
        """Grow to ``length`` numbers at least."""
        empty = Key(b"")
        while len(self.pages) * PAGE_KEYS < length:
            self.pages.append(dict.fromkeys(range(PAGE_KEYS), empty))

    def __getitem__(self, number: int) -> Key:
        """Key of a number; empty if it never had one."""
        return self.pages[number // PAGE_KEYS][number % PAGE_KEYS]

    def __setitem__(self, number: int, key: Key) -> None:
        """Set the key of a number."""
        self.pages[number // PAGE_KEYS][number % PAGE_KEYS] = key


class IdPool:
    """Pool of numbers from 0 on.

    Args:
        bound: number of numbers, or None for no bound.
    """

    __slots__ = ("_bound", "_given_back", "_just_now", "fresh")

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._just_now: list[int] = []  # a few; the others in an array, which no garbage collection walks
        self._given_back = array("I")
        self.fresh = 0
        """Lowest number that was never taken."""

    def __len__(self) -> int:
        """Number of free numbers; without a bound, of those that were given back."""
        return len(self._just_now) + len(self._given_back) + (0 if self._bound is None else self._bound - self.fresh)

    def __iter__(self) -> Iterator[int]:
        """Iterate over free numbers that were taken before."""
        return chain(self._just_now, self._given_back)

    def take(self, count: int) -> list[int]:
        """Take ``count`` numbers; those that were given back last come first.

        Raises:
            InvariantError: fewer are free.
        """
        if count == len(self._just_now):  # the common case: a store into a full tier
            numbers, self._just_now = self._just_now, []
            return numbers
        self._store_just_now()
        reused = min(count, len(self._given_back))
        left = len(self._given_back) - reused
        numbers = self._given_back[left:].tolist()
        new = count - reused
        if self._bound is not None and self.fresh + new > self._bound:
            raise InvariantError(f"{count} numbers are wanted, {len(self)} are free")
        del self._given_back[left:]
        numbers.extend(range(self.fresh, self.fresh + new))
        self.fresh += new
        return numbers

    def take_one(self) -> int:
        """Take one number; faster than :meth:`take`."""
        if self._just_now:
            return self._just_now.pop()
        return self._given_back.pop() if self._given_back else self.take(1)[0]

    def give_back(self, numbers: Sequence[int]) -> None:
        """Make numbers free again."""
        self._store_just_now()
        self._just_now.extend(numbers)

    def _store_just_now(self) -> None:
        self._given_back.extend(self._just_now)
        self._just_now.clear()


class KeyTable:
    """Numbers for keys that are added and discarded. All are below ``length``, the size of columns beside it."""

    __slots__ = ("_free", "_keys", "length", "shards")

    def __init__(self) -> None:
        self.length = 0
        self.shards = new_shards()
        """Key -> number, for hot loops that look up a key themselves."""
        self._keys = KeyColumn(0)
        self._free = IdPool(None)

    def __len__(self) -> int:
        """Number of keys."""
        return sum(map(len, self.shards))

    def items(self) -> Iterator[tuple[Key, int]]:
        """Iterate over the keys with their numbers, in no order."""
        return chain.from_iterable(shard.items() for shard in self.shards)

    def find(self, key: Key) -> int | None:
        """Number of a key; None if it has none."""
        return self.shards[key[SHARD_BYTE]].get(key)

    def find_all(self, keys: Iterable[Key]) -> list[int | None]:
        """Number of each key, or None."""
        shards = self.shards
        return [shards[key[SHARD_BYTE]].get(key) for key in keys]

    def known(self, keys: Iterable[Key]) -> list[int]:
        """Numbers of those of ``keys`` that have one."""
        return [number for number in self.find_all(keys) if number is not None]

    def key(self, number: int) -> Key:
        """Key that has the number; empty if the number is free."""
        return self._keys[number]

    def add(self, key: Key) -> int:
        """Assign a number to a key that has none."""
        number = self._free.take_one()
        self._grow(number + 1)
        self._keys[number] = key
        self.shards[key[SHARD_BYTE]][key] = number
        return number

    def numbers(self, keys: Sequence[Key]) -> list[int]:
        """Numbers of many keys; new ones for those that have none. ``keys`` may contain duplicates."""
        given = self._free.take(len(keys))
        self._grow(1 + max(given, default=-1))
        shards, pages, numbers, used = self.shards, self._keys.pages, [], 0
        for key in keys:
            number = shards[key[SHARD_BYTE]].setdefault(key, given[used])
            if number == given[used]:
                pages[number // PAGE_KEYS][number % PAGE_KEYS] = key
                used += 1
            numbers.append(number)
        if used < len(given):
            self._free.give_back(given[used:])
        return numbers

    def _grow(self, length: int) -> None:
        if length > self.length:
            self.length = max(length, self.length + max(GROWTH_NUMBERS_MIN, self.length // 8))
            self._keys.grow(self.length)

    def discard(self, number: int) -> None:
        """Remove a number and its key."""
        key = self._keys[number]
        del self.shards[key[SHARD_BYTE]][key]
        self._keys[number] = Key(b"")
        self._free.give_back([number])
