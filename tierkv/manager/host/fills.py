"""Slots that I/O is filling, and from where: store jobs of the engine, or reads of lower tiers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from tierkv.errors import InvariantError
from tierkv.structures.columns import column, run_of
from tierkv.types.cache_events import HOST

_STORED = 1
_SOURCES_MAX = 1 << 16


class Fills:
    """Source of the I/O that fills each slot. Sans-IO; every question is O(1) per slot.

    A column, because a set or dict of as many slots as wait for reads would grow in one call, for milliseconds.
    """

    __slots__ = ("_names", "_numbers", "_sources", "num_reading", "num_storing")

    def __init__(self, num_slots: int) -> None:
        self._sources = column("H", num_slots)  # 0: no I/O fills the slot
        self._names = ["", HOST]
        self._numbers = {HOST: _STORED}
        self.num_storing = 0
        """Number of slots that store jobs are filling."""
        self.num_reading = 0
        """Number of slots that lower tiers are read into."""

    def __len__(self) -> int:
        """Number of slots that I/O is filling."""
        return self.num_storing + self.num_reading

    def __contains__(self, slot: int) -> bool:
        """Whether I/O is filling a slot."""
        return self._sources[slot] > 0

    def num_leading_idle(self, slots: Sequence[int]) -> int:
        """Number of leading ``slots`` that no I/O is filling. The hot path: no call per slot."""
        sources = self._sources
        if not (self.num_storing or self.num_reading) or not any(map(sources.__getitem__, slots)):
            return len(slots)
        return next(number for number, slot in enumerate(slots) if sources[slot])

    def num_missing(self, slots: Iterable[int | None]) -> int:
        """Number of those ``slots`` that are None, or that I/O is still filling."""
        sources = self._sources
        return sum([slot is None or sources[slot] > 0 for slot in slots])

    def stored_among(self, slots: Iterable[int]) -> list[int]:
        """Those of ``slots`` that store jobs are filling."""
        sources = self._sources
        return [slot for slot in slots if sources[slot] == _STORED]

    def read_among(self, slots: Iterable[int]) -> list[int]:
        """Those of ``slots`` that lower tiers are read into."""
        sources = self._sources
        return [slot for slot in slots if sources[slot] > _STORED] if self.num_reading else []

    def source(self, slot: int) -> str:
        """Tier that is being read into a slot; the host tier if none is."""
        return self._names[self._sources[slot]] or HOST

    def begin(self, slots: Sequence[int], source: str) -> None:
        """Note that I/O fills slots that none was filling. source: tier that is read; the host tier: a store job.

        Raises:
            InvariantError: tiers of too many names were read since the stack opened.
        """
        number = self._numbers.get(source)
        if number is None:
            number = len(self._names)
            if number >= _SOURCES_MAX:
                raise InvariantError(f"{_SOURCES_MAX - 2} names of tiers are known; attach no further one")
            self._numbers[source] = number
            self._names.append(source)
        if (run := run_of(slots)) is not None:
            self._sources[run] = array("H", (number,)) * len(slots)
        else:
            for slot in slots:
                self._sources[slot] = number
        if number == _STORED:
            self.num_storing += len(slots)
        else:
            self.num_reading += len(slots)

    def end(self, slots: Sequence[int]) -> None:
        """Note that no I/O fills these slots any more; those that none was filling are passed over."""
        sources, storing, reading = self._sources, 0, 0
        for slot in slots:
            source = sources[slot]
            if source:
                sources[slot] = 0
                storing += source == _STORED
                reading += source > _STORED
        self.num_storing -= storing
        self.num_reading -= reading
