"""Transfers between the host tier and the tiers below, as instructions: probes, reads, writes and deletions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial

from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.host.waiters import READ_AHEAD
from tierkv.manager.lower.chunk_sizes import ChunkSizes
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.lower.tier_phase import TierPhase
from tierkv.manager.moves.admission import Admissions
from tierkv.manager.moves.dirty_pins import DirtyPins
from tierkv.manager.moves.forgetting import Forgetting
from tierkv.manager.moves.in_flight import InFlightOps
from tierkv.manager.moves.lower_room import LowerRoom
from tierkv.manager.moves.retention import Retention
from tierkv.manager.moves.tier_reads import TierReads, turns
from tierkv.manager.moves.write_back import Demotions
from tierkv.manager.moves.write_mask import WriteMask
from tierkv.manager.moves.write_through import Cascades
from tierkv.manager.step_budget import KEYS_PER_LOOK
from tierkv.manager.step_state import StepState
from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import HOST, CacheEventKind
from tierkv.types.geometry import batches, cdiv
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import TierOp, Verb

OPS_PER_STEP_MIN = 4
"""Instructions that a step's budget of keys suffices for, however many keys a backend takes at once."""

SLOTS_PER_WAITING = 32
"""Slots of the host tier for each chunk that may wait for a tier meanwhile: a small host tier soon needs the slots."""

WAITING_WRITES_MAX = 64
"""Chunks that may wait for a tier while a few steps pass; where more do, the tier gets some in each step."""

UNMEASURED_CHUNKS_MAX = 64
"""Chunks on their way from a tier whose speed is unknown."""

TIERS_PER_FIND = 16
"""Rows of a chunk in other tiers that are passed over at the cost of one key operation."""


class TierIO:
    """Questions and instructions to lower tiers. Sans-IO.

    Holds the parts that decide: admissions, cascades, demotions and retention, and the instructions in flight.

    Args:
        group_bytes: bytes of one chunk of each group.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        step: StepState,
        host: HostTier,
        tiers: TierList,
        group_bytes: Sequence[int],
        events: EventLog,
        counters: CoreCounters,
    ) -> None:
        self._step = step
        self._share = step.budget.share()
        self._host = host
        self._tiers = tiers
        self._sizes = ChunkSizes(group_bytes)
        self._events = events
        self._counters = counters
        self.reads = {tier.index: TierReads(tier.limits.reads_max) for tier in tiers}
        """Reads from each tier, by its number."""
        self._has_reads = False  # whether one of them may wait to be issued
        self.retention = Retention(host.num_slots)
        write_mask = WriteMask(host.num_slots, tiers, self.retention)
        self.admissions = Admissions(host, DirtyPins(host, tiers, step.budget.share()), write_mask, events, counters)
        self._room = LowerRoom(tiers, counters, step)
        self.cascades = Cascades(host, tiers, self.admissions, self._room, self._sizes, events, counters, step.budget)
        self._demotions = Demotions(host, tiers, self.cascades, self.admissions, self._room, step.budget)
        self.in_flight = InFlightOps(step, host, tiers, self.reads, self.cascades, self._demotions, self._room, events)
        self._swept = step.budget.share()
        self.forgetting = Forgetting(tiers, self.retention, step, self._swept)
        self._deleted = step.budget.share()
        # A completion is applied whole, so an instruction has a part of a step's keys.
        self._frame_bytes, self._chunk_bytes = self._sizes.frame_bound_max, max(group_bytes)
        self._op_keys_max = max(1, step.budget.keys_max // OPS_PER_STEP_MIN)

    # -- existence -----------------------------------------------------------------------------------------------------

    def presence(self, key: Key, allowed: Collection[str] | None = None, since: float = math.inf) -> LookupResult:
        """Whether an allowed lower tier has ``key``; see :meth:`TierList.presence`."""
        return self._tiers.presence(key, self._step.now, allowed, since)

    def source_of(
        self, key: Key, allowed: Collection[str] | None = None, *, trusting: bool = False
    ) -> LowerTier | None:
        """Fastest allowed tier that is known to have ``key``; see :meth:`sources_of`."""
        return self.sources_of((key,), allowed, trusting=trusting)[0]

    def sources_of(
        self,
        keys: Sequence[Key],
        allowed: Collection[str] | None = None,
        *,
        since: float = math.inf,
        trusting: bool = False,
    ) -> list[LowerTier | None]:
        """Fastest allowed tier that is known to have each of ``keys``; see :meth:`TierList.sources_of`."""
        return self._tiers.sources_of(keys, self._step.now, allowed, since=since, trusting=trusting)

    def prefix_below(self, keys: Sequence[Key], allowed: Collection[str] | None, *, since: float) -> int:
        """Number of leading ``keys`` that have a source; see :meth:`sources_of`.

        The first one is looked up alone, because a prefix mostly ends where the host tier has no more of it.
        """
        first = self._tiers.prefix(keys[:1], self._step.now, allowed, since)
        return first and first + self._tiers.prefix(keys[1:], self._step.now, allowed, since)

    # -- speed ---------------------------------------------------------------------------------------------------------

    def remeasure(self, tier: int, key: Key) -> None:
        """Read ``key``, which must be in the tier and not in the host tier, if the tier was not read for a while."""
        speed = self.reads[tier].speed
        if speed.is_stale(self._step.now) and self._host.room and self._read_unasked([key], self._tiers[tier]):
            speed.sampled(self._step.now)

    def promises_max(self, tier: LowerTier, wanted: int) -> int:
        """Number of ``wanted`` chunks of a request that may be promised now, beside those on their way.

        All of them, but few while the speed of the tier is unknown: otherwise all requests of a burst would wait for a
        tier that may be slower than computing. A request that is alone gets all that it wants.
        """
        speed = self.reads[tier.index].speed
        if speed.is_known or speed.has_missed or not speed.promised_bytes:
            return wanted
        return max(0, min(wanted, UNMEASURED_CHUNKS_MAX - speed.promised_bytes // self._chunk_bytes))

    # -- attached and detached tiers -----------------------------------------------------------------------------------

    def attach(self, tier: LowerTier, before: LowerTier | None) -> None:
        """Put a tier in service, ahead of another one, or last. Its chunks may change the answers to open lookups."""
        self._tiers.attach(tier, before)
        self.reads[tier.index] = TierReads(tier.limits.reads_max)
        self._step.version += 1

    def detach(self, tier: LowerTier) -> None:
        """Take a tier out of service. It counts as empty; operations under way end in their own time."""
        tier.detach()
        self.cascades.out_of_service(tier)
        self._demotions.out_of_service(tier)
        self._tiers.detach(tier)
        self._events.cleared(tier.name)
        self._step.version += 1

    def forget(self, index: int) -> None:
        """Discard the state of a detached tier whose operations have all ended."""
        self._tiers.forget(index)
        del self.reads[index]

    # -- retention -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Forget some answers that have expired, and some chunks of detached tiers."""
        if self._tiers.has_forgotten:
            self._tiers.sweep(self._share.take(self._share.left))
        for tier in self._tiers.in_service:
            if tier.presence_cache.any:
                tier.presence_cache.expire(self._step.now)

    def _delete_some(self) -> None:
        """Delete some chunks that have expired, or whose tenant is over its quota, where nothing uses them."""
        self._demotions.evict_over_quota(self._step.now)
        self._room.trim()
        if self.retention.has_lifetimes:
            # Where many tiers have a chunk, its row in one is found past those in all others.
            per_key = 1 + len(self._tiers) * (1 + len(self._tiers) // TIERS_PER_FIND)
            removed: list[int] = []
            remove = partial(self._remove_expired, removed)
            self.forgetting.begin_some(remove, per_key)
            self._drop_removed(removed)
            per_key = cdiv(per_key, KEYS_PER_LOOK)  # most have not expired, or are not gone yet
            keys_max = max(1, self._swept.own_left // per_key)
            self._swept.take(per_key * self.retention.sweep(self._step.now, keys_max, remove))
            self._drop_removed(removed)

    def _remove_expired(self, removed: list[int], key: Key) -> bool:
        """Remove an expired chunk from every tier where it is idle. Returns whether it is gone from all.

        removed: gets its host slot, which :meth:`_drop_removed` frees together with others.
        """
        slot = self._host.slots.find(key)
        if slot is not None:
            if not self._host.slots.is_idle(slot):
                return False
            removed.append(slot)
        gone = True
        for tier in self._tiers:
            if tier.residency.rows.flags_of(key):
                gone = False
                if tier.may_delete(key, self._step.now):
                    tier.residency.schedule_delete(key)
        return gone

    def _drop_removed(self, removed: list[int]) -> None:
        """Drop chunks of the host tier, and report it. Empties the list."""
        if removed:
            self._events.extend(CacheEventKind.REMOVED, HOST, self._host.drop(removed))
            removed.clear()

    # -- host slots ----------------------------------------------------------------------------------------------------

    def promote(
        self, keys: Sequence[Key], tier: LowerTier, hints: RequestHints = NO_HINTS, lacking: int = 1, ahead: int = 0
    ) -> list[int] | None:
        """Start to read ``keys`` from ``tier`` into the host tier, for a request with these hints.

        lacking: chunks that the request lacks, these included; ahead: of those, the ones before these on their way.

        Returns:
            Their slots, held by the caller in addition to the hold of the I/O; None if there is no room for all. The
            caller gives each a waiter, without which it is not read.
        """
        if self.admissions.make_room(len(keys), self._step.now) is None:
            return None
        ranks = tier.residency.begin_read(keys)
        if any(ranks):  # a request uses the prefix again, so other tiers may be given what they once refused of it
            for other in self._tiers:
                other.residency.listed.order.forget_cuts(ranks)
        slots = self.admissions.admit(keys, hints, tier, ranks)
        self._host.pin(slots)
        self._has_reads = True
        for part, size in turns(len(keys), ahead, lacking):
            num_bytes = self._sizes.raw(keys[part.start : part.stop])
            self.reads[tier.index].put(slots[part.start : part.stop], size, num_bytes, self._step.now)
        return slots

    def read_ahead(self, keys: Sequence[Key], count: int, hints: RequestHints, since: float) -> dict[Key, str]:
        """Start to read up to ``count`` of ``keys`` that are below only, into slots that others may evict.

        Those of ``keys`` that are in the host tier are not evicted for it, and count as used.

        Returns:
            The chunks that are read, each with its tier.
        """
        slots = self._host.slots.find_all(keys)
        present = [slot for slot in slots if slot is not None]
        missing = [key for key, slot in zip(keys, slots, strict=True) if slot is None]
        self._host.pin(present)
        wanted = list(dict.fromkeys(missing))[: min(count, self._host.room)]
        by_tier: dict[int, list[Key]] = {}
        for key, tier in zip(wanted, self.sources_of(wanted, hints.load_tiers, since=since), strict=True):
            if tier is not None:
                by_tier.setdefault(tier.index, []).append(key)
        read: dict[Key, str] = {}
        for index, some in by_tier.items():
            if self._read_unasked(some, self._tiers[index], hints, len(wanted)):
                read.update(dict.fromkeys(some, self._tiers[index].name))
        self._host.unpin(reversed(present))
        return read

    def _read_unasked(
        self, keys: Sequence[Key], tier: LowerTier, hints: RequestHints = NO_HINTS, lacking: int = 1
    ) -> bool:
        """Start to read chunks that nothing holds: they stay wanted. Returns whether there is room for all."""
        if (granted := self.promote(keys, tier, hints, lacking)) is not None:
            self._host.waiters.add(granted, READ_AHEAD)
            self._host.unpin(granted)
        return granted is not None

    def used(self, slots: Sequence[int], hints: RequestHints) -> None:
        """Apply a use by a request to chunks that are in the host tier, or being read into it."""
        if self.retention.any:
            self.retention.used(map(self._host.slots.key, slots), hints, self._step.now)
        self.cascades.used(slots, hints, self._step.now)

    def validate(self) -> None:
        """Check the instructions in flight, the accounts of the tiers and the dirty pins.

        Raises:
            InvariantError: one of them is wrong.
        """
        self.in_flight.validate()
        self.admissions.dirty_pins.validate()

    # -- instructions --------------------------------------------------------------------------------------------------

    def take_ops(self) -> list[TierOp]:
        """Take the instructions that dispatch must start now: reads and probes, then deletions and writes.

        Work that no request waits for gets what is left of the budget here, at the end of a step.
        """
        self._demotions.end_step()
        if self._is_idle():
            return []
        self.cascades.offer_ready(self._step.now)  # first, because shared tiers are asked about chunks
        self._delete_some()
        tiers = self._tiers.with_detached
        ops = [op for tier in tiers if self._has_reads or tier.probes for op in self._questions(tier)]
        self._has_reads = self._has_reads and any(self.reads.values())
        demotions = self._demotions.begin(self._step.now)
        first = self._step.budget.step % max(1, len(tiers))  # another tier in each step, so none uses up the budget
        for tier in tiers[first:] + tiers[:first]:
            ops += self._changes(tier, demotions.get(tier.index, []))
        self.admissions.dirty_pins.pin_ahead()
        return ops

    def _is_idle(self) -> bool:
        """Whether nothing is due: the answer in most steps, so it costs a few calls."""
        if self._has_reads or self._host.has_quotas or self.cascades.ready:
            return False
        if self.retention.has_ever_expiring and self.retention.has_lifetimes:
            return False
        for tier in self._tiers.with_detached:
            if not tier.is_idle():
                return False
        return not self._demotions.is_due()

    def can_wait(self) -> bool:
        """Whether what is due may be done some steps later: few writes, and deletions that make room for them.

        Demotions and quotas evict ahead of need in every step, and so does an evicted or reset tier. A tier that is out
        of service is tried again as soon as it may be.
        """
        if self._has_reads or self._host.has_quotas or not self._host.dropping.is_idle or self.cascades.ready:
            return False
        if self._tiers.writes_back or self._tiers.has_forgotten:
            return False
        for tier in self._tiers.with_detached:
            if tier.phase is not TierPhase.SERVING or tier.probes or tier.residency.has_quotas:
                return False
            if len(tier.write_queue) > min(WAITING_WRITES_MAX, self._host.num_slots // SLOTS_PER_WAITING):
                return False
        return True

    def _questions(self, tier: LowerTier) -> list[TierOp]:
        """Reads and probes that are due in a tier."""
        reads = self.reads[tier.index]
        keys_max = min(tier.capabilities.keys_per_read(self._frame_bytes, len(reads)), self._op_keys_max)
        refused_max = None if tier.phase.usable else self._step.budget.keys_max
        ops = [
            self.in_flight.issue(tier, Verb.READ, slots=wanted, turn_chunks=chunks)
            for slots, chunks in reads.take(keys_max, refused_max=refused_max)
            if (wanted := self._still_wanted(tier, slots, chunks))
        ]
        for probe in tier.probes.take(self._share.left) if tier.probes else ():
            self._counters.probes[tier.name] += self._share.take(len(probe))
            ops.append(self.in_flight.issue(tier, Verb.PROBE, keys=probe))
        return ops

    def _still_wanted(self, tier: LowerTier, slots: Sequence[int], turn_chunks: int) -> Sequence[int]:
        """Those of the slots whose chunks were not dropped while the read waited. Ends it for the others."""
        wanted = self._host.slots.in_state(slots, ChunkState.PROMOTING)
        if len(wanted) == len(slots):  # usual
            return slots
        dropped = [slot for slot in slots if slot not in wanted]
        keys = self._host.slots.keys_of(dropped)
        tier.residency.end_read(keys)
        self.reads[tier.index].ended(self._sizes.raw(keys), turn_chunks, whole=not wanted, delivered=False)
        self._host.failed(dropped)
        return [slot for slot in slots if slot in wanted]

    def _changes(self, tier: LowerTier, writes: list[int]) -> list[TierOp]:
        """Deletions and writes that are due in a tier. writes: slots of chunks that are demoted to it."""
        issue = self.in_flight.issue
        writes += self.cascades.take_writable(tier, self._step.now)
        ops: list[TierOp] = []
        if tier.residency.num_deleting:
            # Not more in flight than a step handles: they would fill the queue of dispatch, which refuses reads then.
            room = max(0, self._step.budget.keys_max - tier.residency.num_deletions_under_way)
            deletions = tier.residency.take_deletions(self._step.now, min(self._deleted.left, room))
            self._deleted.take(len(deletions))
            keys_max = min(tier.capabilities.preferred_batch, self._op_keys_max)
            ops += [issue(tier, Verb.DELETE, keys=tuple(keys)) for keys in batches(deletions, keys_max)]
        if writes:
            keys_max = min(tier.capabilities.keys_per_write(self._frame_bytes), self._op_keys_max)
            ops += [issue(tier, Verb.WRITE, slots=batch) for batch in batches(writes, keys_max)]
        return ops

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def has_pending_changes(self) -> bool:
        """Whether a flush is under way, or a tier in service has pending changes, or chunks are to be offered to one.

        Detached tiers do not count: they may hang without a bound.
        """
        waits = self._demotions.is_flushing or bool(self.cascades.ready)
        return waits or any(tier.has_pending_changes for tier in self._tiers)

    def flush(self) -> None:
        """Begin a flush; :attr:`has_pending_changes` reports when all is written."""
        self._demotions.flush()
