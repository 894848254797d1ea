"""One lower tier: its phase, the chunks in it, the answers about them, and the chunks that wait to be written.

Two kinds of tiers differ by the capability record. Of a tier with an *authoritative index* every chunk is known:
existence is answered at once, and the manager keeps its capacity. Of a *shared* tier only recent answers and writes are
known, each for a while.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tierkv.abc import AdmissionPolicy, Capabilities, EvictionPolicy
from tierkv.manager.lower.learned_room import LearnedRoom
from tierkv.manager.lower.presence_cache import PresenceCache
from tierkv.manager.lower.probe_queue import ProbeQueue
from tierkv.manager.lower.residency import Residency
from tierkv.manager.lower.row_table import DELETING, STORED, WRITING
from tierkv.manager.lower.tier_phase import TIER_PHASES, TierEvent, TierPhase
from tierkv.structures.key_table import KeyDirectory
from tierkv.structures.lease_queue import LeaseQueue
from tierkv.structures.seen_filter import SeenFilter
from tierkv.structures.written_order import WrittenRanks
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.state_machine import TRANSITIONS_KEPT, TransitionLog
from tierkv.types.tier_ops import TierContent

_SAME_STEP_S = 1e-6
"""Shortest time for which an answer is kept: until the end of its step, so that a waiting request sees it."""

PROBE_SHARE = 1 / 8
"""Share of its deadline that a probe should take. So a tier that is slower than expected still answers in time."""


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
    queue_chunks_max: int
    """Chunks that may hold host slots while they are written to this tier."""
    probe_deadline_s: float = 2.0
    read_deadline_s: float = 10.0
    write_deadline_s: float = 30.0
    probe_keys_max: int = 1024
    """Largest number of keys per existence probe."""
    reads_max: int = 4096
    """Reads in flight. Further ones wait for their end."""
    concurrency: int | None = None
    """Calls to the backend at once; None: as many as it prefers."""
    presence_ttl_s: float = 30.0
    absence_ttl_s: float = 1.0
    """Times for which a shared tier's answers "present" and "absent" are kept."""
    presence_keys_max: int = 1_000_000
    """Answers kept."""
    suspect_ttl_s: float = 5.0
    """Time for which a chunk whose reads failed counts as absent; after a first failure it is shorter."""
    seen_keys_max: int = 1_000_000
    """Chunks that a tier with ``ON_REUSE`` remembers as seen once."""
    exact: bool = True
    """Whether bytes are read back as they were written. Chunks from an inexact tier are not written to others."""

    @property
    def writes(self) -> bool:
        """Whether chunks are written to it."""
        return self.write is not WritePolicy.READ_ONLY


class LowerTier:
    """State of one lower tier. Sans-IO, single-threaded; O(1) amortised per key.

    Args:
        index: number of the tier.
        name: its name.
        capabilities: what its backend declares.
        limits: its bounds.
        policy: decides the eviction order.
        directory: shared by the tiers of a stack that have an authoritative index, so that one lookup finds a key in
            all of them; None: one of its own.
        rank_salt: of the ranks that are written here; see :class:`~tierkv.structures.written_order.WrittenRanks`.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the composition root hands everything in
        self,
        index: int,
        name: str,
        capabilities: Capabilities,
        limits: LowerTierLimits,
        policy: EvictionPolicy,
        directory: KeyDirectory | None = None,
        *,
        rank_salt: int = 0,
    ) -> None:
        self.index = index
        self.name = name
        self.capabilities = capabilities
        self.limits = limits
        self.phase = TierPhase.SERVING
        directory = directory if capabilities.authoritative_index else None
        self.residency = Residency(name, policy, limits.capacity_bytes, limits.suspect_ttl_s, directory)
        """Chunks stored, written, read and deleted here, and the account of bytes."""
        self.residency.spare = capabilities.spare_share, capabilities.spare_frame_bytes_max
        self._room = LearnedRoom(limits.capacity_bytes)
        self.presence_cache = PresenceCache(limits.presence_keys_max)
        """Recent answers about chunks, and chunks that count as absent for a while."""
        self.write_queue = LeaseQueue(unique=limits.write is not WritePolicy.THROUGH)
        """Leases on chunks of the host tier that wait to be written here."""
        self.seen = SeenFilter(limits.seen_keys_max) if limits.write is WritePolicy.ON_REUSE else None
        """Chunks that were used once; None unless the tier writes on reuse."""
        self.queue_chunks_max = limits.queue_chunks_max
        """Share of ``limits.queue_chunks_max`` that the tier may use beside other tiers."""
        self.written_ranks = WrittenRanks(rank_salt, kept=capabilities.keeps_ranks)
        """Ranks to write with chunks."""
        self.knows_content = True
        """Whether every stored chunk is known. Otherwise it is out of service, and a reset ends after that."""
        self.answered_s = float("-inf")
        """Time of the latest operation that it answered."""
        self._transitions: TransitionLog[TierEvent, TierPhase] = TransitionLog(maxlen=TRANSITIONS_KEPT)
        self._present_s, self._absent_s = (max(s, _SAME_STEP_S) for s in (limits.presence_ttl_s, limits.absence_ttl_s))
        self._gate = policy if isinstance(policy, AdmissionPolicy) else None
        self._deferred_writes: dict[Key, tuple[int, int]] = {}  # leases on chunks that wait for a deletion or answer
        self._takes_writes = limits.writes
        self._late_changes = 0  # writes and deletions that run on behind their deadlines
        self.probes = ProbeQueue(
            limits.concurrency or capabilities.preferred_concurrency,
            min(capabilities.preferred_batch, limits.probe_keys_max),
            limits.probe_keys_max,
            limits.probe_deadline_s * PROBE_SHARE,
        )
        """Chunks whose existence is asked for."""

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
        if usable:
            self.presence_cache.end_doubts()
            self.probes.measure_anew()
        else:
            self.probes.clear()

    def reset(self) -> None:
        """Begin to delete every chunk; :meth:`continue_reset` follows in every step."""
        self._apply(TierEvent.RESET)

    def detach(self) -> None:
        """Take the tier out of service for good. Operations that are under way still end."""
        self._apply(TierEvent.DETACHED)
        self.probes.clear()

    def continue_reset(self, victims_max: int) -> int:
        """Schedule some more deletions after a reset. With the last one confirmed the tier is in service again.

        Returns:
            Number of scheduled deletions, at most ``victims_max``.
        """
        residency = self.residency
        victims = residency.evict(victims_max) if self.phase.usable else ()  # out of service it would refuse every step
        if self.knows_content and not (len(residency.policy) or residency.num_deleting or residency.num_writing):
            self._apply(TierEvent.EMPTIED)
        return len(victims)

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
        waits = self.phase.emptying or bool(self.write_queue or self._deferred_writes)
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
        return not (self.write_queue or self.probes) and self.residency.is_quiet

    def is_idle(self) -> bool:
        """Whether no instruction can be due: nothing waits to be asked, written or deleted here."""
        residency = self.residency
        if residency.num_deleting or residency.has_quotas or self.phase.emptying:
            return False
        return not (self.write_queue or (not self.capabilities.authoritative_index and self.probes))

    # -- existence ---------------------------------------------------------------------------------------------------

    def presence(self, key: Key, now: float, since: float = math.inf) -> LookupResult:
        """Whether ``key`` is here: HIT, MISS, or RETRY if a shared tier has to be probed first.

        since: answers given since then count, also if they have expired.
        """
        return self.presence_of(key, self.residency.rows.flags_of(key), now, since)

    def presence_of(self, key: Key, flags: int, now: float, since: float = math.inf) -> LookupResult:
        """Answer of :meth:`presence` for a key with these flags here."""
        if self.phase is not TierPhase.SERVING or flags & DELETING:
            return LookupResult.MISS
        answer = self.presence_cache.get(key, now, since) if self.presence_cache.any else None
        if answer is not None:
            return LookupResult.HIT if answer else LookupResult.MISS
        if self.capabilities.authoritative_index:
            return LookupResult.HIT if flags & STORED else LookupResult.MISS
        return LookupResult.RETRY

    def had(self, key: Key, now: float) -> bool:
        """Whether the latest answer about ``key`` that is still remembered, expired or not, was "present"."""
        return bool(self.presence_cache.get(key, now, -math.inf))

    def probed(self, key: Key, now: float, *, present: bool) -> None:
        """Keep the answer about one key. No answer in time counts as absent."""
        ttl = self._present_s if present else self._absent_s
        self.presence_cache.put(key, now + ttl, present=present, answered=now)

    def mark_absent(self, key: Key, now: float, *, briefly: bool = False) -> None:
        """Count ``key`` as absent for a while, as a read of it failed; until the tier returns to service, at most."""
        self.presence_cache.doubt(key, now, self.limits.suspect_ttl_s, briefly=briefly)

    # -- stored and deleted ------------------------------------------------------------------------------------------

    def stored(self, content: TierContent, now: float, ranks: Sequence[int] = ()) -> None:
        """Record acknowledged writes; the ranks as :meth:`Residency.add`."""
        if self.capabilities.authoritative_index:
            if self.presence_cache.any:
                for key in content.keys:
                    self.presence_cache.forget(key)
            self.residency.add(content, ranks)
        else:
            for key in content.keys:
                self.probed(key, now, present=True)

    def forget(self, key: Key, now: float) -> bool:
        """Record that ``key`` is not here. Returns whether it was known to be."""
        was_known = False
        if not self.capabilities.authoritative_index:
            was_known = bool(self.presence_cache.get(key, now))
            self.presence_cache.put(key, now + self._absent_s, present=False)
        return self.residency.discard(key) or was_known

    def deleted(self, key: Key, *, now: float) -> bool:
        """End a deletion after which the frame is gone. Returns whether the chunk was known to be here until now."""
        if key in self.residency.uncertain:
            self.residency.end_uncertain(key)
            return False
        known = self.forget(key, now)  # the policy does not know a chunk that is being deleted
        self.residency.end_deletion(key)
        return known

    def not_deleted(self, key: Key, *, tried: bool, now: float) -> None:
        """End a deletion that failed or was refused. The bytes stay on the account, because they are still at rest.

        A deletion is repeated later if the chunk is uncertain, or if it was not ``tried``: the queue of dispatch was
        full. Otherwise a chunk that was not evicted counts as absent for a while, because its frame may be corrupt.
        """
        was_full = not tried and self.phase.usable and not self.capabilities.read_only
        if was_full or key in self.residency.uncertain:
            self.residency.retry_deletion(key, now, soon=was_full)
        elif not self.residency.not_deleted(key, now):
            self.mark_absent(key, now)

    def mark_uncertain(self, key: Key, frame_bytes: int) -> None:
        """Schedule the deletion of a chunk whose write failed; not in a shared tier, where no bytes are accounted."""
        if self.capabilities.authoritative_index:
            self.residency.mark_uncertain(key, frame_bytes)

    def may_delete(self, key: Key, now: float) -> bool:
        """Whether ``key`` is here, and not being read, written or deleted."""
        return self.residency.rows.is_idle(key) and self.presence(key, now) is LookupResult.HIT

    def load_index(self, content: TierContent) -> None:
        """Take over the index of the backend; see :meth:`Residency.load_index`."""
        self.residency.load_index(content)

    # -- writes ------------------------------------------------------------------------------------------------------

    def wants(self, key: Key, now: float) -> bool:
        """Whether a chunk should be written here: it is neither stored nor being written, and the tier takes writes.

        Not yet if it waits for a deletion or an answer.
        """
        flags = self.residency.rows.flags_of(key)
        if not self._takes_writes or flags & (WRITING | DELETING) or key in self._deferred_writes:
            return False
        return self.presence_of(key, flags, now) is not LookupResult.HIT

    def missing(self, chunks: Sequence[tuple[int, Key]], now: float) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that it wants; see :meth:`wants`."""
        if not self._takes_writes:
            return []
        indexed = self.phase is TierPhase.SERVING and self.capabilities.authoritative_index
        if self.presence_cache.any or not indexed:
            return [chunk for chunk in chunks if self.wants(chunk[1], now)]
        return self.residency.rows.without_flags(chunks)

    def refused(self, keys: Sequence[Key], frame_bytes: int) -> Collection[int]:
        """Positions of those ``keys`` that the policy does not admit. frame_bytes: upper bound for each frame."""
        if self._gate is None:
            return ()
        residency = self.residency
        if residency.capacity_bytes is None:
            return self._gate.refuse(keys, len(keys))
        free = (residency.capacity_bytes - residency.used_bytes - residency.reserved_bytes) // frame_bytes
        return self._gate.refuse(keys, max(0, free - len(self.write_queue)))

    def is_full(self, frame_bytes: int, now: float) -> bool:
        """Learn that the backend had no room for a frame of at most that size. Returns whether to evict for it."""
        if not self.capabilities.authoritative_index:
            return False
        helps = self._room.refused(self.residency.used_bytes, frame_bytes, now)
        self.residency.capacity_bytes = self._room.bytes
        return helps

    def retry_room(self, now: float) -> None:
        """Try after a while whether a tier that was full below its capacity has more room."""
        self._room.retry(self.residency.used_bytes, now)
        self.residency.capacity_bytes = self._room.bytes

    def write_later(self, key: Key, lease: tuple[int, int]) -> None:
        """Remember a chunk that is due when its old frame is deleted, or if the tier answers that it is absent.

        lease: its slot and generation.
        """
        self._deferred_writes[key] = lease

    def drop_asked_writes(self) -> int:
        """Forget the chunks that wait for an answer. Returns their number."""
        deferred = self._deferred_writes
        asked = [key for key in deferred if not self.residency.rows.flags_of(key) & DELETING]
        for key in asked:
            del deferred[key]
        return len(asked)

    def take_deferred_writes(self, keys: Sequence[Key]) -> list[tuple[Key, tuple[int, int]]]:
        """Take those of ``keys`` that wait for a deletion or an answer, each with its lease."""
        deferred = self._deferred_writes
        return [(key, deferred.pop(key)) for key in keys if key in deferred] if deferred else []

    # -- check -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check the account of bytes and the policy; see :meth:`Residency.validate`.

        Raises:
            InvariantError: they differ from the chunks.
        """
        self.residency.validate(self.limits.capacity_bytes)
