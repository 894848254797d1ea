"""Columns: what is known of a million chunks, kept by number instead of in an object per chunk.

Two things of Python decide the shapes here. A dict that is full rebuilds itself at once, so one of a million keys stops
the engine's thread for 60 ms: :func:`new_shards` spreads keys over 256 smaller ones. And a full garbage collection
walks over every list, element by element (60 ms a million), but not over a dict from numbers to bytes, nor over a
memory view: so no column here is a list.
"""

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
"""The last byte of the hash, just before the group index: of a counter it is the one that differs most."""

KEY_BYTES_MIN = -SHARD_BYTE
"""A shorter key carries no hash."""

PAGE_KEYS = 170
"""Keys per page: exactly what a dict with 256 places takes before it grows."""

GROWTH_NUMBERS_MIN = 4096
"""Columns whose length is not known from the start grow by this many numbers, or by an eighth if that is more."""


def new_shards() -> Shards:
    """256 empty dicts: one for each value of the byte that tells them apart."""
    return [{} for _ in range(256)]


def shards_len(shards: Shards) -> int:
    """Keys in all shards together."""
    return sum(map(len, shards))


def column(code: Literal["H", "I", "Q"], length: int) -> memoryview[int]:
    """Zeros, one per number. code: "H", "I" or "Q", an unsigned integer of 2, 4 or 8 bytes.

    A memory view, because it reads and writes in two thirds of an ``array``'s time.
    """
    return memoryview(bytearray(length * array(code).itemsize)).cast(code)


def longer(old: memoryview[int], length: int) -> memoryview[int]:
    """A copy of a column with zeros behind it; the old one is of no use any more."""
    new = column("I" if old.itemsize == column("I", 1).itemsize else "Q", length)
    new[: len(old)] = old
    return new


class KeyColumn:
    """Number -> key. ``pages[number // PAGE_KEYS][number % PAGE_KEYS]`` is what hot loops write themselves.

    A page is a dict from small integers, which every Python shares, so an entry costs 26 bytes (a list's 8 would cost
    every full collection a walk over all keys).
    """

    __slots__ = ("pages",)

    def __init__(self, length: int) -> None:
        self.pages: list[dict[int, Key]] = []
        self.grow(length)

    def grow(self, length: int) -> None:
        """Have room for this many numbers."""
        empty = Key(b"")
        while len(self.pages) * PAGE_KEYS < length:
            self.pages.append(dict.fromkeys(range(PAGE_KEYS), empty))

    def __getitem__(self, number: int) -> Key:
        """The key of a number; empty if it never had one."""
        return self.pages[number // PAGE_KEYS][number % PAGE_KEYS]

    def __setitem__(self, number: int, key: Key) -> None:
        """Give a number its key."""
        self.pages[number // PAGE_KEYS][number % PAGE_KEYS] = key


class IdPool:
    """Which numbers from 0 on are free. ``bound``: how many there are; None: as many as are asked for."""

    __slots__ = ("_bound", "_given_back", "_just_now", "fresh")

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._just_now: list[int] = []  # a few; the others in an array, which no garbage collection walks
        self._given_back = array("I")
        self.fresh = 0
        """Numbers from here on were never taken."""

    def __len__(self) -> int:
        """How many can be taken; without a bound, how many were given back."""
        return len(self._just_now) + len(self._given_back) + (0 if self._bound is None else self._bound - self.fresh)

    def __iter__(self) -> Iterator[int]:
        """Those that were taken once and given back."""
        return chain(self._just_now, self._given_back)

    def take(self, count: int) -> list[int]:
        """So many numbers; those that were given back last come first.

        Raises:
            InvariantError: there are not so many.
        """
        if count == len(self._just_now):  # as in every store into a full tier
            numbers, self._just_now = self._just_now, []
            return numbers
        self._put_by()
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
        """The number that :meth:`take` would give."""
        if self._just_now:
            return self._just_now.pop()
        return self._given_back.pop() if self._given_back else self.take(1)[0]

    def give_back(self, numbers: Sequence[int]) -> None:
        """These are free again."""
        self._put_by()
        self._just_now.extend(numbers)

    def _put_by(self) -> None:
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
        """Keys that have a number."""
        return sum(map(len, self.shards))

    def items(self) -> Iterator[tuple[Key, int]]:
        """Every key with its number, in no order."""
        return chain.from_iterable(shard.items() for shard in self.shards)

    def find(self, key: Key) -> int | None:
        """The number of a key."""
        return self.shards[key[SHARD_BYTE]].get(key)

    def find_all(self, keys: Iterable[Key]) -> list[int | None]:
        """The number of each key."""
        shards = self.shards
        return [shards[key[SHARD_BYTE]].get(key) for key in keys]

    def known(self, keys: Iterable[Key]) -> list[int]:
        """The numbers of those of ``keys`` that have one."""
        return [number for number in self.find_all(keys) if number is not None]

    def key(self, number: int) -> Key:
        """The key of a number."""
        return self._keys[number]

    def add(self, key: Key) -> int:
        """Give a number to a key that has none."""
        number = self._free.take_one()
        self._grow(number + 1)
        self._keys[number] = key
        self.shards[key[SHARD_BYTE]][key] = number
        return number

    def numbers(self, keys: Sequence[Key]) -> list[int]:
        """The numbers of many keys; new ones for those that have none. ``keys`` may name one twice."""
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
        """Take a key's number away."""
        key = self._keys[number]
        del self.shards[key[SHARD_BYTE]][key]
        self._keys[number] = Key(b"")
        self._free.give_back([number])
