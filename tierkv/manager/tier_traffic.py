"""Traffic between the host tier and the tiers below: probes, promotions, cascades and deletions, as instructions.

Every instruction handed out is remembered under its id until dispatch says that its I/O ended; until then the slots it
touches are held. Outcomes are per key: one bad frame fails one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tierkv.errors import require
from tierkv.manager.admissions import Admissions
from tierkv.manager.chunk import Filled
from tierkv.manager.chunk_sizes import ChunkSizes
from tierkv.manager.chunk_state import ChunkEvent, ChunkState
from tierkv.manager.contract import HOST
from tierkv.manager.event_log import EventLog
from tierkv.manager.host_index import HostIndex
from tierkv.manager.lower_tier import LowerTier
from tierkv.manager.speeds import TierSpeed
from tierkv.manager.terms import Terms
from tierkv.manager.tier_list import TierList
from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth, TierOp, Verb

_T = TypeVar("_T")

_PERHAPS_WRITTEN = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT)
"""Ends of a write after which the frame may lie in the tier all the same."""

CASCADES_PER_STEP_MAX = 512
"""Waiting chunks looked at per tier and step, whether written or dropped: a step stays short after a long outage."""


@dataclass(slots=True)
class _OpInFlight:
    op: TierOp
    slots: Sequence[int] = ()
    announced_late: bool = False
    queue_bytes: int = 0


class TierTraffic:
    """Sans-IO; the manager's hands towards dispatch. group_bytes: bytes of one chunk of each group."""

    def __init__(
        self,
        host: HostIndex,
        tiers: TierList,
        group_bytes: Sequence[int],
        events: EventLog,
        counters: CoreCounters,
    ) -> None:
        self.now = 0.0
        self.version = 0
        self._host = host
        self._tiers = tiers
        self._events = events
        self._counters = counters
        self._terms = Terms(host.num_slots)
        self.admissions = Admissions(host, self._terms, events, counters)
        self._in_flight: dict[int, _OpInFlight] = {}
        self._promotions: dict[int, list[int]] = {}
        self._deletions: dict[int, list[Key]] = {}
        self._last_op_id = 0
        self._sizes = ChunkSizes(group_bytes)
        self._speeds = {tier.index: TierSpeed() for tier in tiers}
        self._ended: dict[Verb, Callable[[LowerTier, _OpInFlight, Sequence[Outcome]], None]] = {
            Verb.PROBE: self._probe_ended,
            Verb.READ: self._read_ended,
            Verb.WRITE: self._write_ended,
            Verb.DELETE: self._delete_ended,
        }

    # -- existence ---------------------------------------------------------------------------------------------------

    def presence(self, key: Key, allowed: Collection[str] | None = None) -> LookupResult:
        """Whether any lower tier, of those allowed, has ``key``. Stops at the first; asks those that must be asked."""
        answer = LookupResult.MISS
        for tier in self._tiers:
            if allowed is not None and tier.name not in allowed:
                continue
            here = tier.presence(key, self.now)
            if here is LookupResult.HIT:
                return here
            if here is LookupResult.RETRY:
                tier.ask(key)
                answer = here
        return answer

    def source_of(self, key: Key, allowed: Collection[str] | None = None) -> LowerTier | None:
        """The fastest tier, of those allowed, that is known to have ``key``."""
        for tier in self._tiers:
            if (allowed is None or tier.name in allowed) and tier.presence(key, self.now) is LookupResult.HIT:
                return tier
        return None

    # -- speed -------------------------------------------------------------------------------------------------------

    @property
    def speeds(self) -> Mapping[int, TierSpeed]:
        """How fast the tiers are, by number."""
        return self._speeds

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
        tier.leaving, tier.usable = True, False
        self._tiers.detach(tier)
        self._events.cleared(tier.name)
        self.version += 1

    def forget(self, index: int) -> None:
        """Nothing is under way any more in a tier that was detached."""
        self._tiers.forget(index)
        for of_tier in (self._speeds, self._promotions, self._deletions):
            of_tier.pop(index, None)

    # -- terms -------------------------------------------------------------------------------------------------------

    @property
    def terms(self) -> Terms:
        """On what terms chunks are kept."""
        return self._terms

    def sweep_ended(self) -> None:
        """Delete some chunks whose time has ended, where nobody uses them at present."""
        self._terms.sweep(self.now, self._remove_ended)

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
                    tier.condemn(key)
                    self._deletions.setdefault(tier.index, []).append(key)
        return gone

    # -- host slots --------------------------------------------------------------------------------------------------

    def promote(self, keys: Sequence[Key], tier: LowerTier, route: frozenset[str] | None = None) -> list[int] | None:
        """Start to bring ``keys`` from ``tier`` into the host tier. The caller holds them on top of the I/O's own hold.

        Returns:
            Their slots; None if none of them can have one now.
        """
        if self.admissions.make_room(len(keys)) is None:
            return None
        slots = self.admissions.admit(keys, ChunkState.PROMOTING, tier.name, route)
        self._host.hold(slots)
        tier.begin_read(keys)
        self._speeds[tier.index].promised(self._sizes.raw(keys), self.now)
        self._promotions.setdefault(tier.index, []).extend(slots)
        return slots

    def became_ready(self, filled: Filled) -> None:
        """Chunks are readable in the host tier: let them cascade to every tier that wants and may have them. Say so."""
        self._events.extend(CacheEventKind.STORED, HOST, filled.keys)
        routes = self.admissions.take_routes(filled.slots)
        for tier in self._tiers:
            if tier.limits.writes and filled.keys:
                self._cascade(tier, filled, routes)

    def _may_have(self, tier: LowerTier, key: Key, route: frozenset[str] | None) -> bool:
        if route is not None and tier.name not in route:
            return False
        # Of a chunk with an end no other process would know when.
        return not (tier.capabilities.shared and self._terms.ends(key))

    def _cascade(self, tier: LowerTier, filled: Filled, routes: Mapping[int, frozenset[str] | None]) -> None:
        wanted = [(slot, key) for slot, key in zip(*filled, strict=True) if tier.wants(key, self.now)]
        if routes or self._terms.any:
            wanted = [(slot, key) for slot, key in wanted if self._may_have(tier, key, routes.get(slot))]
        if not wanted:
            return
        keys = [key for _, key in wanted]
        if refused := tier.refused(keys, self._sizes.frame_bound(keys[0])):
            wanted = [pair for i, pair in enumerate(wanted) if i not in refused]
            self._counters.admissions_refused[tier.name] += len(keys) - len(wanted)
        generation = self._host.generation
        tier.cascades.extend((slot, generation(slot)) for slot, _ in wanted)
        # Nobody holds what only waits, so the queue itself needs a bound while a tier does not keep up.
        over = len(tier.cascades) - self._host.num_slots if tier.usable else len(wanted)
        if over > 0:
            tier.cascades.drop_front(over)
            self._counters.cascades_dropped[tier.name] += over

    # -- instructions ------------------------------------------------------------------------------------------------

    def take_ops(self) -> list[TierOp]:
        """Everything dispatch shall start now: reads, probes, deletions, writes."""
        ops: list[TierOp] = []
        for tier in self._tiers.with_leaving:
            limits = tier.limits
            for batch in _batches(self._promotions.pop(tier.index, []), tier.capabilities.preferred_batch):
                ops.append(self._issue(tier, Verb.READ, limits.read_deadline_s, slots=batch))
            probe = tier.take_probe()
            if probe:
                self._counters.probes[tier.name] += len(probe)
                ops.append(self._issue(tier, Verb.PROBE, limits.probe_deadline_s, keys=probe))
            writes = self._writable(tier)
            self._deletions.setdefault(tier.index, []).extend(tier.overdue(self.now))
            for keys in _batches(self._deletions.pop(tier.index), tier.capabilities.preferred_batch):
                ops.append(self._issue(tier, Verb.DELETE, limits.write_deadline_s, keys=tuple(keys)))
            for batch in _batches(writes, tier.capabilities.preferred_batch):
                ops.append(self._issue(tier, Verb.WRITE, limits.write_deadline_s, slots=batch))
        return ops

    def _writable(self, tier: LowerTier) -> list[int]:
        """Take from the front of the cascade queue what the tier can take now, and start to make room for the rest.

        Waiting chunks are not held: a store that needs their slots wins, and they are dropped and counted. Only what is
        being written is held, under the tier's bound.
        """
        batch: list[int] = []
        host = self._host
        for _ in range(min(len(tier.cascades), CASCADES_PER_STEP_MAX)):
            if tier.num_writing >= tier.queue_chunks_max:
                break
            slot, generation = tier.cascades.front()
            key = host.key(slot)
            if not tier.usable or host.generation(slot) != generation or host.state(slot) is not ChunkState.READY:
                self._counters.cascades_dropped[tier.name] += 1
            elif tier.wants(key, self.now):
                size = self._sizes.frame_bound(key)
                if not self._has_room(tier, size):
                    if tier.may_get_room(size):
                        break
                    self._counters.cascades_dropped[tier.name] += 1
                else:
                    tier.begin_write(key, size)
                    batch.append(slot)
            tier.cascades.drop_front()
        host.hold(batch)
        return batch

    def _has_room(self, tier: LowerTier, size: int) -> bool:
        self._evict(tier, tier.victims(size, len(tier.cascades)))
        return tier.has_room(size)

    def _evict(self, tier: LowerTier, victims: Sequence[Key]) -> None:
        if victims:
            self._counters.evictions[tier.name] += len(victims)
            self._deletions.setdefault(tier.index, []).extend(victims)

    def _issue(
        self,
        tier: LowerTier,
        verb: Verb,
        deadline_s: float,
        keys: tuple[Key, ...] = (),
        slots: Sequence[int] = (),
    ) -> TierOp:
        self._last_op_id += 1
        op = TierOp(
            self._last_op_id,
            tier.index,
            verb,
            keys or tuple(map(self._host.key, slots)),
            self._host.refs(slots),
            self.now + deadline_s,
        )
        pending = self._in_flight[op.op_id] = _OpInFlight(op, slots)
        if verb is Verb.READ:
            pending.queue_bytes = self._speeds[tier.index].issued(self._sizes.raw(op.keys))
        return op

    # -- news --------------------------------------------------------------------------------------------------------

    def on_news(self, news: Completion | TierHealth) -> None:
        """Take in a completion or a change of a tier's health."""
        if isinstance(news, TierHealth):
            self.version += 1
            tier = self._tiers[news.tier]
            tier.usable = news.usable and not tier.leaving
            return
        pending = self._in_flight.get(news.op_id)
        if pending is None:
            return
        self.version += pending.op.verb in (Verb.PROBE, Verb.READ)  # a read may find that the chunk is gone
        tier = self._tiers[pending.op.tier]
        if pending.op.verb is Verb.READ:
            self._measure(pending, news)
        if not news.ended:
            self._announce_late(tier, pending)
            return
        del self._in_flight[news.op_id]
        self._ended[pending.op.verb](tier, pending, news.outcomes)

    def _measure(self, pending: _OpInFlight, news: Completion) -> None:
        """A read has shown how fast its tier is. One that failed at once shows nothing; one that was late, a lot."""
        speed = self._speeds[pending.op.tier]
        served = not news.ended or any(outcome.kind is OutcomeKind.OK for outcome in news.outcomes)
        if served and not pending.announced_late:
            speed.measured(pending.queue_bytes, news.elapsed_s)
        if news.ended:
            speed.ended(self._sizes.raw(pending.op.keys))

    def _announce_late(self, tier: LowerTier, pending: _OpInFlight) -> None:
        """The deadline passed while the I/O runs on: nobody waits for it any more; its slots stay held."""
        if pending.announced_late:
            return
        pending.announced_late = True
        if pending.op.verb is Verb.PROBE:
            for key in pending.op.keys:
                tier.answered(key, self.now, present=False)
        elif pending.op.verb is Verb.READ:
            for key in pending.op.keys:
                tier.suspect(key, self.now)
            self._counters.reads_failed[tier.name] += len(pending.op.keys)
            self._host.drop(pending.slots)

    def _probe_ended(self, tier: LowerTier, pending: _OpInFlight, outcomes: Sequence[Outcome]) -> None:
        if pending.announced_late:
            return
        for key, outcome in zip(pending.op.keys, outcomes, strict=True):
            tier.answered(key, self.now, present=outcome.kind is OutcomeKind.OK)

    def _read_ended(self, tier: LowerTier, pending: _OpInFlight, outcomes: Sequence[Outcome]) -> None:
        tier.end_read(pending.op.keys)
        arrived: list[int] = []
        failed: list[int] = []
        for key, slot, outcome in zip(pending.op.keys, pending.slots, outcomes, strict=True):
            if outcome.kind is OutcomeKind.OK and not pending.announced_late:
                arrived.append(slot)
            else:
                failed.append(slot)
                if not pending.announced_late:
                    self._read_failed(tier, key, outcome)
        if arrived:
            self._counters.promotions[tier.name] += len(arrived)
            self.became_ready(self._host.filled(arrived, ChunkEvent.ARRIVED))
        self._host.failed(failed)

    def _read_failed(self, tier: LowerTier, key: Key, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.ABSENT:
            if tier.forget(key, self.now):
                self._events.add(CacheEventKind.REMOVED, tier.name, key)
        elif outcome.kind is OutcomeKind.CORRUPT:
            # Deleted, so that a later store writes it again instead of finding a bad frame in its place.
            self._counters.chunks_corrupt[tier.name] += 1
            if tier.is_writing(key):  # it is being written anew: the deletion could hit the new frame
                tier.suspect(key, self.now)
            else:
                tier.condemn(key)
                self._deletions.setdefault(tier.index, []).append(key)
        else:
            self._counters.reads_failed[tier.name] += 1
            tier.suspect(key, self.now)

    def _write_ended(self, tier: LowerTier, pending: _OpInFlight, outcomes: Sequence[Outcome]) -> None:
        keys, well = pending.op.keys, OutcomeKind.OK
        stored = [(key, out.frame_bytes) for key, out in zip(keys, outcomes, strict=True) if out.kind is well]
        if stored:
            tier.stored(stored, self.now)
            self._counters.cascades[tier.name] += len(stored)
            if not tier.leaving:
                self._events.extend(CacheEventKind.STORED, tier.name, [key for key, _ in stored])
        tier.end_write(keys, sum(map(self._sizes.frame_bound, keys)))
        for key, outcome in zip(keys, outcomes, strict=True) if len(stored) < len(keys) else ():
            self._counters.writes_failed[tier.name] += outcome.kind is not well
            if outcome.kind is OutcomeKind.NO_SPACE:
                self._evict(tier, tier.next_victim())
            elif outcome.kind in _PERHAPS_WRITTEN and tier.doubt(key, self._sizes.frame_bound(key)):
                self._deletions.setdefault(tier.index, []).append(key)
        self._host.release(pending.slots)

    def _delete_ended(self, tier: LowerTier, pending: _OpInFlight, outcomes: Sequence[Outcome]) -> None:
        removed = [
            key
            for key, outcome in zip(pending.op.keys, outcomes, strict=True)
            if tier.deleted(key, ok=outcome.kind in (OutcomeKind.OK, OutcomeKind.ABSENT), now=self.now)
        ]
        self._events.extend(CacheEventKind.REMOVED, tier.name, removed)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def has_pending_writes(self) -> bool:
        """Whether chunks wait for, or are in, a write below."""
        return any(tier.num_writing or tier.cascades for tier in self._tiers.with_leaving)

    def validate(self) -> None:
        """Check that every op in flight holds its slots, and every tier's account.

        Raises:
            InvariantError: one of it is not so.
        """
        for pending in self._in_flight.values():
            for key, ref in zip(pending.op.keys, pending.op.slots, strict=bool(pending.op.slots)):
                chunk = self._host.owner(ref)
                held = chunk is not None and chunk.key == key and chunk.holders
                require(held, f"op {pending.op.op_id} touches a slot it does not hold")
        for tier in self._tiers.with_leaving:
            tier.validate()


def _batches(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
