"""One lower tier: its phase, the chunks in it, the answers about them, and the chunks that wait to be written.

Two kinds of tiers differ by the capability record. Of a tier with an *authoritative index* every chunk is known:
existence is answered at once, and the manager keeps its capacity. Of a *shared* tier only recent answers and writes are
known, each for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tierkv.abc import AdmissionPolicy, Capabilities, EvictionPolicy
from tierkv.manager.lower.presence_cache import PresenceCache
from tierkv.manager.lower.residency import DELETING, STORED, WRITING, Residency
from tierkv.manager.lower.tier_phase import TIER_PHASES, TierEvent, TierPhase
from tierkv.structures.lease_queue import LeaseQueue
from tierkv.structures.seen_filter import SeenFilter
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.state_machine import TRANSITIONS_KEPT, TransitionLog

_SAME_STEP_S = 1e-6
"""Shortest time for which an answer is kept: until the end of its step, so that a waiting request sees it."""

EMPTIED_PER_STEP_MAX = 512
"""Chunks whose deletion is scheduled per step after a reset, so that a step stays short."""


class WritePolicy(StrEnum):
    """Moment at which a chunk of the host tier is written to a lower tier."""

    THROUGH = "through"
    """As soon as it is readable in the host tier."""
    ON_REUSE = "on_reuse"
    """At its second use."""
    BACK = "back"
    """Before the host tier evicts it."""
    READ_ONLY = "read_only"
    """Never."""


@dataclass(frozen=True, slots=True)
class LowerTierLimits:
    """Bounds of one lower tier. Times in seconds on the stack's clock."""

    capacity_bytes: int | None
    """Bytes at rest, or None if the tier limits itself."""
    write: WritePolicy
    """Moment at which chunks are written to it."""
    queue_chunks_max: int
    """Chunks that may hold host slots while they are written to this tier."""
    probe_deadline_s: float = 2.0
    read_deadline_s: float = 10.0
    write_deadline_s: float = 30.0
    probe_keys_max: int = 1024
    """Keys per existence probe."""
    presence_ttl_s: float = 30.0
    """Time for which a shared tier's answer "present" is kept."""
    absence_ttl_s: float = 1.0
    """Time for which a shared tier's answer "absent" is kept."""
    presence_keys_max: int = 1_000_000
    """Answers kept."""
    suspect_ttl_s: float = 5.0
    """Time for which a chunk whose read failed counts as absent."""
    seen_keys_max: int = 1_000_000
    """Chunks that a tier with ``ON_REUSE`` remembers as seen once."""
    exact: bool = True
    """Whether bytes are read back as they were written. Chunks from an inexact tier are not written to others."""

    @property
    def writes(self) -> bool:
        """Whether chunks are written to it."""
        return self.write is not WritePolicy.READ_ONLY


class LowerTier:
    """State of one lower tier. Sans-IO, single-threaded; O(1) amortised per key."""

    def __init__(
        self, index: int, name: str, capabilities: Capabilities, limits: LowerTierLimits, policy: EvictionPolicy
    ) -> None:
        self.index = index
        self.name = name
        self.capabilities = capabilities
        self.limits = limits
        self.phase = TierPhase.SERVING
        self.residency = Residency(name, policy, limits.capacity_bytes, limits.suspect_ttl_s)
        """Chunks stored, written, read and deleted here, and the account of bytes."""
        self.presence_cache = PresenceCache(limits.presence_keys_max)
        """Recent answers about chunks, and chunks that count as absent for a while."""
        self.write_queue = LeaseQueue(unique=limits.write is not WritePolicy.THROUGH)
        """Leases on chunks of the host tier that wait to be written here."""
        self.seen = SeenFilter(limits.seen_keys_max) if limits.write is WritePolicy.ON_REUSE else None
        """Chunks that were used once; None unless the tier writes on reuse."""
        self.queue_chunks_max = limits.queue_chunks_max
        """Share of ``limits.queue_chunks_max`` that the tier may use beside other tiers."""
        self._transitions: TransitionLog[TierEvent, TierPhase] = TransitionLog(maxlen=TRANSITIONS_KEPT)
        self._present_s = max(limits.presence_ttl_s, _SAME_STEP_S)
        self._absent_s = max(limits.absence_ttl_s, _SAME_STEP_S)
        self._gate = policy if isinstance(policy, AdmissionPolicy) else None
        self._deferred_writes: dict[Key, tuple[int, int]] = {}  # leases on chunks to write after a deletion
        self._late_changes = 0  # writes and deletions that run on behind their deadlines
        self._to_probe: dict[Key, None] = {}
        self._probing: set[Key] = set()

    @property
    def policy(self) -> EvictionPolicy:
        """Policy that decides the eviction order."""
        return self.residency.policy

    # -- phase -------------------------------------------------------------------------------------------------------

    def _apply(self, event: TierEvent) -> None:
        self.phase = TIER_PHASES.next(self.phase, event, self.name, self._transitions.describe)
        self._transitions.append((event, self.phase))

    def health_changed(self, *, usable: bool) -> None:
        """Dispatch reports whether it can use the tier."""
        self._apply(TierEvent.HEALTH_REGAINED if usable else TierEvent.HEALTH_LOST)

    def reset(self) -> None:
        """Begin to delete every chunk; :meth:`continue_reset` follows in every step."""
        self._apply(TierEvent.RESET)

    def detach(self) -> None:
        """Take the tier out of service for good. Operations that are under way still end."""
        self._apply(TierEvent.DETACHED)
        self._to_probe.clear()

    def continue_reset(self) -> None:
        """Schedule some more deletions after a reset. With the last one confirmed the tier is in service again."""
        residency = self.residency
        if self.phase.usable and residency.evict(EMPTIED_PER_STEP_MAX):  # out of service it would refuse every step
            return
        if not (len(residency.policy) or residency.num_deleting or residency.num_writing):
            self._apply(TierEvent.EMPTIED)

    @property
    def emits_events(self) -> bool:
        """Whether cache events are reported for it. Not after an event has reported that everything was removed."""
        return self.phase is not TierPhase.DETACHED and not self.phase.emptying

    @property
    def has_pending_changes(self) -> bool:
        """Whether chunks wait for, or are in, a write to this tier, or are to be deleted after a reset.

        A tier that is out of service deletes nothing, so its deletions do not count.
        """
        phase = self.phase
        return bool(
            self.residency.num_writing
            or self.write_queue
            or (phase.usable and (phase.emptying or self._deferred_writes))
        )

    @property
    def has_backlog(self) -> bool:
        """Whether chunks wait for a later step to be written or deleted here.

        Not while the tier is out of service, or is late with such a call: the wait has no bound.
        """
        waits = self.phase.emptying or len(self.write_queue) > 0 or len(self._deferred_writes) > 0
        return waits and self.phase.usable and not self._late_changes

    def change_is_late(self) -> None:
        """Count a write or deletion that missed its deadline and runs on."""
        self._late_changes += 1

    def late_change_ended(self) -> None:
        """Undo :meth:`change_is_late`."""
        self._late_changes -= 1

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is due or under way."""
        return not (self.write_queue or self._probing) and self.residency.is_quiet

    # -- existence ---------------------------------------------------------------------------------------------------

    def presence(self, key: Key, now: float) -> LookupResult:
        """Whether ``key`` is here: HIT, MISS, or RETRY if a shared tier has to be probed first."""
        return self._presence(key, self.residency.flags_of(key), now)

    def _presence(self, key: Key, flags: int, now: float) -> LookupResult:
        if self.phase is not TierPhase.SERVING or flags & DELETING:
            return LookupResult.MISS
        answer = self.presence_cache.get(key, now) if self.presence_cache.any else None
        if answer is not None:
            return LookupResult.HIT if answer else LookupResult.MISS
        if self.capabilities.authoritative_index:
            return LookupResult.HIT if flags & STORED else LookupResult.MISS
        return LookupResult.RETRY

    def probe_later(self, key: Key) -> None:
        """Queue an existence probe for ``key`` unless one is under way. Over the bound, a later step asks again."""
        if key not in self._probing and len(self._to_probe) < self.limits.probe_keys_max:
            self._to_probe[key] = None

    def take_probe(self) -> tuple[Key, ...]:
        """Take the keys to probe now, in the order in which they were asked for."""
        if not self._to_probe or self._probing:
            return ()
        keys = tuple(self._to_probe)
        self._to_probe.clear()
        self._probing.update(keys)
        return keys

    def probed(self, key: Key, now: float, *, present: bool) -> None:
        """End the probe of one key. No answer in time counts as absent."""
        self._probing.discard(key)
        ttl = self._present_s if present else self._absent_s
        self.presence_cache.put(key, now + ttl, present=present)

    def mark_absent(self, key: Key, now: float) -> None:
        """Count ``key`` as absent for a while, because a read of it failed."""
        self.presence_cache.put(key, now + self.limits.suspect_ttl_s, present=False)

    # -- stored and deleted ------------------------------------------------------------------------------------------

    def stored(self, entries: Sequence[tuple[Key, int]], now: float) -> None:
        """Record acknowledged writes: keys, each with the bytes of its frame."""
        if self.capabilities.authoritative_index:
            if self.presence_cache.any:
                for key, _ in entries:
                    self.presence_cache.forget(key)
            self.residency.add(entries)
        else:
            for key, _ in entries:
                self.presence_cache.put(key, now + self._present_s, present=True)

    def forget(self, key: Key, now: float) -> bool:
        """Record that ``key`` is not here. Returns whether it was known to be."""
        was_known = False
        if not self.capabilities.authoritative_index:
            was_known = bool(self.presence_cache.get(key, now))
            self.presence_cache.put(key, now + self._absent_s, present=False)
        return self.residency.discard(key) or was_known

    def deleted(self, key: Key, *, ok: bool, now: float) -> bool:
        """End a deletion. Returns whether the chunk was known to be here until now.

        After a failed deletion the bytes stay on the account, because they are still at rest. The chunk counts as
        absent for a while: its frame may be corrupt, and every deletion may be refused.
        """
        residency = self.residency
        if key in residency.uncertain:
            residency.end_uncertain(key, now, ok=ok)
            return False
        known = self.forget(key, now) if ok else False  # the policy does not know a chunk that is being deleted
        if not ok:
            self.mark_absent(key, now)
        residency.end_deletion(key)
        return known

    def mark_uncertain(self, key: Key, frame_bytes: int) -> None:
        """Schedule the deletion of a chunk whose write failed; see :meth:`Residency.mark_uncertain`.

        Does nothing for a shared tier: its bytes are not accounted here.
        """
        if self.capabilities.authoritative_index:
            self.residency.mark_uncertain(key, frame_bytes)

    def may_delete(self, key: Key, now: float) -> bool:
        """Whether ``key`` is here, and not being read, written or deleted."""
        return self.residency.is_idle(key) and self.presence(key, now) is LookupResult.HIT

    def load_index(self, entries: Iterable[tuple[Key, int]]) -> None:
        """Take over the index of the backend; see :meth:`Residency.load_index`."""
        self.residency.load_index(entries)

    # -- writes ------------------------------------------------------------------------------------------------------

    def wants(self, key: Key, now: float) -> bool:
        """Whether a chunk should be written here: it is neither stored nor being written, and the tier takes writes."""
        flags = self.residency.flags_of(key)
        if not self.limits.writes or flags & (WRITING | DELETING):
            return False
        return self._presence(key, flags, now) is not LookupResult.HIT

    def missing(self, chunks: Sequence[tuple[int, Key]], now: float) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that it wants; see :meth:`wants`."""
        if not self.limits.writes:
            return []
        indexed = self.phase is TierPhase.SERVING and self.capabilities.authoritative_index
        if self.presence_cache.any or not indexed:
            return [chunk for chunk in chunks if self.wants(chunk[1], now)]
        return self.residency.without_flags(chunks)

    def refused(self, keys: Sequence[Key], frame_bytes: int) -> Collection[int]:
        """Positions of those ``keys`` that the policy does not admit. frame_bytes: upper bound for each frame."""
        if self._gate is None:
            return ()
        if self.limits.capacity_bytes is None:
            return self._gate.refuse(keys, len(keys))
        residency = self.residency
        free = (self.limits.capacity_bytes - residency.used_bytes - residency.reserved_bytes) // frame_bytes
        return self._gate.refuse(keys, max(0, free - len(self.write_queue)))

    def write_after_deletion(self, key: Key, lease: tuple[int, int]) -> None:
        """Remember a chunk that is due while its old frame is being deleted. lease: its slot and generation."""
        self._deferred_writes[key] = lease

    def take_deferred_writes(self, keys: Sequence[Key]) -> list[tuple[Key, tuple[int, int]]]:
        """Take those of ``keys`` that are due since their deletion began, each with its lease."""
        deferred = self._deferred_writes
        return [(key, deferred.pop(key)) for key in keys if key in deferred] if deferred else []

    # -- check -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check the account of bytes and the policy; see :meth:`Residency.validate`.

        Raises:
            InvariantError: they differ from the chunks.
        """
        self.residency.validate()
