"""Transfers between the host tier and the tiers below, as instructions: probes, reads, writes and deletions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from tierkv.manager.contract import HOST
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.chunk_sizes import ChunkSizes
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.read_speed import TierSpeed
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.admission import Admissions
from tierkv.manager.moves.dirty_pins import DirtyPins
from tierkv.manager.moves.in_flight import InFlightOps
from tierkv.manager.moves.retention import Retention
from tierkv.manager.moves.write_back import Demotions
from tierkv.manager.moves.write_mask import WriteMask
from tierkv.manager.moves.write_through import Cascades
from tierkv.manager.step_state import StepState
from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import TierOp, Verb

_T = TypeVar("_T")


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
        self._host = host
        self._tiers = tiers
        self._sizes = ChunkSizes(group_bytes)
        self._events = events
        self._counters = counters
        self.speeds = {tier.index: TierSpeed() for tier in tiers}
        """Read speed of each tier, by its number."""
        self.retention = Retention(host.num_slots)
        write_mask = WriteMask(host.num_slots, tiers, self.retention)
        self.admissions = Admissions(host, DirtyPins(host, tiers), write_mask, events, counters)
        self.cascades = Cascades(host, tiers, self.admissions, self._sizes, events, counters)
        self._demotions = Demotions(host, tiers, self.cascades, self.admissions)
        self.in_flight = InFlightOps(step, host, tiers, self.speeds, self.cascades, self._demotions, events)
        self._promotions: dict[int, list[int]] = {}

    # -- existence -----------------------------------------------------------------------------------------------------

    def presence(self, key: Key, allowed: Collection[str] | None = None) -> LookupResult:
        """Whether an allowed lower tier has ``key``. Stops at the first that has it; queues probes in shared tiers."""
        answer = LookupResult.MISS
        for tier in self._tiers.in_service:
            if allowed is not None and tier.name not in allowed:
                continue
            here = tier.presence(key, self._step.now)
            if here is LookupResult.HIT:
                return here
            if here is LookupResult.RETRY:
                tier.probe_later(key)
                answer = here
        return answer

    def source_of(
        self, key: Key, allowed: Collection[str] | None = None, *, trusting: bool = False
    ) -> LowerTier | None:
        """Fastest allowed tier that is known to have ``key``; None if there is none.

        trusting: fall back to a shared tier whose answer has expired.
        """
        asked = None
        for tier in self._tiers.in_service:
            if allowed is not None and tier.name not in allowed:
                continue
            here = tier.presence(key, self._step.now)
            if here is LookupResult.HIT:
                return tier
            if trusting and asked is None and here is LookupResult.RETRY:
                asked = tier
        return asked

    # -- speed ---------------------------------------------------------------------------------------------------------

    def remeasure(self, tier: int, key: Key) -> None:
        """Read ``key``, which must be in the tier and not in the host tier, if the tier was not read for a while."""
        if self.speeds[tier].is_stale(self._step.now) and self._host.room:
            self._host.unpin(self.promote([key], self._tiers[tier]) or ())

    # -- attached and detached tiers -----------------------------------------------------------------------------------

    def attach(self, tier: LowerTier, before: LowerTier | None) -> None:
        """Put a tier in service, ahead of another one, or last. Its chunks may change the answers to open lookups."""
        self._tiers.attach(tier, before)
        self.speeds[tier.index] = TierSpeed()
        self._step.version += 1

    def detach(self, tier: LowerTier) -> None:
        """Take a tier out of service. It counts as empty; operations under way end in their own time."""
        tier.detach()
        self.cascades.out_of_service(tier)
        self._tiers.detach(tier)
        self._events.cleared(tier.name)
        self._step.version += 1

    def forget(self, index: int) -> None:
        """Discard the state of a detached tier whose operations have all ended."""
        self._tiers.forget(index)
        del self.speeds[index]
        self._promotions.pop(index, None)

    # -- retention -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Delete some chunks that have expired, or whose tenant is over its quota, where nothing uses them."""
        self._demotions.evict_over_quota(self._step.now)
        self.cascades.trim()
        self.retention.sweep(self._step.now, self._remove_expired)

    def _remove_expired(self, key: Key) -> bool:
        """Remove an expired chunk from every tier where it is idle. Returns whether it is gone from all."""
        slot = self._host.slots.find(key)
        if slot is not None:
            if not self._host.slots.is_idle(slot):
                return False
            self._host.drop([slot])
            self._events.add(CacheEventKind.REMOVED, HOST, key)
        gone = True
        for tier in self._tiers:
            if tier.residency.has_bytes_of(key):
                gone = False
                if tier.may_delete(key, self._step.now):
                    tier.residency.schedule_delete(key)
        return gone

    # -- host slots ----------------------------------------------------------------------------------------------------

    def promote(self, keys: Sequence[Key], tier: LowerTier, hints: RequestHints = NO_HINTS) -> list[int] | None:
        """Start to read ``keys`` from ``tier`` into the host tier, for a request with these hints.

        Returns:
            Their slots, held by the caller in addition to the hold of the I/O; None if there is no room for all.
        """
        if self.admissions.make_room(len(keys), self._step.now) is None:
            return None
        slots = self.admissions.admit(keys, hints, tier)
        self._host.pin(slots)
        tier.residency.begin_read(keys)
        self.speeds[tier.index].promised(self._sizes.raw(keys), self._step.now)
        self._promotions.setdefault(tier.index, []).extend(slots)
        return slots

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
        """Take the instructions that dispatch must start now; per tier: reads, probes, deletions, writes."""
        ops: list[TierOp] = []
        issue = self.in_flight.issue
        demotions = self._demotions.begin(self._step.now)
        for tier in self._tiers.with_detached:
            limits = tier.limits
            for batch in _batches(self._promotions.pop(tier.index, []), tier.capabilities.keys_per_read):
                ops.append(issue(tier, Verb.READ, limits.read_deadline_s, slots=batch))
            probe = tier.take_probe()
            if probe:
                self._counters.probes[tier.name] += len(probe)
                ops.append(issue(tier, Verb.PROBE, limits.probe_deadline_s, keys=probe))
            writes = demotions.get(tier.index, [])
            writes += self.cascades.take_writable(tier, self._step.now, len(writes))
            deletions = tier.residency.take_deletions(self._step.now)
            for keys in _batches(deletions, tier.capabilities.preferred_batch):
                ops.append(issue(tier, Verb.DELETE, limits.write_deadline_s, keys=tuple(keys)))
            for batch in _batches(writes, tier.capabilities.preferred_batch):
                ops.append(issue(tier, Verb.WRITE, limits.write_deadline_s, slots=batch))
        return ops

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def has_pending_changes(self) -> bool:
        """Whether a flush is under way, or a tier in service has pending changes.

        Detached tiers do not count: they may hang without a bound.
        """
        return self._demotions.is_flushing or any(tier.has_pending_changes for tier in self._tiers)

    def flush(self) -> None:
        """Queue every chunk for the write-back tiers now; :attr:`has_pending_changes` reports when all is written."""
        self._demotions.flush()


def _batches(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
