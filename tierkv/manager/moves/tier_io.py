"""Traffic between the host tier and the tiers below: probes, promotions, cascades and deletions, as instructions."""

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
from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import TierOp, Verb

_T = TypeVar("_T")


class TierIO(InFlightOps):
    """Sans-IO; the manager's hands towards dispatch. group_bytes: bytes of one chunk of each group."""

    def __init__(
        self,
        host: HostTier,
        tiers: TierList,
        group_bytes: Sequence[int],
        events: EventLog,
        counters: CoreCounters,
    ) -> None:
        self._retention = Retention(host.num_slots)
        write_mask = WriteMask(host.num_slots, tiers, self._retention)
        self.admissions = Admissions(host, DirtyPins(host, tiers), write_mask, events, counters)
        cascades = Cascades(host, tiers, self.admissions, ChunkSizes(group_bytes), counters)
        super().__init__(host, tiers, cascades, Demotions(host, tiers, cascades, self.admissions), events)
        self._promotions: dict[int, list[int]] = {}

    # -- existence ---------------------------------------------------------------------------------------------------

    def presence(self, key: Key, allowed: Collection[str] | None = None) -> LookupResult:
        """Whether any lower tier, of those allowed, has ``key``. Stops at the first; asks those that must be asked."""
        answer = LookupResult.MISS
        for tier in self._tiers.in_service:
            if allowed is not None and tier.name not in allowed:
                continue
            here = tier.presence(key, self.now)
            if here is LookupResult.HIT:
                return here
            if here is LookupResult.RETRY:
                tier.ask(key)
                answer = here
        return answer

    def source_of(
        self, key: Key, allowed: Collection[str] | None = None, *, trusting: bool = False
    ) -> LowerTier | None:
        """The fastest tier, of those allowed, that is known to have ``key``.

        trusting: where none is, also one that would have to be asked again: it said yes, some time ago.
        """
        asked = None
        for tier in self._tiers.in_service:
            if allowed is not None and tier.name not in allowed:
                continue
            here = tier.presence(key, self.now)
            if here is LookupResult.HIT:
                return tier
            if trusting and asked is None and here is LookupResult.RETRY:
                asked = tier
        return asked

    # -- speed -------------------------------------------------------------------------------------------------------

    def remeasure(self, tier: int, key: Key) -> None:
        """Read ``key``, which the tier has and the host tier has not, if the tier was not read for a while."""
        if self._speeds[tier].is_stale(self.now) and self._host.room:
            self._host.release(self.promote([key], self._tiers[tier]) or ())

    # -- tiers that come and go --------------------------------------------------------------------------------------

    def attach(self, tier: LowerTier, before: LowerTier | None) -> None:
        """Put a tier in service. What it holds may answer questions that were answered with less."""
        self._tiers.attach(tier, before)
        self._speeds[tier.index] = TierSpeed()
        self.version += 1

    def detach(self, tier: LowerTier) -> None:
        """Take a tier out of service: it has nothing, and gets nothing. What is under way ends in its own time."""
        tier.leaving, tier.usable, tier.emptying = True, False, False
        tier.unknown_to_ask.clear()
        self._cascades.out_of_service(tier)
        self._tiers.detach(tier)
        self._events.cleared(tier.name)
        self.version += 1

    def forget(self, index: int) -> None:
        """Nothing is under way any more in a tier that was detached."""
        self._tiers.forget(index)
        del self._speeds[index]
        self._promotions.pop(index, None)

    # -- terms -------------------------------------------------------------------------------------------------------

    @property
    def retention(self) -> Retention:
        """On what terms chunks are kept."""
        return self._retention

    def sweep_ended(self) -> None:
        """Delete some chunks whose time has ended or whose tenant has too many, where nobody uses them at present."""
        self._demotions.trim(self.now)
        self._cascades.trim()
        self._retention.sweep(self.now, self._remove_ended)

    def _remove_ended(self, key: Key) -> bool:
        """Whether the chunk is gone from everywhere. A deletion that failed is tried again later."""
        slot = self._host.find(key)
        if slot is not None:
            if not self._host.is_idle(slot):
                return False
            self._host.drop([slot])
            self._events.add(CacheEventKind.REMOVED, HOST, key)
        gone = True
        for tier in self._tiers:
            if tier.holds(key):
                gone = False
                if tier.may_delete(key, self.now):
                    tier.schedule_delete(key)
                    tier.deletions.append(key)
        return gone

    # -- host slots --------------------------------------------------------------------------------------------------

    def promote(self, keys: Sequence[Key], tier: LowerTier, hints: RequestHints = NO_HINTS) -> list[int] | None:
        """Start to bring ``keys`` from ``tier`` into the host tier. The caller holds them on top of the I/O's own hold.

        hints: of the request that wants them.

        Returns:
            Their slots; None if none of them can have one now.
        """
        if self.admissions.make_room(len(keys), self.now) is None:
            return None
        slots = self.admissions.admit(keys, hints, tier)
        self._host.hold(slots)
        tier.begin_read(keys)
        self._speeds[tier.index].promised(self._sizes.raw(keys), self.now)
        self._promotions.setdefault(tier.index, []).extend(slots)
        return slots

    def used(self, slots: Sequence[int], hints: RequestHints) -> None:
        """A request wants chunks that are in the host tier, or on their way into it."""
        if self._retention.any:
            self._retention.used(map(self._host.key, slots), hints, self.now)
        self._cascades.used(slots, hints, self.now)

    def validate(self) -> None:
        """See :meth:`InFlightOps.validate` and :meth:`DirtyPins.validate`.

        Raises:
            InvariantError: one of it is not so.
        """
        super().validate()
        self.admissions.dirty_pins.validate()

    # -- instructions ------------------------------------------------------------------------------------------------

    def take_ops(self) -> list[TierOp]:
        """Everything dispatch shall start now: reads, probes, deletions, writes."""
        ops: list[TierOp] = []
        demotions = self._demotions.begin(self.now)
        for tier in self._tiers.with_leaving:
            limits = tier.limits
            for batch in _batches(self._promotions.pop(tier.index, []), tier.capabilities.keys_per_read):
                ops.append(self._issue(tier, Verb.READ, limits.read_deadline_s, slots=batch))
            probe = tier.take_probe()
            if probe:
                self._counters.probes[tier.name] += len(probe)
                ops.append(self._issue(tier, Verb.PROBE, limits.probe_deadline_s, keys=probe))
            writes = demotions.get(tier.index, [])
            writes += self._cascades.writable(tier, self.now, len(writes))
            tier.deletions.extend(tier.overdue(self.now))
            deletions, tier.deletions = tier.deletions, []
            for keys in _batches(deletions, tier.capabilities.preferred_batch):
                ops.append(self._issue(tier, Verb.DELETE, limits.write_deadline_s, keys=tuple(keys)))
            for batch in _batches(writes, tier.capabilities.preferred_batch):
                ops.append(self._issue(tier, Verb.WRITE, limits.write_deadline_s, slots=batch))
        return ops

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def has_pending_changes(self) -> bool:
        """Whether chunks wait for, or are in, a write to a tier in service, or are to be deleted after a reset.

        Not of a tier that leaves, which may hang for ever; and one that is out of service deletes nothing.
        """
        return self._demotions.is_flushing or any(
            tier.num_writing or tier.cascades or (tier.usable and (tier.emptying or tier.after_deletion))
            for tier in self._tiers
        )

    def flush(self) -> None:
        """Let what tiers would get when it is evicted go down now; see :attr:`has_pending_changes`."""
        self._demotions.flush()


def _batches(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
