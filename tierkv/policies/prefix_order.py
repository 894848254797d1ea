"""Insertion of chunks into a policy in the order of their prefix: the tail of a prompt is evicted before its head.

A prompt is stored in many batches, and their writes end in any order. So each chunk has a *rank*: a digest of the
request that brought it or continued it last, and the token at which it ends. Of two chunks of one request, the one with
the higher rank is deeper in the prefix. Rank 0 is unknown: such a chunk is added as the most recent.

Requests share prefixes. The rank of a chunk names only the last request that used it, so each chunk also knows the one
before it in the prefix, and how many chunks come behind it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from tierkv.abc import EvictionPolicy, PrefixAwarePolicy
from tierkv.structures.columns import column, grown, longer, run_of
from tierkv.structures.ranks import DEPTH_MAX, OWNER_BITS, apart
from tierkv.types.keys import Key

REQUESTS_MAX = 4096
"""Requests whose deepest chunk is remembered. The oldest are forgotten: their further chunks are added as unknown."""

LATE_MAX = 256
"""Chunks that may be added before those before them in the prompt; further ones are added as the most recent."""

CHAIN_MAX = 4096
"""Longest prefix that is moved at once: a fifth of a millisecond's work."""

NO_CHUNK = -1
"""Handle of no chunk."""

UNLINKED, NO_LINK = 0, 1
"""Links of a chunk that is not in the order, and of one that is the first of its prefix."""

NO_OWNER = -1
"""Digest of no request."""

PASSED_MAX = 512
"""Chunks that others need which one choice passes over: some milliseconds' work."""

USES = 1 << 16
"""Uses of a handle after which a link to its first chunk would be taken for one to its newest."""

BEHIND_MAX = USES - 1
"""Chunks behind one that are counted. A chunk that reaches it counts as needed until it is evicted."""

_LINK_BITS = 32
_LINK_MAX, _LINK_FIRST = (1 << _LINK_BITS) - 1, NO_LINK + 1  # the latter: link to handle 0


class PrefixOrder:
    """Order of insertion into one policy, and the chunks at which a choice of victims ends.

    Sans-IO; O(1) amortised per chunk. A policy without :class:`~tierkv.abc.PrefixAwarePolicy` gets plain additions.

    Args:
        policy: of the tier.
        key_of: key of the chunk of a handle; None: chunks of the prefix that the room is for may be evicted, where the
            policy chooses them before its last one.
        ranks: column by handle that the tier keeps for chunks in any state; None: one that grows.
    """

    def __init__(
        self, policy: EvictionPolicy, key_of: Callable[[int], Key] | None = None, ranks: memoryview[int] | None = None
    ) -> None:
        self._policy = policy
        self._key_of = key_of
        self._aware = policy if isinstance(policy, PrefixAwarePolicy) else None
        self._ranks = column("Q", 0) if ranks is None else ranks
        self._uses = column("H", 0)  # by handle: number of ranked chunks that had the handle before, modulo USES
        self._before = column("Q", 0)  # by handle: link to the chunk before it in the prefix, or UNLINKED
        self._behind = column("H", 0)  # by handle: number of chunks that it is the one before, up to BEHIND_MAX
        self._deepest: dict[int, int] = {}  # by request: link to its deepest chunk
        self._latest = NO_LINK  # to the first of the chunks that were entered last: mostly, the next ones precede it
        self._cuts: dict[int, int] = {}  # by request: lowest rank of its chunks that were evicted or refused

    def add(self, handles: Sequence[int], keys: Sequence[Key], ranks: Sequence[int] = ()) -> None:
        """Add chunks to the policy. ranks: one per chunk; empty: unknown."""
        if self._aware is not None and handles:  # some at a time: the first rank of a large tier costs no more
            self._lengthen(max(handles) + 1)
        if self._aware is None or not any(ranks):
            self._policy.add(handles, keys)
            return
        for its_ranks, its_handles, its_keys in apart(ranks, handles, keys):
            if its_ranks[0]:
                self._add_of_request(self._aware, its_ranks, its_handles, its_keys)
            else:
                self._policy.add(its_handles, its_keys)

    def _add_of_request(
        self, policy: PrefixAwarePolicy, ranks: Sequence[int], handles: Sequence[int], keys: Sequence[Key]
    ) -> None:
        """Add chunks of one request, tail first."""
        if [*ranks] != sorted(ranks, reverse=True):  # they mostly come tail first
            ranks, handles, keys = zip(*sorted(zip(ranks, handles, keys, strict=True), reverse=True), strict=True)
        before, after = self._place(ranks[0] >> OWNER_BITS, ranks[-1])
        if before == NO_CHUNK:
            self._policy.add(handles, keys)
        else:
            policy.add_behind(handles, keys, before)
        self._enter(ranks[::-1], handles[::-1], before)
        if after != NO_CHUNK:
            self._follow(after, self._link_to(handles[0]))

    def _place(self, owner: int, rank: int) -> tuple[int, int]:
        """The known chunks just before and behind that rank in the prefix. Looks past :data:`LATE_MAX` chunks."""
        before, after, depth = self._chunk_at(self._deepest.get(owner, NO_LINK)), NO_CHUNK, rank & DEPTH_MAX
        latest = NO_CHUNK if before == NO_CHUNK or self._ranks[before] < rank else self._chunk_at(self._latest)
        if latest != NO_CHUNK and self._ranks[latest] >> OWNER_BITS == owner and self._ranks[latest] >= rank:
            before, after = self._chunk_at(self._before[latest]), latest
        for _ in range(LATE_MAX):
            if before == NO_CHUNK or self._ranks[before] & DEPTH_MAX < depth:
                return before, after
            before, after = self._chunk_at(self._before[before]), before
        return NO_CHUNK, NO_CHUNK

    def mark(self, handles: Sequence[int], ranks: Sequence[int]) -> None:
        """Rank known chunks anew, in prefix order, because a request uses them. The policy is not informed."""
        if self._aware is not None and handles and ranks[0]:
            self._lengthen(max(handles) + 1)
            self._enter(ranks, handles, self._chunk_at(self._before[handles[0]]))

    def mark_again(self, handles: Sequence[int], ranks: Sequence[int]) -> None:
        """Rank known chunks of one request anew, in prefix order, because it has computed and stored them again.

        They come anywhere in its prefix. The policy is not informed.
        """
        if self._aware is None:
            return
        self._lengthen(max(handles) + 1)
        owner = ranks[0] >> OWNER_BITS
        before, after = self._place(owner, ranks[0])[0], self._place(owner, ranks[-1] + 1)[1]
        self._enter(ranks, handles, self._chunk_at(self._before[handles[0]]) if before == NO_CHUNK else before)
        if after != NO_CHUNK:
            self._follow(after, self._link_to(handles[-1]))

    def _enter(self, ranks: Sequence[int], handles: Sequence[int], before: int) -> None:
        """Enter chunks of one request, in prefix order, behind the chunk ``before``."""
        run = run_of(handles)
        if run is not None and self._before[run].tobytes() == bytes(self._before.itemsize * len(handles)):
            link = self._link_run(run, ranks, handles, before)
        else:
            link = self._link_each(ranks, handles, before)
        known = self._ranks
        owner = ranks[-1] >> OWNER_BITS
        deepest = self._chunk_at(self._deepest.pop(owner, NO_LINK))
        is_deeper = deepest != NO_CHUNK and known[deepest] & DEPTH_MAX > ranks[-1] & DEPTH_MAX
        self._deepest[owner] = self._link_to(deepest) if is_deeper else link
        if len(self._deepest) > REQUESTS_MAX:
            del self._deepest[next(iter(self._deepest))]

    def _link_run(self, run: slice, ranks: Sequence[int], handles: Sequence[int], before: int) -> int:
        """Rank and link chunks that were not in the order and whose handles follow one another, as _link_each()."""
        up, ones = 1 if handles[0] == run.start else -1, (1,) * (len(handles) - 1)
        uses = self._uses[run][::up]
        links = [use << _LINK_BITS | handle + _LINK_FIRST for use, handle in zip(uses, handles, strict=True)]
        self._ranks[run][::up] = array("Q", ranks)
        self._before[run][::up] = array("Q", (self._link_to(before), *links[:-1]))
        self._behind[run][::up] = array("H", (*ones, 0))
        if before != NO_CHUNK and self._behind[before] < BEHIND_MAX:
            self._behind[before] += 1
        self._latest = links[0]
        return links[-1]

    def _link_each(self, ranks: Sequence[int], handles: Sequence[int], before: int) -> int:
        """Rank chunks, and link each to the one before it. Returns the link to the last one."""
        known, chunks_before, behind, uses = self._ranks, self._before, self._behind, self._uses
        link = NO_LINK if before == NO_CHUNK else uses[before] << _LINK_BITS | before + _LINK_FIRST  # as _link_to()
        self._latest = uses[handles[0]] << _LINK_BITS | handles[0] + _LINK_FIRST
        for rank, handle in zip(ranks, handles, strict=True):
            known[handle] = rank
            if chunks_before[handle] != link:  # as _follow(), without a call for a new chunk
                if chunks_before[handle] > NO_LINK:
                    self._follow(handle, NO_LINK)
                chunks_before[handle] = link
                if before != NO_CHUNK and behind[before] < BEHIND_MAX:
                    behind[before] += 1
            before, link = handle, uses[handle] << _LINK_BITS | handle + _LINK_FIRST
        return link

    def _link_to(self, handle: int) -> int:
        return NO_LINK if handle == NO_CHUNK else self._uses[handle] << _LINK_BITS | handle + _LINK_FIRST

    def _chunk_at(self, link: int) -> int:
        """Handle of the chunk of a link, unless it left the tier."""
        handle = (link & _LINK_MAX) - _LINK_FIRST
        return handle if link > NO_LINK and self._uses[handle] == link >> _LINK_BITS else NO_CHUNK

    def _follow(self, handle: int, link: int) -> None:
        """Change the chunk before another in the prefix."""
        behind = self._behind
        if (before := self._chunk_at(self._before[handle])) != NO_CHUNK and 0 < behind[before] < BEHIND_MAX:
            behind[before] -= 1
        if link > NO_LINK and (before := self._chunk_at(link)) != NO_CHUNK and behind[before] < BEHIND_MAX:
            behind[before] += 1
        self._before[handle] = link

    def _lengthen(self, needed: int) -> None:
        if needed > len(self._before):
            length = grown(len(self._before), needed)
            self._before, self._uses = longer(self._before, length), longer(self._uses, length)
            self._behind = longer(self._behind, length)
            if needed > len(self._ranks):  # a column of the tier has them all
                self._ranks = longer(self._ranks, length)

    def forget(self, handles: Iterable[int]) -> None:
        """Forget chunks that the policy does not know any more, because they were damaged, lost or replaced.

        The chunks behind them are accepted: they serve requests again when the lost ones are stored anew.
        """
        if len(self._before):
            looks = LATE_MAX
            for handle in [*handles][::-1]:  # usually tail first, so that no chunk is left behind one
                looks = self._close_gap(handle, looks)
                self._unrank(handle)

    def _close_gap(self, handle: int, looks: int) -> int:
        """Link the chunk behind a lost one to the one before it, within that number of looks. Returns those left."""
        if handle >= len(self._behind) or not self._behind[handle]:
            return looks
        owner = self._ranks[handle] >> OWNER_BITS
        lost, behind = self._link_to(handle), self._chunk_at(self._deepest.get(owner, NO_LINK))
        while looks and behind != NO_CHUNK:
            looks -= 1
            if self._before[behind] == lost:
                self._follow(behind, self._before[handle])
                break
            behind = self._chunk_at(self._before[behind])
        return looks

    def evicted(self, handles: Iterable[int]) -> None:
        """Forget chunks that were evicted. Where one was the deepest of its prefix, none is accepted behind it."""
        if len(self._before):
            for handle in handles:
                if last := self._unrank(handle):
                    self._cut(last)

    def _unrank(self, handle: int) -> int:
        """Remove a chunk from its prefix. Returns its rank if it was the deepest one, otherwise 0."""
        if handle >= len(self._before) or self._before[handle] == UNLINKED:
            return 0
        owner = (rank := self._ranks[handle]) >> OWNER_BITS
        was_deepest = self._deepest.get(owner, NO_LINK) == self._link_to(handle)
        if was_deepest:
            del self._deepest[owner]
            if self._chunk_at(self._before[handle]) != NO_CHUNK:
                self._deepest[owner] = self._before[handle]
        self._follow(handle, UNLINKED)
        self._uses[handle] = (self._uses[handle] + 1) % USES
        self._behind[handle] = 0
        return rank if was_deepest else 0

    def _cut(self, rank: int) -> None:
        """Note that a chunk was evicted or refused: those behind it would serve no request."""
        owner = rank >> OWNER_BITS
        self._cuts[owner] = min(rank, self._cuts.pop(owner, rank))
        if len(self._cuts) > REQUESTS_MAX:
            del self._cuts[next(iter(self._cuts))]

    def forget_cuts(self, ranks: Iterable[int]) -> None:
        """Forget what was evicted or refused of the requests of these ranks."""
        for owner in {rank >> OWNER_BITS for rank in ranks} if self._cuts else ():
            self._cuts.pop(owner, None)

    # -- victims -----------------------------------------------------------------------------------------------------

    def stop_of(self, rank: int) -> int:
        """Deepest chunk of the same request, if a chunk of that rank continues it; otherwise ``NO_CHUNK``."""
        deepest = self._chunk_at(self._deepest.get(rank >> OWNER_BITS, NO_LINK)) if rank else NO_CHUNK
        return deepest if deepest != NO_CHUNK and self._ranks[deepest] & DEPTH_MAX <= rank & DEPTH_MAX else NO_CHUNK

    def fills_gap(self, rank: int) -> bool:
        """Whether chunks of the same request that are here serve no request without a chunk of that rank."""
        deepest = self._chunk_at(self._deepest.get(rank >> OWNER_BITS, NO_LINK)) if rank else NO_CHUNK
        return deepest != NO_CHUNK and self._ranks[deepest] & DEPTH_MAX > rank & DEPTH_MAX

    def is_cut(self, *ranks: int) -> bool:
        """Whether one of the chunks of these ranks would continue a prefix whose end was evicted or refused."""
        deepest = {rank >> OWNER_BITS: rank for rank in sorted(ranks)} if self._cuts else {}  # of each request
        return bool(deepest) and any(rank > self._cuts.get(owner, rank) for owner, rank in deepest.items())

    def refuse(self, rank: int) -> bool:
        """Refuse a chunk, and those behind it, if it continues a prefix. Returns whether it does."""
        if self.stop_of(rank) == NO_CHUNK:
            return False
        self._cut(rank)
        return True

    def evict(self, count: int, pins: Sequence[int], rank: int = 0) -> Sequence[int]:
        """Choose victims for chunks of that rank and deeper ones; see :class:`~tierkv.abc.PrefixAwarePolicy`.

        Returns:
            ``count`` handles, or none; for a chunk that continues a prefix or fills a gap in one, perhaps fewer.
        """
        stop = self.stop_of(rank)
        if self._aware is not None and self.fills_gap(rank):
            victims = self._evict_for_gap(count, pins) or self._evict_tail(count, pins, rank)
        elif self._aware is None or stop == NO_CHUNK:
            victims = self._policy.evict(count, pins)
        else:
            victims = self._evict_before(self._aware, count, pins, stop, rank >> OWNER_BITS)
            if not victims and (chain := self._chain(stop)):
                self._policy.release(chain)
                victims = self._evict_before(self._aware, count, pins, stop, rank >> OWNER_BITS)
        self.evicted(victims)
        return victims

    def _evict_for_gap(self, count: int, pins: Sequence[int]) -> Sequence[int]:
        """Victims for a chunk in the middle of a prefix: none comes before a chunk that stays. Passes over a few."""
        victims: list[int] = []
        passed: list[int] = []
        while len(victims) < count and len(passed) < PASSED_MAX:
            chosen = self._policy.evict(count - len(victims), pins)
            victims += chosen
            if not chosen or self._key_of is None:
                break
            needed = self._needed(victims, NO_OWNER)
            passed += needed
            victims = [handle for handle in victims if handle not in needed]
        if passed and self._key_of is not None:
            passed.sort(key=lambda handle: self._ranks[handle] & DEPTH_MAX, reverse=True)  # the tail first
            self._policy.add(passed, [self._key_of(handle) for handle in passed])
        return victims

    def _evict_before(
        self, policy: PrefixAwarePolicy, count: int, pins: Sequence[int], stop: int, owner: int
    ) -> Sequence[int]:
        """Victims of a policy that neither a request nor chunks behind them need. stop: deepest chunk of that request.

        Where it chooses some that are needed, because it moves nothing at a use, they are added anew.
        """
        moved: set[int] = set()
        while True:
            victims = policy.evict_before(count, pins, stop)
            needed = self._needed(victims, owner)
            if not needed or self._key_of is None:
                return victims
            again = not moved.isdisjoint(needed)
            moved |= needed
            tail_first = sorted(needed, key=lambda handle: self._ranks[handle] & DEPTH_MAX, reverse=True)
            self._policy.add(tail_first, [self._key_of(handle) for handle in tail_first])
            if again or len(needed) < len(victims) or len(moved) > CHAIN_MAX:
                return [handle for handle in victims if handle not in needed]

    def _evict_tail(self, count: int, pins: Sequence[int], rank: int) -> list[int]:
        """Victims from the end of a request's prefix, down to that rank: without the chunk they serve no request."""
        victims: list[int] = []
        handle = self._chunk_at(self._deepest.get(rank >> OWNER_BITS, NO_LINK))
        while handle != NO_CHUNK and len(victims) < count and self._ranks[handle] & DEPTH_MAX > rank & DEPTH_MAX:
            if pins[handle] or self._behind[handle] > bool(victims):  # chunks of other requests are behind it
                break
            victims.append(handle)
            handle = self._chunk_at(self._before[handle])
        self._policy.remove(victims)
        return victims

    def _needed(self, victims: Sequence[int], owner: int) -> set[int]:
        """Those of ``victims`` that belong to that request, or come before a chunk that is not evicted with them."""
        ranked = [handle for handle, rank in zip(victims, self.ranks_at(victims), strict=True) if rank]
        needed = {handle for handle in ranked if self._ranks[handle] >> OWNER_BITS == owner}
        before = {handle: self._chunk_at(self._before[handle]) for handle in ranked if handle not in needed}
        staying = {handle: self._behind[handle] for handle in before}  # chunks behind each that are not evicted
        for last in before.values():
            if last in staying:
                staying[last] -= 1
        found = [handle for handle, count in staying.items() if count]
        while found:
            handle = found.pop()
            needed.add(handle)
            if before[handle] in staying and before[handle] not in needed:
                found.append(before[handle])
        return needed

    def _chain(self, deepest: int) -> list[int]:
        """The known chunks of a prefix, tail first; none where they are more than half of the tier.

        They are in use, so others may leave before them. Between two such moves of a prefix all others have left, so
        the cost is O(1) per eviction.
        """
        chain, left = [deepest], min(len(self._policy) // 2, CHAIN_MAX)
        while left:
            before = self._chunk_at(self._before[chain[-1]])
            if before == NO_CHUNK:
                return chain
            chain.append(before)
            left -= 1
        return []

    def ranks_at(self, handles: Iterable[int | None]) -> list[int]:
        """Rank of each handle in the order; 0: it is not there, or no handle."""
        ranks, links, known = self._ranks, self._before, len(self._before)
        return [ranks[h] if h is not None and h < known and links[h] != UNLINKED else 0 for h in handles]

    def ranked(self) -> list[int]:
        """Handles in the order, which the policy must know. O(handles)."""
        return [handle for handle, link in enumerate(self._before) if link != UNLINKED]
