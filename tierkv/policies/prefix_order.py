"""Insertion of chunks into a policy in the order of their prefix: the tail of a prompt is evicted before its head.

A prompt is stored in many batches, and their writes end in any order. So each chunk has a *rank*: a digest of the
request that brought it or continued it last, and the token at which it ends. Of two chunks of one request, the one with
the higher rank is deeper in the prefix. Rank 0 is unknown: such a chunk is added as the most recent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from zlib import crc32

from tierkv.abc import EvictionPolicy, PrefixAwarePolicy
from tierkv.structures.key_table import GROWTH_NUMBERS_MIN, column, longer
from tierkv.types.keys import Key
from tierkv.types.transfers import NO_REQUEST

REQUESTS_MAX = 4096
"""Requests whose deepest chunk is remembered. The oldest are forgotten: their further chunks are added as unknown."""

LATE_MAX = 256
"""Chunks that may be added before those before them in the prompt; further ones are added as the most recent."""

CHAIN_MAX = 4096
"""Longest prefix that is moved at once: a fifth of a millisecond's work."""

NO_CHUNK = -1
"""Handle of no chunk."""

_OWNER_BITS = 32
_DEPTH_MAX = (1 << _OWNER_BITS) - 1


def ranks_of(request_id: str, end_tokens: Iterable[int]) -> list[int]:
    """Ranks of chunks of a request, from the token at which each ends; zeros for chunks of no request."""
    if request_id == NO_REQUEST:
        return [0 for _ in end_tokens]
    owner = crc32(request_id.encode("utf-8", "surrogatepass")) << _OWNER_BITS
    ends = list(end_tokens)
    if max(ends, default=0) > _DEPTH_MAX:
        ends = [min(end, _DEPTH_MAX) for end in ends]
    return [owner | end if end else 0 for end in ends]


class PrefixOrder:
    """Order of insertion into one policy, and the chunks at which a choice of victims ends.

    Sans-IO; O(1) amortised per chunk. A policy without :class:`~tierkv.abc.PrefixAwarePolicy` gets plain additions.

    Args:
        policy: of the tier.
        key_of: key of the chunk of a handle; None: chunks of the prefix that the room is for may be evicted, where the
            policy chooses them before its last one.
    """

    def __init__(self, policy: EvictionPolicy, key_of: Callable[[int], Key] | None = None) -> None:
        self._policy = policy
        self._key_of = key_of
        self._aware = policy if isinstance(policy, PrefixAwarePolicy) else None
        self._ranks = column("Q", 0)
        self._before = column("I", 0)  # by handle: 1 + the handle of the chunk before it in the prefix; 0: unknown
        self._deepest: dict[int, int] = {}  # by request: handle of its deepest chunk
        self._cuts: dict[int, int] = {}  # by request: lowest rank of its chunks that were evicted or refused

    def add(self, handles: Sequence[int], keys: Sequence[Key], ranks: Sequence[int] = ()) -> None:
        """Add chunks to the policy. ranks: one per chunk; empty: unknown."""
        if self._aware is None or not any(ranks):
            self._policy.add(handles, keys)
            return
        self._lengthen(max(handles) + 1)
        chunks = zip(ranks, handles, keys, strict=True)
        if len({rank >> _OWNER_BITS for rank in ranks}) == 1:  # usual, and without a call per chunk
            self._add_of_request(self._aware, ranks[0] >> _OWNER_BITS, chunks)
            return
        by_owner: dict[int, list[tuple[int, int, Key]]] = {}
        for chunk in chunks:
            by_owner.setdefault(chunk[0] >> _OWNER_BITS, []).append(chunk)
        for owner, some in by_owner.items():
            if some[0][0]:
                self._add_of_request(self._aware, owner, some)
            else:
                self._policy.add([handle for _, handle, _ in some], [key for _, _, key in some])

    def _add_of_request(self, policy: PrefixAwarePolicy, owner: int, chunks: Iterable[tuple[int, int, Key]]) -> None:
        """Add chunks of one request, tail first."""
        ranks, handles, keys = zip(*sorted(chunks, reverse=True), strict=True)
        before, after = self._place(owner, ranks[-1])
        if before == NO_CHUNK:
            self._policy.add(handles, keys)
        else:
            policy.add_behind(handles, keys, before)
        self._link(ranks[::-1], handles[::-1], owner, before)
        if after != NO_CHUNK:
            self._before[after] = handles[0] + 1

    def _place(self, owner: int, rank: int) -> tuple[int, int]:
        """The known chunks just before and behind that rank in the prefix. Looks past :data:`LATE_MAX` chunks."""
        before, after, ranks = self._deepest.get(owner, NO_CHUNK), NO_CHUNK, self._ranks
        for _ in range(LATE_MAX):
            if before == NO_CHUNK or ranks[before] >> _OWNER_BITS != owner:
                return NO_CHUNK, after
            if ranks[before] <= rank:
                return before, after
            before, after = self._before[before] - 1, before
        return NO_CHUNK, NO_CHUNK

    def mark(self, handles: Sequence[int], ranks: Sequence[int]) -> None:
        """Rank known chunks anew, in prefix order, because a request uses them. The policy is not informed."""
        if self._aware is not None and handles and ranks[0]:
            self._lengthen(max(handles) + 1)
            known, marked = self._ranks, set(handles)
            for owner in {known[handle] >> _OWNER_BITS for handle in handles}:
                self._shorten(owner, marked)
            self._link(ranks, handles, ranks[0] >> _OWNER_BITS, NO_CHUNK)

    def _link(self, ranks: Iterable[int], handles: Iterable[int], owner: int, before: int) -> None:
        """Enter ranks and handles, in prefix order, behind the chunk ``before``."""
        known, chunks_before = self._ranks, self._before
        for rank, handle in zip(ranks, handles, strict=True):
            known[handle] = rank
            chunks_before[handle] = before + 1
            before = handle
        deepest = self._deepest.pop(owner, NO_CHUNK)
        self._deepest[owner] = before if deepest == NO_CHUNK or known[deepest] <= known[before] else deepest
        if len(self._deepest) > REQUESTS_MAX:
            del self._deepest[next(iter(self._deepest))]

    def _lengthen(self, length: int) -> None:
        if length > len(self._ranks):
            length += max(GROWTH_NUMBERS_MIN, length // 8)
            self._ranks, self._before = longer(self._ranks, length), longer(self._before, length)

    def forget(self, handles: Iterable[int]) -> None:
        """Forget chunks that the policy does not know any more, because they were damaged, lost or replaced.

        The chunks behind them are accepted: they serve requests again when the lost ones are stored anew.
        """
        if len(self._ranks):
            for handle in handles:
                self._unrank(handle)

    def evicted(self, handles: Iterable[int]) -> None:
        """Forget chunks that were evicted. Where one was the deepest of its prefix, none is accepted behind it."""
        if len(self._ranks):
            for handle in handles:
                if last := self._unrank(handle):
                    self._cut(last)

    def _unrank(self, handle: int) -> int:
        """Remove a chunk from its prefix. Returns its rank if it was the deepest one, otherwise 0."""
        ranks = self._ranks
        rank = ranks[handle] if handle < len(ranks) else 0
        if not rank:
            return 0
        was_deepest = self._shorten(rank >> _OWNER_BITS, (handle,))
        ranks[handle] = 0
        return rank if was_deepest else 0

    def _shorten(self, owner: int, gone: Collection[int]) -> bool:
        """End the known prefix of a request before those of its chunks that leave it.

        Returns:
            Whether its deepest chunk is one of them.
        """
        ranks, last = self._ranks, self._deepest.get(owner, NO_CHUNK)
        if last not in gone:
            return False
        for _ in gone:  # each of them once at most
            before = self._before[last] - 1
            follows = before >= 0 and ranks[before] >> _OWNER_BITS == owner and ranks[before] <= ranks[last]
            last = before if follows else NO_CHUNK
            if last not in gone:
                break
        if last == NO_CHUNK or last in gone:
            del self._deepest[owner]
        else:
            self._deepest[owner] = last
        return True

    def _cut(self, rank: int) -> None:
        """Note that a chunk was evicted or refused: those behind it would serve no request."""
        owner = rank >> _OWNER_BITS
        self._cuts[owner] = min(rank, self._cuts.pop(owner, rank))
        if len(self._cuts) > REQUESTS_MAX:
            del self._cuts[next(iter(self._cuts))]

    def forget_cuts(self, ranks: Iterable[int]) -> None:
        """Forget what was evicted or refused of the requests of these ranks."""
        for owner in {rank >> _OWNER_BITS for rank in ranks} if self._cuts else ():
            self._cuts.pop(owner, None)

    # -- victims -----------------------------------------------------------------------------------------------------

    def stop_of(self, rank: int) -> int:
        """Deepest chunk of the same request, if a chunk of that rank continues it; otherwise ``NO_CHUNK``."""
        deepest = self._deepest.get(rank >> _OWNER_BITS, NO_CHUNK) if rank else NO_CHUNK
        return deepest if deepest != NO_CHUNK and self._ranks[deepest] <= rank else NO_CHUNK

    def is_cut(self, *ranks: int) -> bool:
        """Whether one of the chunks of these ranks would continue a prefix whose end was evicted or refused."""
        cuts = self._cuts
        return bool(cuts) and any(rank and rank > cuts.get(rank >> _OWNER_BITS, rank) for rank in ranks)

    def refuse(self, rank: int) -> bool:
        """Refuse a chunk, and those behind it, if it continues a prefix. Returns whether it does."""
        if self.stop_of(rank) == NO_CHUNK:
            return False
        self._cut(rank)
        return True

    def evict(self, count: int, pins: Sequence[int], rank: int = 0) -> Sequence[int]:
        """Choose victims for chunks of that rank and deeper ones; see :class:`~tierkv.abc.PrefixAwarePolicy`.

        Returns:
            ``count`` handles, or none; for a chunk that continues a prefix, perhaps fewer.
        """
        stop = self.stop_of(rank)
        if self._aware is None or stop == NO_CHUNK:
            victims = self._policy.evict(count, pins)
        else:
            victims = self._evict_before(self._aware, count, pins, stop)
            if not victims and (chain := self._chain(stop)):
                self._policy.release(chain)
                victims = self._evict_before(self._aware, count, pins, stop)
        self.evicted(victims)
        return victims

    def _evict_before(self, policy: PrefixAwarePolicy, count: int, pins: Sequence[int], stop: int) -> Sequence[int]:
        """Victims of a policy that do not belong to the prefix that ends with ``stop``.

        Where it chooses some of the prefix first, because it moves nothing at a use, they are added anew.
        """
        owner, moved = self._ranks[stop] >> _OWNER_BITS, 0
        while True:
            victims = policy.evict_before(count, pins, stop)
            own = [
                handle
                for handle, rank in zip(victims, self.ranks_at(victims), strict=True)
                if rank >> _OWNER_BITS == owner
            ]
            if not own or self._key_of is None:
                return victims
            own.sort(key=self._ranks.__getitem__, reverse=True)
            self._policy.add(own, [self._key_of(handle) for handle in own])
            moved += len(own)
            if len(own) < len(victims) or moved > CHAIN_MAX:
                kept = set(own)
                return [handle for handle in victims if handle not in kept]

    def _chain(self, deepest: int) -> list[int]:
        """The known chunks of a prefix, tail first; none where they are more than half of the tier.

        They are in use, so others may leave before them. Between two such moves of a prefix all others have left, so
        the cost is O(1) per eviction.
        """
        ranks, chain, left = self._ranks, [deepest], min(len(self._policy) // 2, CHAIN_MAX)
        while left:
            before = self._before[chain[-1]] - 1
            if before < 0 or ranks[before] >> _OWNER_BITS != ranks[deepest] >> _OWNER_BITS:
                return chain
            chain.append(before)
            left -= 1
        return []

    def ranks_at(self, handles: Iterable[int | None]) -> list[int]:
        """Rank of each handle; 0: unknown, or no handle."""
        ranks, known = self._ranks, len(self._ranks)
        return [ranks[handle] if handle is not None and handle < known else 0 for handle in handles]

    def ranked(self) -> list[int]:
        """Handles with a rank, which the policy must know. O(handles)."""
        return [handle for handle, rank in enumerate(self._ranks) if rank]
