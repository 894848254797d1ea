"""One lower tier as the manager sees it: what it holds, what is known about it, what is under way, and its room.

Two kinds, told apart by the capability record. Of a tier with an *authoritative index* we know every chunk: existence
is answered at once, capacity is ours to keep. Of a *shared* tier we know only what we asked or wrote, for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from tierkv.abc import AdmissionPolicy, Capabilities, EvictionPolicy
from tierkv.errors import require
from tierkv.manager.lower.presence_cache import PresenceCache
from tierkv.manager.lower.residency import DELETING, STORED, WRITING, TierTable
from tierkv.structures.key_table import KEY_BYTES_MIN
from tierkv.structures.lease_queue import LeaseQueue
from tierkv.structures.seen_filter import SeenFilter
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_SAME_STEP_S = 1e-6
"""An answer is believed in the step in which it comes at least: or a request that waits for it would never see it."""

_LOAD_KEYS = 4096
"""Keys of an index that the policy is told of at once."""

EMPTIED_PER_STEP_MAX = 512
"""Chunks that begin to be deleted in one step after a reset: a step stays short."""

HEADROOM_FRAMES_MIN, HEADROOM_FRAMES_MAX = 8, 512
"""Frames that a full tier makes room for at once: a few, so that the next write need not wait, or as many as wait."""


class WritePolicy(StrEnum):
    """When a chunk of the host tier is written to a tier below."""

    THROUGH = "through"
    """As soon as the host tier has it."""
    ON_REUSE = "on_reuse"
    """When it is wanted a second time."""
    BACK = "back"
    """When the host tier is about to evict it."""
    READ_ONLY = "read_only"
    """Never."""


@dataclass(frozen=True, slots=True)
class LowerTierLimits:
    """Bounds of one lower tier. Times in seconds on the stack's clock.

    capacity_bytes: bytes at rest, or None where the place bounds itself. write: when chunks are written to it.
    queue_chunks_max: chunks that may hold host slots while they are written to this tier.
    probe_keys_max: keys per existence probe. presence_ttl_s, absence_ttl_s: how long a shared tier's yes and no are
    believed. presence_keys_max: answers remembered. suspect_ttl_s: how long a chunk whose read failed counts as absent.
    seen_keys_max: chunks that an edge that writes on reuse remembers as seen once. exact: whether bytes come back as
    they were written; what comes from a tier where they do not is not spread to others.
    """

    capacity_bytes: int | None
    write: WritePolicy
    queue_chunks_max: int
    probe_deadline_s: float = 2.0
    read_deadline_s: float = 10.0
    write_deadline_s: float = 30.0
    probe_keys_max: int = 1024
    presence_ttl_s: float = 30.0
    absence_ttl_s: float = 1.0
    presence_keys_max: int = 1_000_000
    suspect_ttl_s: float = 5.0
    seen_keys_max: int = 1_000_000
    exact: bool = True

    @property
    def writes(self) -> bool:
        """Whether anything is ever written to it."""
        return self.write is not WritePolicy.READ_ONLY


class LowerTier(TierTable):
    """State of one lower tier. Sans-IO, single-threaded; O(1) amortised per key."""

    def __init__(
        self, index: int, name: str, capabilities: Capabilities, limits: LowerTierLimits, policy: EvictionPolicy
    ) -> None:
        super().__init__(policy)
        self.index = index
        self.name = name
        self.capabilities = capabilities
        self.limits = limits
        self._present_s = max(limits.presence_ttl_s, _SAME_STEP_S)
        self._absent_s = max(limits.absence_ttl_s, _SAME_STEP_S)
        self.usable = True
        self.leaving = False  # was detached; what is under way has not ended
        self.emptying = False  # was reset; not everything is deleted yet
        self.queue_chunks_max = limits.queue_chunks_max
        self._gate = policy if isinstance(policy, AdmissionPolicy) else None
        self.after_deletion: dict[Key, tuple[int, int]] = {}  # leases on chunks that are due when a bad frame is gone
        self.changes_late = 0  # writes and deletions that run on behind their deadlines
        self.cascades = LeaseQueue(unique=limits.write is not WritePolicy.THROUGH)
        self.seen = SeenFilter(limits.seen_keys_max) if limits.write is WritePolicy.ON_REUSE else None
        self.deletions: list[Key] = []
        self.unknown_to_ask: dict[Key, None] = {}
        self._answers = PresenceCache(limits.presence_keys_max)
        self._asked: set[Key] = set()
        self._doubtful: dict[Key, int] = {}  # bytes that stay reserved until the key's deletion is confirmed
        self._overdue: deque[tuple[float, Key]] = deque()

    @property
    def emits_events(self) -> bool:
        """Whether events tell what comes and goes here: not once they have said that everything has left."""
        return not (self.leaving or self.emptying)

    @property
    def has_backlog(self) -> bool:
        """Whether chunks wait for a later step to be written or deleted here.

        Not while the tier is out of service, or is late with such a call: nobody knows for how long.
        """
        waits = self.emptying or len(self.cascades) > 0 or len(self.after_deletion) > 0
        return waits and self.usable and not self.changes_late

    # -- existence ---------------------------------------------------------------------------------------------------

    def presence(self, key: Key, now: float) -> LookupResult:
        """Whether ``key`` is here: HIT, MISS, or RETRY where a shared tier has to be asked first."""
        row = self._rows.find(key)
        return self._presence(key, 0 if row is None else self._flags[row], now)

    def _presence(self, key: Key, flags: int, now: float) -> LookupResult:
        if not self.usable or self.emptying or flags & DELETING:
            return LookupResult.MISS
        answer = self._answers.get(key, now) if self._answers.any else None
        if answer is not None:
            return LookupResult.HIT if answer else LookupResult.MISS
        if self.capabilities.authoritative_index:
            return LookupResult.HIT if flags & STORED else LookupResult.MISS
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
        ttl = self._present_s if present else self._absent_s
        self._answers.put(key, now + ttl, present=present)

    def mark_absent(self, key: Key, now: float) -> None:
        """A read of ``key`` failed although it may be there: treat it as absent for a while."""
        self._answers.put(key, now + self.limits.suspect_ttl_s, present=False)

    # -- residency ---------------------------------------------------------------------------------------------------

    def load_index(self, entries: Iterable[tuple[Key, int]]) -> None:
        """Take over what the backend found at rest, oldest first.

        Passed over is what can be no key of ours, and what is just being deleted.
        """
        rest = iter(entries)
        while batch := list(islice(rest, _LOAD_KEYS)):
            usual = [(key, size) for key, size in batch if len(key) >= KEY_BYTES_MIN and size >= 0]
            if self._num_deleting:
                usual = [entry for entry in usual if not self._flagged(entry[0], DELETING)]
            self._store(usual)

    def stored(self, entries: Sequence[tuple[Key, int]], now: float) -> None:
        """Writes were acknowledged: keys, each with the bytes of its frame."""
        if self.capabilities.authoritative_index:
            if self._answers.any:
                for key, _ in entries:
                    self._answers.forget(key)
            self._store(entries)
        else:
            for key, _ in entries:
                self._answers.put(key, now + self._present_s, present=True)

    def forget(self, key: Key, now: float) -> bool:
        """``key`` is not here any more, or never was. Returns whether it was thought to be."""
        was_known = False
        if not self.capabilities.authoritative_index:
            was_known = bool(self._answers.get(key, now))
            self._answers.put(key, now + self._absent_s, present=False)
        row = self._rows.find(key)
        if row is not None and self._flags[row] & STORED:
            if self._is_listed(row):
                self._unlist(row)
            else:
                self._deleting_bytes -= self._frame_bytes[row]
            self._flags[row] &= ~STORED
            self.used_bytes -= self._frame_bytes[row]
            self._leave(row)
            was_known = True
        return was_known

    # -- room --------------------------------------------------------------------------------------------------------

    def wants(self, key: Key, now: float) -> bool:
        """Whether a chunk of that key should be written here: it takes writes, and neither has it nor is getting it."""
        row = self._rows.find(key)
        flags = 0 if row is None else self._flags[row]
        if not self.limits.writes or flags & (WRITING | DELETING):
            return False
        return self._presence(key, flags, now) is not LookupResult.HIT

    def missing(self, chunks: Sequence[tuple[int, Key]], now: float) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that it wants; see :meth:`wants`."""
        if not self.limits.writes:
            return []
        if self._answers.any or not (self.usable and self.capabilities.authoritative_index) or self.emptying:
            return [chunk for chunk in chunks if self.wants(chunk[1], now)]
        flags = self._flags
        rows = self._rows.find_all([key for _, key in chunks])
        return [chunk for chunk, row in zip(chunks, rows, strict=True) if row is None or not flags[row]]

    def refused(self, keys: Sequence[Key], frame_bytes: int) -> Collection[int]:
        """Which of ``keys`` the policy does not let in, as positions. frame_bytes: what each takes at most."""
        if self._gate is None:
            return ()
        capacity = self.limits.capacity_bytes
        if capacity is None:
            return self._gate.refuse(keys, len(keys))
        free = (capacity - self.used_bytes - self.reserved_bytes) // frame_bytes
        return self._gate.refuse(keys, max(0, free - len(self.cascades)))

    def may_get_room(self, frame_bytes: int) -> bool:
        """Whether room for a frame of that size may come about by work that is under way here."""
        capacity = self.limits.capacity_bytes
        return capacity is None or (frame_bytes <= capacity and bool(self._num_deleting or self.reserved_bytes))

    def has_room(self, frame_bytes: int) -> bool:
        """Whether a frame of that size fits beside everything stored and being written."""
        capacity = self.limits.capacity_bytes
        return capacity is None or self.used_bytes + self.reserved_bytes + frame_bytes <= capacity

    def frames_free(self, frame_bytes: int, frames_max: int) -> int:
        """How many frames of that size fit, up to ``frames_max``."""
        capacity = self.limits.capacity_bytes
        free = frames_max if capacity is None else (capacity - self.used_bytes - self.reserved_bytes) // frame_bytes
        return max(0, min(free, frames_max))

    def victims(self, frame_bytes: int, waiting: int = 0) -> list[Key]:
        """Chunks to delete so that room comes about for the ``waiting`` frames of that size, and a few more.

        Never more than a quarter of the tier at once: what is evicted in one step should be needed soon.

        Their bytes count as used until the deletion is confirmed by :meth:`deleted`.
        """
        capacity = self.limits.capacity_bytes
        if capacity is None or frame_bytes > capacity:
            return []
        frames = min(max(waiting, HEADROOM_FRAMES_MIN), HEADROOM_FRAMES_MAX)
        headroom = max(frame_bytes, min(capacity // 4, frames * frame_bytes))
        missing = self.used_bytes + self.reserved_bytes + headroom - capacity - self._deleting_bytes
        chosen: list[Key] = []
        while missing > 0 and self._evictable:
            # As many as are needed even if all of them are of the largest size.
            before = self._deleting_bytes
            victims = self._evict(max(1, missing // self._frame_bytes_max))
            if not victims:
                break
            chosen += victims
            missing -= self._deleting_bytes - before
        return chosen

    def empty(self) -> list[Key]:
        """Some more chunks to delete after a reset; with the last one gone the tier is in use again."""
        victims = self._evict(EMPTIED_PER_STEP_MAX) if self.usable else []  # it would refuse, in every step
        self.emptying = bool(victims or len(self._policy) or self._num_deleting or self.num_writing)
        return victims

    def may_delete(self, key: Key, now: float) -> bool:
        """Whether ``key`` is here and nobody reads, writes or deletes it."""
        return self.is_idle(key) and self.presence(key, now) is LookupResult.HIT

    def schedule_delete(self, key: Key) -> None:
        """``key`` is about to be deleted for another reason than room (its frame is bad)."""
        row = self._row(key)
        if self._is_listed(row):
            self._unlist(row)
        if not self._flags[row] & DELETING:
            self._begin_deletion(row)

    def deleted(self, key: Key, *, ok: bool, now: float) -> bool:
        """A deletion ended. Returns whether the chunk had been known until now.

        A deletion that failed leaves the bytes on the tier's account: they are still there. They are not read again at
        once: they may be bad, and refused for deletion every time.
        """
        if key in self._doubtful:
            if ok:
                self.reserved_bytes -= self._doubtful.pop(key)
                self._end_deletion(self._row(key))
            else:
                self._overdue.append((now + self.limits.suspect_ttl_s, key))
            return False
        known = self.forget(key, now) if ok else False  # while it is being deleted, the policy does not know it
        if not ok:
            self.mark_absent(key, now)
        self._end_deletion(self._row(key))
        return known

    def mark_uncertain(self, key: Key, frame_bytes: int) -> bool:
        """A write of ``key`` did not end well, and may lie here all the same: too late, or only its reply was lost.

        Its bytes, at most ``frame_bytes``, stay reserved until its deletion is confirmed. Nothing of it is read.

        Returns:
            Whether it has to be deleted: only where the account is ours.
        """
        if not self.capabilities.authoritative_index:
            return False
        if self._flagged(key, STORED):
            self.schedule_delete(key)
        else:
            self._begin_deletion(self._row(key))
            self.reserved_bytes += frame_bytes
            self._doubtful[key] = frame_bytes
        return True

    def overdue(self, now: float) -> list[Key]:
        """Deletions of doubtful chunks that failed a while ago, and are tried again."""
        keys: list[Key] = []
        while self._overdue and self._overdue[0][0] <= now:
            keys.append(self._overdue.popleft()[1])
        return keys

    # -- check -------------------------------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way or waits here."""
        return not (self.cascades or self._num_deleting or self._asked or any(self._uses))

    def validate(self) -> None:
        """Check the account and the policy against what is resident.

        Raises:
            InvariantError: one of it is not so.
        """
        what = f"tier {self.name}"
        rows = [row for _, row in self._rows.items()]
        stored = [row for row in rows if self._flags[row] & STORED]
        require(self.used_bytes == sum(self._frame_bytes[row] for row in stored), f"{what}: bytes are counted wrong")
        doubted = sum(self._doubtful.values())
        require(self.reserved_bytes >= doubted, f"{what}: {self.reserved_bytes} bytes are reserved, {doubted} doubtful")
        require(all(self._flagged(key, DELETING) for key in self._doubtful), f"{what}: a doubtful chunk is forgotten")
        require(all(self._flags[row] or self._uses[row] for row in rows), f"{what}: a row stands for nothing")
        writing = sum(bool(self._flags[row] & WRITING) for row in rows)
        require(writing == self.num_writing, f"{what}: {writing} chunks are written, {self.num_writing} are counted")
        listed = [row for row in stored if self._is_listed(row)]
        require(len(listed) == len(self._policy), f"{what}: {len(listed)} chunks, the policy has {len(self._policy)}")
        idle = sum(not self._uses[row] for row in listed)
        require(idle == self._evictable, f"{what}: {idle} chunks are evictable, {self._evictable} are counted")
        deleting = sum(self._frame_bytes[row] for row in stored if not self._is_listed(row))
        require(deleting == self._deleting_bytes, f"{what}: {deleting} bytes are deleted, not {self._deleting_bytes}")
        capacity, total = self.limits.capacity_bytes, self.used_bytes + self.reserved_bytes
        # A tier that was opened over its capacity (the user made it smaller) may be so until it has shrunk, but must
        # not grow meanwhile.
        fits = capacity is None or total <= capacity or not self.reserved_bytes
        require(fits, f"{what} is over its capacity: {total} > {capacity}")
