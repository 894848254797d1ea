"""Index of several lower tiers: which of them have a chunk, for one lookup per key whatever their number."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.presence_cache import PresenceCache
from tierkv.manager.lower.row_table import DELETING, STORED
from tierkv.manager.lower.tier_phase import TierPhase
from tierkv.structures.key_table import SHARD_BYTE, TABLE_BITS, TABLE_MASK, KeyDirectory
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

NOWHERE = 1 << 30
"""Rank of a chunk that no tier has; beyond all others."""

FEW_KEYS = 4
"""Number of keys that are looked up one by one: a batch first looks at every tier."""

TierRows = tuple[LowerTier, list[int], list[int]]
"""A tier, rows of chunks that it has stored, and their positions among the keys that were looked up, ascending."""


class TierIndex:
    """Tiers with an authoritative index that share one directory of keys. Sans-IO, single-threaded.

    Args:
        directory: their directory.
        ranked: the tiers by *rank*: the place of a tier in the order in which tiers are searched.
    """

    __slots__ = ("_directory", "_ranked", "_shards")

    def __init__(self, directory: KeyDirectory, ranked: Mapping[int, LowerTier]) -> None:
        self._directory = directory
        self._shards = directory.shards
        # By number of the tier's table in the directory.
        self._ranked = {tier.residency.rows.keys.index: (rank, tier) for rank, tier in ranked.items()}

    def ranks(self, keys: Sequence[Key], now: float, allowed: Collection[str] | None) -> list[int]:
        """Rank of the fastest allowed tier in service that has each of ``keys``; :data:`NOWHERE` if there is none."""
        if len(keys) <= FEW_KEYS:
            return [self.rank(key, now, allowed) for key in keys]
        columns, ranks, doubts = self._columns(allowed)
        if len(self._ranked) == len(columns) - 1 == 1 and not doubts and (flags := columns[1]) is not None:
            here, listed = ranks[1], STORED | DELETING  # a tier alone is usual, and is looked up in half the time
            places = self._directory.places(keys)
            return [here if place and flags[place >> TABLE_BITS] & listed == STORED else NOWHERE for place in places]
        further = self._further()
        found: list[int] = []
        for key, key_place in zip(keys, self._directory.places(keys), strict=True):
            place, best = key_place, NOWHERE
            while place:
                number, row = place & TABLE_MASK, place >> TABLE_BITS
                flags = columns[number]
                is_here = flags is not None and flags[row] & (STORED | DELETING) == STORED and ranks[number] < best
                if is_here and not (doubts and number in doubts and doubts[number].get(key, now) is False):
                    best = ranks[number]
                after = further[number]
                place = after[row] if after else 0
            found.append(best)
        return found

    def prefix(self, keys: Sequence[Key], now: float, allowed: Collection[str] | None) -> int:
        """Number of leading ``keys`` that an allowed tier in service has. Takes half the time of :meth:`ranks`."""
        if len(keys) <= FEW_KEYS:
            ranks = [self.rank(key, now, allowed) for key in keys]
            return ranks.index(NOWHERE) if NOWHERE in ranks else len(keys)
        columns, _, doubts = self._columns(allowed)
        further = self._further()
        for position, key_place in enumerate(self._directory.places(keys)):
            place = key_place
            while place:
                number, row = place & TABLE_MASK, place >> TABLE_BITS
                flags = columns[number]
                is_here = flags is not None and flags[row] & (STORED | DELETING) == STORED
                if is_here and not (doubts and number in doubts and doubts[number].get(keys[position], now) is False):
                    break  # whether a faster one has it too does not matter
                after = further[number]
                place = after[row] if after else 0
            else:
                return position
        return len(keys)

    def _columns(
        self, allowed: Collection[str] | None
    ) -> tuple[list[bytearray | None], list[int], dict[int, PresenceCache]]:
        """Flags and rank of each allowed tier in service, by its table; and chunks that count as absent.

        The last are there only for tiers of which a read failed.
        """
        columns: list[bytearray | None] = [None] * len(self._directory.tables)
        ranks = [NOWHERE] * len(columns)
        doubts: dict[int, PresenceCache] = {}
        for number, (rank, tier) in self._ranked.items():
            if tier.phase is TierPhase.SERVING and (allowed is None or tier.name in allowed):
                columns[number], ranks[number] = tier.residency.rows.flags, rank
                if tier.presence_cache.any:
                    doubts[number] = tier.presence_cache
        return columns, ranks, doubts

    def _further(self) -> list[memoryview[int] | None]:
        """Of each table of the directory, the places of its keys in other tables."""
        return [None if table is None else table.further for table in self._directory.tables]

    def rank(self, key: Key, now: float, allowed: Collection[str] | None) -> int:
        """Rank of the fastest allowed tier in service that has ``key``; :data:`NOWHERE` if there is none."""
        place, best = self._shards[key[SHARD_BYTE]].get(key, 0), NOWHERE
        while place:
            ranked = self._ranked.get(place & TABLE_MASK)
            if ranked is not None:
                rank, tier = ranked
                if rank < best and (allowed is None or tier.name in allowed):
                    here = tier.presence_of(key, tier.residency.rows.flags[place >> TABLE_BITS], now)
                    best = rank if here is LookupResult.HIT else best
            place = self._directory.place_after(place)
        return best

    def rows_of(self, keys: Sequence[Key]) -> list[TierRows]:
        """Each tier that has any of ``keys``: rows of those that it has stored, and their positions in ``keys``."""
        if len(self._ranked) == 1:  # usual, and in few calls
            ((_, tier),) = self._ranked.values()
            own, known = tier.residency.rows.flags, tier.residency.rows.keys.find_all(keys)
            found = [
                (row, position)
                for position, row in enumerate(known)
                if row is not None and own[row] & (STORED | DELETING) == STORED
            ]
            return [(tier, [row for row, _ in found], [position for _, position in found])] if found else []
        tables = self._directory.tables
        rows: list[list[int]] = [[] for _ in tables]
        positions: list[list[int]] = [[] for _ in tables]
        columns: list[bytearray | None] = [None] * len(tables)
        for number, (_, tier) in self._ranked.items():
            columns[number] = tier.residency.rows.flags
        further = self._further()
        for position, key_place in enumerate(self._directory.places(keys)):
            place = key_place
            while place:
                number, row = place & TABLE_MASK, place >> TABLE_BITS
                flags = columns[number]
                if flags is not None and flags[row] & (STORED | DELETING) == STORED:
                    rows[number].append(row)
                    positions[number].append(position)
                after = further[number]
                place = after[row] if after else 0
        ranked = self._ranked.items()
        return [(tier, rows[number], positions[number]) for number, (_, tier) in ranked if rows[number]]
