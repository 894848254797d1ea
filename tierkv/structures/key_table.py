"""Numbers for keys: what is known of a million chunks is in columns by number, without an object per chunk."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tierkv.errors import InvariantError
from tierkv.structures.columns import column, grown, key_column, longer, longer_keys
from tierkv.types.keys import GROUP_BYTES, Key

Shards = list[dict[Key, int]]
"""Key -> number, by ``shards[key[SHARD_BYTE]]``."""

SHARD_BYTE = -GROUP_BYTES - 1
"""Index of the last byte of the hash, before the group index. It differs most where hashes are counters."""

KEY_BYTES_MIN = -SHARD_BYTE
"""Shortest length of a key that contains a hash."""

TABLE_BITS = 16
"""Low bits of a place; they name its table. An integer of up to 60 bits needs no more memory than a small one."""

TABLE_MASK = (1 << TABLE_BITS) - 1
"""Mask of these bits."""


def new_shards() -> Shards:
    """256 empty dicts, one for each value of the shard byte."""
    return [{} for _ in range(256)]


def shards_len(shards: Shards) -> int:
    """Number of keys in all shards together."""
    return sum(map(len, shards))


class IdPool:
    """Pool of numbers from 0 on.

    Args:
        bound: number of numbers, or None for no bound.
    """

    __slots__ = ("_bound", "_given_back", "_just_now", "fresh", "left")

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._just_now: list[int] = []  # a few; the others in an array, which no garbage collection walks
        self._given_back = array("I")
        self.fresh = 0
        """Lowest number that was never taken."""
        self.left = bound or 0
        """Number of free numbers; without a bound, of those that were given back."""

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
            self.left -= count
            return numbers
        if self._bound is not None and count > self.left:
            raise InvariantError(f"{count} numbers are wanted, {self.left} are free")
        self._store_just_now()
        kept = max(0, len(self._given_back) - count)
        numbers = self._given_back[kept:].tolist()
        del self._given_back[kept:]
        new = count - len(numbers)
        numbers += range(self.fresh, self.fresh + new)
        self.fresh += new
        self.left -= count if self._bound is not None else count - new
        return numbers

    def take_one(self) -> int:
        """Take one number; faster than :meth:`take`."""
        if not (self._just_now or self._given_back):
            return self.take(1)[0]
        self.left -= 1
        return (self._just_now or self._given_back).pop()

    def give_back(self, numbers: Sequence[int]) -> None:
        """Make numbers free again."""
        self._store_just_now()
        self._just_now.extend(numbers)
        self.left += len(numbers)

    def _store_just_now(self) -> None:
        if self._just_now:
            self._given_back.extend(self._just_now)
            self._just_now.clear()


class KeyDirectory:
    """Key -> place, one for all tables that share it. A place is a number and its table: ``number << 16 | table``.

    The place of a key that several tables have is in the table that got it last, and leads to the next one. So a key
    costs one lookup, however many tables there are, and one entry, however many of them have it.
    """

    __slots__ = ("shards", "tables")

    def __init__(self) -> None:
        self.shards = new_shards()
        """Key -> place, for hot loops that look up a key themselves."""
        self.tables: list[KeyTable | None] = [None]
        """Tables by their number, from 1 on: a place of 0 means none."""

    def join(self, table: KeyTable) -> int:
        """Add a table. Returns its number.

        Raises:
            InvariantError: the directory has as many tables as a place can name.
        """
        free = [number for number, other in enumerate(self.tables) if number and other is None]
        number = free[0] if free else len(self.tables)
        if number > TABLE_MASK:
            raise InvariantError(f"{TABLE_MASK} tables share a directory; no further one can join it")
        self.tables[number : number + 1] = [table]
        return number

    def leave(self, table: KeyTable) -> None:
        """Remove a table without keys."""
        self.tables[table.index] = None

    def place_after(self, place: int) -> int:
        """Next place of the same key, in another table; 0 if there is none."""
        table = self.tables[place & TABLE_MASK]
        return table.further[place >> TABLE_BITS] if table is not None and table.further else 0

    def places(self, keys: Iterable[Key]) -> list[int]:
        """First place of each key; 0 if it has none."""
        shards = self.shards  # "in" is no call, and get() is one per key
        return [shard[key] if key in (shard := shards[key[SHARD_BYTE]]) else 0 for key in keys]


class KeyTable:
    """Numbers for keys that are added and discarded. All are below ``length``, the size of columns beside it.

    Args:
        directory: shared with other tables that may have the same keys; None: one of its own.
    """

    __slots__ = ("_free", "_keys", "_shards", "directory", "further", "index", "length")

    def __init__(self, directory: KeyDirectory | None = None) -> None:
        self.length = 0
        self.directory = KeyDirectory() if directory is None else directory
        self._shards = self.directory.shards
        self._keys = key_column(0)
        self._free = IdPool(None)
        self.further = column("Q", 0)
        """Place of the same key in another table, by number; 0 if there is none. Empty until a key is in two."""
        self.index = self.directory.join(self)
        """Number of the table in its directory."""

    def __len__(self) -> int:
        """Number of keys."""
        return self._free.fresh - self._free.left

    def items(self) -> Iterator[tuple[Key, int]]:
        """Iterate over the keys with their numbers, in the order of the numbers."""
        return ((key, number) for number in range(self._free.fresh) if (key := self._keys[number]))

    @property
    def numbers_max(self) -> int:
        """Upper bound of all numbers that were ever given."""
        return self._free.fresh

    def find(self, key: Key) -> int | None:
        """Number of a key; None if it has none."""
        place = self._shards[key[SHARD_BYTE]].get(key, 0)
        return place >> TABLE_BITS if place & TABLE_MASK == self.index else self._follow(place)

    def _follow(self, place: int) -> int | None:
        """Number in this table of the key that has a place; None if it has none."""
        index, tables = self.index, self.directory.tables
        while place:
            if place & TABLE_MASK == index:
                return place >> TABLE_BITS
            table = tables[place & TABLE_MASK]  # as place_after(), without a call for each table that has the key
            place = table.further[place >> TABLE_BITS] if table is not None and table.further else 0
        return None

    def find_all(self, keys: Iterable[Key]) -> list[int | None]:
        """Number of each key, or None."""
        index, follow = self.index, self._follow
        return [
            place >> TABLE_BITS if place & TABLE_MASK == index else follow(place) if place else None
            for place in self.directory.places(keys)
        ]

    def known(self, keys: Iterable[Key]) -> list[int]:
        """Numbers of those of ``keys`` that have one."""
        return [number for number in self.find_all(keys) if number is not None]

    def key(self, number: int) -> Key:
        """Key that has the number; empty if the number is free."""
        key: Key = self._keys[number]
        return key

    def add(self, key: Key) -> int:
        """Assign a number to a key that has none."""
        number = self._free.take_one()
        self._grow(number + 1)
        self._keys[number] = key
        shard = self._shards[key[SHARD_BYTE]]
        place = number << TABLE_BITS | self.index
        first = shard.setdefault(key, place)
        if first != place:
            shard[key] = place
            self._lead_to(number, first)
        return number

    def add_new(self, keys: Sequence[Key]) -> range:
        """Assign adjacent numbers to keys that are in no table of the directory, as those of an index at an open.

        Returns:
            The numbers; none if a key is known, or given twice, or numbers were given back: no key is added then.
        """
        if self._free.left:
            return range(0)
        count, first, step, shards = len(keys), self._free.fresh, 1 << TABLE_BITS, self._shards
        places = range(first * step + self.index, (first + count) * step, step)
        before = shards_len(shards)
        for key, place in zip(keys, places, strict=True):
            shards[key[SHARD_BYTE]].setdefault(key, place)
        if shards_len(shards) - before < count:
            for key, place in zip(keys, places, strict=True):
                if shards[key[SHARD_BYTE]].get(key) == place:
                    del shards[key[SHARD_BYTE]][key]
            return range(0)
        self._free.take(count)
        self._grow(first + count)
        self._keys[first : first + count] = keys
        return range(first, first + count)

    def numbers(self, keys: Sequence[Key]) -> list[int]:
        """Numbers of many keys; new ones for those that have none. ``keys`` may contain duplicates."""
        given = self._free.take(len(keys))
        self._grow(1 + max(given, default=-1))
        shards, known_keys, index, numbers, used = self._shards, self._keys, self.index, list[int](), 0
        for key in keys:
            number = given[used]
            place = number << TABLE_BITS | index
            shard = shards[key[SHARD_BYTE]]
            if key in shard:  # neither this nor += is a call
                first = shard[key]
                known = first >> TABLE_BITS if first & TABLE_MASK == index else self._follow(first)
                if known is not None:
                    numbers += (known,)
                    continue
                self._lead_to(number, first)
            shard[key] = place
            known_keys[number] = key
            used += 1
            numbers += (number,)
        if used < len(given):
            self._free.give_back(given[used:])
        return numbers

    def _lead_to(self, number: int, place: int) -> None:
        """Note the next place of a key that has a number here."""
        if not self.further:
            self.further = longer(self.further, self.length)
        self.further[number] = place

    def _grow(self, length: int) -> None:
        if length > self.length:
            self.length = grown(self.length, length)
            longer_keys(self._keys, self.length)
            if self.further:
                self.further = longer(self.further, self.length)

    def discard(self, number: int) -> None:
        """Remove a number and its key."""
        key = self._keys[number]
        self._keys[number] = Key(b"")
        self._free.give_back([number])
        shard, place, further = self._shards[key[SHARD_BYTE]], number << TABLE_BITS | self.index, 0
        if self.further:
            further, self.further[number] = self.further[number], 0
        first = shard[key]
        if first == place:
            if further:
                shard[key] = further
            else:
                del shard[key]
            return
        while (after := self.directory.place_after(first)) != place:
            first = after
        before = self.directory.tables[first & TABLE_MASK]
        if before is not None:
            before.further[first >> TABLE_BITS] = further
