"""The lower tiers of a stack: in the order in which they are searched, and by number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from tierkv.errors import EngineProtocolError
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.lower.tier_index import NOWHERE, TierIndex, TierRows
from tierkv.structures.key_table import KeyTable
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult


class TierList:
    """Tiers in service, the fastest first, and detached tiers by number. Single-threaded.

    Tiers are attached and detached while the stack runs. The number of a tier (``LowerTier.index``) is never reused. A
    detached tier is still found by its number until all of its operations have ended.
    """

    def __init__(self, tiers: Iterable[LowerTier]) -> None:
        self.in_service = list(tiers)
        """Tiers that iteration yields; saves two calls for callers that ask per chunk. Read only."""
        self.with_detached = list(self.in_service)
        """Tiers in service and detached ones, in the order of their numbers. Read only."""
        self.takes_writes = False
        """Whether a tier in service takes writes."""
        self.writes_back = False
        """Whether a tier in service is written on eviction."""
        self.all_indexed = True
        """Whether every tier in service has an authoritative index, so that no tier has to be asked."""
        self._by_index = {tier.index: tier for tier in self.in_service}
        self._forgotten: deque[tuple[KeyTable, Iterator[int]]] = deque()  # with the numbers left to discard
        self._rank()

    def __iter__(self) -> Iterator[LowerTier]:
        """Iterate over the tiers in service, in order."""
        return iter(self.in_service)

    def __len__(self) -> int:
        """Number of tiers in service."""
        return len(self.in_service)

    def __getitem__(self, index: int) -> LowerTier:
        """Tier of a number, in service or detached."""
        return self._by_index[index]

    def get(self, name: str) -> LowerTier | None:
        """Tier in service of that name; None if there is none."""
        return next((tier for tier in self.in_service if tier.name == name), None)

    def named(self, name: str) -> LowerTier:
        """Tier in service of that name.

        Raises:
            EngineProtocolError: there is none; lists the names in service.
        """
        tier = self.get(name)
        if tier is None:
            names = ", ".join(known.name for known in self.in_service) or "none"
            raise EngineProtocolError(f"there is no lower tier {name!r}; there are: {names}")
        return tier

    # -- existence ---------------------------------------------------------------------------------------------------

    def sources_of(
        self,
        keys: Sequence[Key],
        now: float,
        allowed: Collection[str] | None = None,
        *,
        since: float = math.inf,
        trusting: bool = False,
    ) -> list[LowerTier | None]:
        """Fastest tier in service that is known to have each of ``keys``; None if there is none. Queues no probe.

        Args:
            keys: keys of chunks.
            now: time in seconds on the stack's clock.
            allowed: names of the tiers to consider; None: all.
            since: answers of shared tiers given since then count, also if they have expired.
            trusting: fall back to a shared tier whose answer has expired.
        """
        if not keys:
            return []
        ranks = self._indexed_ranks(keys, now, allowed)
        asked: dict[int, int] = {}
        for own, tier in self._probed:
            left = [i for i, rank in enumerate(ranks) if rank > own]
            if not left or not (allowed is None or tier.name in allowed):
                continue
            for i in left:
                answer = tier.presence(keys[i], now, since)
                if answer is LookupResult.HIT:
                    ranks[i] = own
                elif trusting and answer is LookupResult.RETRY:
                    asked.setdefault(i, own)
        if asked:
            ranks = [asked.get(i, rank) if rank == NOWHERE else rank for i, rank in enumerate(ranks)]
        tiers = self.in_service
        return [None if rank == NOWHERE else tiers[rank] for rank in ranks]

    def prefix(self, keys: Sequence[Key], now: float, allowed: Collection[str] | None, since: float) -> int:
        """Number of leading ``keys`` that have a source; see :meth:`sources_of`."""
        if self.all_indexed and len(self._indexes) == 1:  # usual, and in half the time
            return self._indexes[0].prefix(keys, now, allowed)
        sources = self.sources_of(keys, now, allowed, since=since)
        return sources.index(None) if None in sources else len(sources)

    def _indexed_ranks(self, keys: Sequence[Key], now: float, allowed: Collection[str] | None) -> list[int]:
        """Rank of the fastest tier with an index that has each of ``keys``."""
        found = [index.ranks(keys, now, allowed) for index in self._indexes]
        if len(found) == 1:
            return found[0]
        return list(map(min, *found)) if found else [NOWHERE] * len(keys)

    def answered_s(self, key: Key) -> float:
        """Time of the latest answer of a shared tier about ``key``; minus infinity if none is remembered."""
        return max([tier.presence_cache.answered_s(key) for tier in self], default=-math.inf)

    def presence(
        self, key: Key, now: float, allowed: Collection[str] | None = None, since: float = math.inf
    ) -> LookupResult:
        """Whether an allowed tier has ``key``. Queues probes in the shared tiers ahead of the first that has it.

        since: answers of shared tiers given since then count, also if they have expired.
        """
        known = NOWHERE
        for index in self._indexes:
            known = min(known, index.rank(key, now, allowed))
        answer = LookupResult.MISS
        for rank, tier in self._probed:
            if rank > known:
                break
            if allowed is not None and tier.name not in allowed:
                continue
            here = tier.presence(key, now, since)
            if here is LookupResult.HIT:
                return here
            if here is LookupResult.RETRY and tier.probes.ask(key, now):
                answer = here
        return answer if known == NOWHERE else LookupResult.HIT

    def rows_of(self, keys: Sequence[Key]) -> list[TierRows]:
        """Each tier with an index that has any of ``keys``: their rows there, and their positions in ``keys``."""
        return [one for index in self._indexes for one in index.rows_of(keys)]

    def note_continued(self, rows: Sequence[TierRows], rank: int) -> None:
        """Note in every tier that keeps ranks that a request of this rank continues chunks, the end of a prefix.

        rows: of the chunks.
        """
        by_tier = {tier.index: some for tier, some, _ in rows}
        for tier in self.in_service:
            if tier.capabilities.keeps_ranks:
                tier.written_ranks.continues(rank, tier.residency.rows.last_written(by_tier.get(tier.index, ())))

    def _rank(self) -> None:
        """Rank the tiers anew after a change of their order."""
        self.takes_writes = any(tier.limits.writes for tier in self.in_service)
        self.writes_back = any(tier.limits.write is WritePolicy.BACK for tier in self.in_service)
        by_directory: dict[int, dict[int, LowerTier]] = {}
        for rank, tier in enumerate(self.in_service):
            if tier.capabilities.authoritative_index:
                by_directory.setdefault(id(tier.residency.rows.keys.directory), {})[rank] = tier
        self._indexes = [
            TierIndex(next(iter(ranked.values())).residency.rows.keys.directory, ranked)
            for ranked in by_directory.values()
        ]
        self._probed = [
            (rank, tier) for rank, tier in enumerate(self.in_service) if not tier.capabilities.authoritative_index
        ]
        self.all_indexed = not self._probed

    # -- attached and detached tiers ---------------------------------------------------------------------------------

    @property
    def not_ours(self) -> tuple[str, ...]:
        """Names of the tiers in service whose chunks this stack must not delete: shared ones, and read-only ones."""
        return tuple(tier.name for tier in self.in_service if not is_ours(tier))

    def check_ours(self) -> None:
        """Check that this stack may delete every chunk in every tier.

        Raises:
            EngineProtocolError: a tier is shared with other processes, or never written.
        """
        for tier in self.in_service:
            if not is_ours(tier):
                why = "is shared with others" if tier.limits.writes else "is never written"
                raise EngineProtocolError(
                    f'reset_cache(scope="all"): tier {tier.name!r} {why}, so its chunks are not ours to delete. '
                    "Change namespace.epoch instead: then no previous chunk is ever found again"
                )

    def attach(self, tier: LowerTier, before: LowerTier | None = None) -> None:
        """Put a tier in service, ahead of another one, or last."""
        position = len(self.in_service) if before is None else self.in_service.index(before)
        self.in_service.insert(position, tier)
        self._by_index[tier.index] = tier
        self.with_detached.append(tier)
        self._rank()

    def detach(self, tier: LowerTier) -> None:
        """Take a tier out of service."""
        self.in_service.remove(tier)
        self._rank()

    def forget(self, index: int) -> None:
        """Remove a detached tier whose operations have all ended; :meth:`sweep` removes what it had."""
        tier = self._by_index.pop(index)
        self.with_detached.remove(tier)
        rows = tier.residency.rows.keys
        self._forgotten.append((rows, iter(range(rows.numbers_max))))

    @property
    def has_forgotten(self) -> bool:
        """Whether chunks of forgotten tiers are left in a directory."""
        return bool(self._forgotten)

    def sweep(self, keys_max: int) -> None:
        """Remove up to ``keys_max`` chunks of forgotten tiers from the directory that they shared."""
        while self._forgotten and keys_max > 0:
            rows, numbers = self._forgotten[0]
            some = list(islice(numbers, keys_max))
            for number in some:
                if rows.key(number):
                    rows.discard(number)
            if len(some) < keys_max:
                rows.directory.leave(rows)
                self._forgotten.popleft()
            keys_max -= len(some)


def is_ours(tier: LowerTier) -> bool:
    """Whether this stack may delete every chunk of a tier: it is neither shared nor read-only."""
    return tier.limits.writes and tier.capabilities.authoritative_index
