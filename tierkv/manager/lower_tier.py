"""One lower tier as the manager sees it: what it holds, what is known about it, what is under way, and its room.

Two kinds, told apart by the capability record. Of a tier with an *authoritative index* we know every chunk: existence
is answered at once, capacity is ours to keep. Of a *shared* tier we know only what we asked or wrote, for a while.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from tierkv.abc import Capabilities, EvictionPolicy
from tierkv.errors import require
from tierkv.manager.host_index import Chunk
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

HEADROOM_FRAMES_MIN, HEADROOM_FRAMES_MAX = 8, 512
"""Frames that a full tier makes room for at once: a few, so that the next write need not wait, or as many as wait."""


@dataclass(frozen=True, slots=True)
class LowerTierLimits:
    """Bounds of one lower tier. Times in seconds on the stack's clock.

    capacity_bytes: bytes at rest, or None where the place bounds itself. writes: whether chunks cascade to it.
    queue_chunks_max: chunks that may hold host slots while they are written to this tier.
    probe_keys_max: keys per existence probe. presence_ttl_s, absence_ttl_s: how long a shared tier's yes and no are
    believed. presence_keys_max: answers remembered. suspect_ttl_s: how long a chunk whose read failed counts as absent.
    """

    capacity_bytes: int | None
    writes: bool
    queue_chunks_max: int
    probe_deadline_s: float = 2.0
    read_deadline_s: float = 10.0
    write_deadline_s: float = 30.0
    probe_keys_max: int = 1024
    presence_ttl_s: float = 30.0
    absence_ttl_s: float = 1.0
    presence_keys_max: int = 1_000_000
    suspect_ttl_s: float = 5.0


class LowerTier:
    """State of one lower tier. Sans-IO, single-threaded; O(1) amortised per key."""

    def __init__(
        self, index: int, name: str, capabilities: Capabilities, limits: LowerTierLimits, policy: EvictionPolicy
    ) -> None:
        self.index = index
        self.name = name
        self.capabilities = capabilities
        self.limits = limits
        self.usable = True
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.cascades: deque[Chunk] = deque()
        self.cascading: set[Key] = set()
        self.unknown_to_ask: dict[Key, None] = {}
        self._policy = policy
        self._resident: dict[Key, int] = {}
        self._in_use: dict[Key, int] = {}
        self._deleting: set[Key] = set()
        self._answers: OrderedDict[Key, tuple[bool, float]] = OrderedDict()
        self._asked: set[Key] = set()

    @property
    def policy(self) -> EvictionPolicy:
        """In which order chunks leave."""
        return self._policy

    def __len__(self) -> int:
        """Chunks known to be stored here."""
        return len(self._resident)

    # -- existence ---------------------------------------------------------------------------------------------------

    def presence(self, key: Key, now: float) -> LookupResult:
        """Whether ``key`` is here: HIT, MISS, or RETRY where a shared tier has to be asked first."""
        if not self.usable or key in self._deleting:
            return LookupResult.MISS
        answer = self._answers.get(key)
        if answer is not None:
            if now < answer[1]:
                return LookupResult.HIT if answer[0] else LookupResult.MISS
            del self._answers[key]
        if self.capabilities.authoritative_index:
            return LookupResult.HIT if key in self._resident else LookupResult.MISS
        return LookupResult.RETRY

    def ask(self, key: Key) -> None:
        """Queue an existence probe for ``key`` unless one is under way. Over the bound it waits for a later step."""
        if key not in self._asked and len(self.unknown_to_ask) < self.limits.probe_keys_max:
            self.unknown_to_ask[key] = None

    def take_probe(self) -> tuple[Key, ...]:
        """The keys to probe now, in the order in which they were asked for."""
        if not self.unknown_to_ask or self._asked:
            return ()
        keys = tuple(self.unknown_to_ask)
        self.unknown_to_ask.clear()
        self._asked.update(keys)
        return keys

    def answered(self, key: Key, now: float, *, present: bool) -> None:
        """A probe ended. No answer in time counts as absent."""
        self._asked.discard(key)
        ttl = self.limits.presence_ttl_s if present else self.limits.absence_ttl_s
        self._remember(key, now + ttl, present=present)

    def suspect(self, key: Key, now: float) -> None:
        """A read of ``key`` failed although it may be there: treat it as absent for a while."""
        self._remember(key, now + self.limits.suspect_ttl_s, present=False)

    def _remember(self, key: Key, until: float, *, present: bool) -> None:
        self._answers[key] = (present, until)
        self._answers.move_to_end(key)
        if len(self._answers) > self.limits.presence_keys_max:
            self._answers.popitem(last=False)

    # -- residency ---------------------------------------------------------------------------------------------------

    def load_index(self, entries: Iterable[tuple[Key, int]]) -> None:
        """Take over what the backend found at rest, oldest first."""
        for key, frame_bytes in entries:
            self._store(key, frame_bytes)

    def stored(self, key: Key, frame_bytes: int, now: float) -> None:
        """A write was acknowledged."""
        if self.capabilities.authoritative_index:
            self._answers.pop(key, None)
            self._store(key, frame_bytes)
        else:
            self._remember(key, now + self.limits.presence_ttl_s, present=True)

    def _store(self, key: Key, frame_bytes: int) -> None:
        known = self._resident.pop(key, None)
        if known is None:
            self._make_evictable(key)
        else:
            self.used_bytes -= known
        self._resident[key] = frame_bytes
        self.used_bytes += frame_bytes

    def forget(self, key: Key, now: float) -> bool:
        """``key`` is not here any more, or never was. Returns whether it was thought to be."""
        was_known = False
        if not self.capabilities.authoritative_index:
            answer = self._answers.get(key)
            was_known = answer is not None and answer[0]
            self._remember(key, now + self.limits.absence_ttl_s, present=False)
        frame_bytes = self._resident.pop(key, None)
        if frame_bytes is not None:
            self.used_bytes -= frame_bytes
            self._policy.remove(key)
            was_known = True
        return was_known

    # -- reads and writes under way: what they use may not be evicted meanwhile -------------------------------------

    def begin_read(self, key: Key) -> None:
        """A promotion reads ``key``."""
        self._use(key)

    def end_read(self, key: Key) -> None:
        """Undo :meth:`begin_read`."""
        self._end_use(key)

    def begin_write(self, key: Key, frame_bytes: int) -> None:
        """A chunk is written here; its frame takes at most ``frame_bytes``.

        It may be one that is thought to be bad and still on account: a deletion of the old frame that runs beside the
        write could hit the new one, or leave it with nobody who knows of it.
        """
        self._use(key)
        self.cascading.add(key)
        self.reserved_bytes += frame_bytes

    def end_write(self, key: Key, frame_bytes: int) -> None:
        """Undo :meth:`begin_write`."""
        self.reserved_bytes -= frame_bytes
        self.cascading.discard(key)
        self._end_use(key)

    def _use(self, key: Key) -> None:
        if key not in self._in_use and self._has_place(key):
            self._policy.hold(key)
        self._in_use[key] = self._in_use.get(key, 0) + 1

    def _end_use(self, key: Key) -> None:
        count = self._in_use.pop(key) - 1
        if count:
            self._in_use[key] = count
        elif self._has_place(key):
            self._policy.release(key)

    def _has_place(self, key: Key) -> bool:
        """Whether the policy knows ``key``."""
        return key in self._resident and key not in self._deleting

    def _make_evictable(self, key: Key) -> None:
        self._policy.add(key)
        if key in self._in_use:
            self._policy.hold(key)

    def touch(self, keys: Iterable[Key]) -> None:
        """Recency only; tail first."""
        self._policy.touch(keys)

    # -- room --------------------------------------------------------------------------------------------------------

    def wants(self, key: Key, now: float) -> bool:
        """Whether a chunk of that key should be written here: it takes writes, and neither has it nor is getting it."""
        if not self.limits.writes or key in self.cascading or key in self._deleting:
            return False
        return self.presence(key, now) is not LookupResult.HIT

    def may_get_room(self, frame_bytes: int) -> bool:
        """Whether room for a frame of that size may come about by work that is under way here."""
        capacity = self.limits.capacity_bytes
        return capacity is None or (frame_bytes <= capacity and bool(self._deleting or self.reserved_bytes))

    def has_room(self, frame_bytes: int) -> bool:
        """Whether a frame of that size fits beside everything stored and being written."""
        capacity = self.limits.capacity_bytes
        return capacity is None or self.used_bytes + self.reserved_bytes + frame_bytes <= capacity

    def victims(self, frame_bytes: int, waiting: int = 0) -> tuple[Key, ...]:
        """Chunks to delete so that room comes about for the ``waiting`` frames of that size, and a few more.

        Never more than a quarter of the tier at once: what is evicted in one step should be needed soon.

        Their bytes count as used until the deletion is confirmed by :meth:`deleted`.
        """
        capacity = self.limits.capacity_bytes
        if capacity is None or frame_bytes > capacity:
            return ()
        frames = min(max(waiting, HEADROOM_FRAMES_MIN), HEADROOM_FRAMES_MAX)
        headroom = max(frame_bytes, min(capacity // 4, frames * frame_bytes))
        missing = self.used_bytes + self.reserved_bytes + headroom - capacity
        missing -= sum(self._resident.get(key, 0) for key in self._deleting)
        chosen: list[Key] = []
        while missing > 0 and (victim := self._policy.evict()) is not None:
            chosen.append(victim)
            self._deleting.add(victim)
            missing -= self._resident[victim]
        return tuple(chosen)

    def next_victim(self) -> tuple[Key, ...]:
        """One chunk to delete because the place itself said that it is full."""
        victim = self._policy.evict()
        if victim is None:
            return ()
        self._deleting.add(victim)
        return (victim,)

    def holds(self, key: Key) -> bool:
        """Whether bytes of ``key`` are on this tier's account, or on their way to it."""
        return key in self._resident or key in self.cascading

    def may_delete(self, key: Key, now: float) -> bool:
        """Whether ``key`` is here and nobody reads, writes or deletes it."""
        return key not in self._in_use and self._has_place(key) and self.presence(key, now) is LookupResult.HIT

    def condemn(self, key: Key) -> None:
        """``key`` is about to be deleted for another reason than room (its frame is bad)."""
        self._deleting.add(key)
        self._policy.remove(key)

    def deleted(self, key: Key, *, ok: bool, now: float) -> bool:
        """A deletion ended. Returns whether the chunk had been known until now.

        A deletion that failed leaves the bytes on the tier's account: they are still there. They are not read again at
        once: they may be bad, and refused for deletion every time.
        """
        self._deleting.discard(key)
        if ok:
            return self.forget(key, now)
        self.suspect(key, now)
        if key in self._resident:
            self._make_evictable(key)
        return False

    def validate(self) -> None:
        """Check the account and the policy against what is resident.

        Raises:
            InvariantError: one of it is not so.
        """
        require(self.used_bytes == sum(self._resident.values()), f"tier {self.name}: bytes are counted wrong")
        require(self.reserved_bytes >= 0, f"tier {self.name}: {self.reserved_bytes} bytes are reserved")
        evictable = sum(key not in self._in_use and key not in self._deleting for key in self._resident)
        require(
            evictable == len(self._policy),
            f"tier {self.name}: {evictable} chunks are evictable, the policy has {len(self._policy)}",
        )
        capacity, total = self.limits.capacity_bytes, self.used_bytes + self.reserved_bytes
        # A tier that was opened over its capacity (the user made it smaller) may be so until it has shrunk, but must
        # not grow meanwhile.
        fits = capacity is None or total <= capacity or not self.reserved_bytes
        require(fits, f"tier {self.name} is over its capacity: {total} > {capacity}")
