"""Traffic between the host tier and the tiers below: probes, promotions, cascades and deletions, as instructions.

Every instruction handed out is remembered under its id until dispatch says that its I/O ended; until then the slots it
touches are held. Outcomes are per key: one bad frame fails one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tierkv.errors import require
from tierkv.manager.chunk_state import ChunkEvent, ChunkState
from tierkv.manager.contract import HOST
from tierkv.manager.event_log import EventLog
from tierkv.manager.host_index import Chunk, HostIndex
from tierkv.manager.lower_tier import LowerTier
from tierkv.manager.speeds import TierSpeed
from tierkv.manager.terms import Terms
from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth, TierOp, Verb
from tierkv.types.transfers import SlotRef

_T = TypeVar("_T")

CASCADES_PER_STEP_MAX = 1024
"""Waiting chunks looked at per tier and step, whether written or dropped: a step stays short after a long outage."""

FRAME_PAGE_BYTES = 4096
"""A frame is a header page and a payload padded to pages (decision 3)."""


def frame_bytes_bound(raw_bytes: int) -> int:
    """The most that a chunk of ``raw_bytes`` can take at rest."""
    return FRAME_PAGE_BYTES * (1 + -(-raw_bytes // FRAME_PAGE_BYTES))


@dataclass(slots=True)
class _OpInFlight:
    op: TierOp
    chunks: tuple[Chunk, ...] = ()
    announced_late: bool = False
    queue_bytes: int = 0


class TierTraffic:
    """Sans-IO; the manager's hands towards dispatch."""

    def __init__(self, host: HostIndex, tiers: Sequence[LowerTier], events: EventLog, counters: CoreCounters) -> None:
        self.now = 0.0
        self.version = 0
        self._host = host
        self._tiers = tiers
        self._events = events
        self._counters = counters
        self._terms = Terms(host.num_slots)
        self._speeds = [TierSpeed() for _ in tiers]
        self._routes: dict[int, tuple[int, frozenset[str]]] = {}  # by slot: its generation, and where its chunk may go
        self._in_flight: dict[int, _OpInFlight] = {}
        self._promotions: dict[int, list[Chunk]] = {}
        self._deletions: dict[int, list[Key]] = {}
        self._last_op_id = 0
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
    def speeds(self) -> Sequence[TierSpeed]:
        """How fast the tiers are, in order."""
        return self._speeds

    def remeasure(self, tier: int, key: Key, raw_bytes: int) -> None:
        """Read ``key``, which the tier has and the host tier has not, if the tier was not read for a while."""
        if self._speeds[tier].is_stale(self.now) and self._host.room:
            self._host.release(self.promote(key, raw_bytes, self._tiers[tier]))

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
        chunk = self._host.get(key)
        if chunk is not None:
            if chunk.holders or chunk.state is not ChunkState.READY:
                return False
            self._host.drop(chunk)
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

    def admit(
        self, key: Key, raw_bytes: int, state: ChunkState, origin: str = HOST, route: frozenset[str] | None = None
    ) -> tuple[Chunk, Key | None]:
        """A slot for ``key``, held once; see :meth:`HostIndex.admit`. One-shot chunks make room before all others.

        route: the only tiers that the chunk may cascade to; None: all.
        """
        made_room = None if self._host.free else self._drop_one_shot()
        chunk, evicted = self._host.admit(key, raw_bytes, state, origin)
        evicted = made_room or evicted
        if evicted is not None:
            self._counters.evictions[HOST] += 1
            self._events.add(CacheEventKind.REMOVED, HOST, evicted)
        if route is not None:
            self._routes[chunk.slot] = (chunk.generation, route)
        return chunk, evicted

    def _drop_one_shot(self) -> Key | None:
        """Free the slot of a one-shot chunk, if there is one to be had."""

        def is_free(key: Key) -> bool | None:
            chunk = self._host.get(key)
            return None if chunk is None else chunk.state is ChunkState.READY and not chunk.holders

        key = self._terms.take_one_shot(is_free)
        chunk = None if key is None else self._host.get(key)
        if chunk is not None:
            self._host.drop(chunk)
        return key

    def promote(self, key: Key, raw_bytes: int, tier: LowerTier, route: frozenset[str] | None = None) -> Chunk:
        """Start to bring ``key`` from ``tier`` into the host tier. The caller holds it on top of the I/O's own hold."""
        chunk, _ = self.admit(key, raw_bytes, ChunkState.PROMOTING, tier.name, route)
        self._host.hold(chunk)
        tier.begin_read(key)
        self._speeds[tier.index].promised(raw_bytes, self.now)
        self._promotions.setdefault(tier.index, []).append(chunk)
        return chunk

    def became_ready(self, chunk: Chunk) -> None:
        """A chunk is readable in the host tier: say so, and let it cascade to every tier that wants and may have it."""
        self.version += 1
        self._events.add(CacheEventKind.STORED, HOST, chunk.key)
        generation, route = self._routes.pop(chunk.slot, (chunk.generation, None)) if self._routes else (0, None)
        if generation != chunk.generation:
            route = None  # an earlier chunk of this slot, which never became readable
        ends = self._terms.ends(chunk.key)  # no other process would know when
        for tier in self._tiers:
            if (route is not None and tier.name not in route) or (ends and tier.capabilities.shared):
                continue
            if not tier.wants(chunk.key, self.now):
                continue
            tier.cascades.append(chunk)
            if not tier.usable or len(tier.cascades) > self._host.num_slots:
                # Nobody holds what only waits, so the queue itself needs a bound while a tier does not keep up.
                tier.cascades.popleft()
                self._counters.cascades_dropped[tier.name] += 1

    # -- instructions ------------------------------------------------------------------------------------------------

    def take_ops(self) -> list[TierOp]:
        """Everything dispatch shall start now: reads, probes, deletions, writes."""
        ops: list[TierOp] = []
        for tier in self._tiers:
            limits = tier.limits
            for batch in _batches(self._promotions.pop(tier.index, []), tier.capabilities.preferred_batch):
                ops.append(self._issue(tier, Verb.READ, limits.read_deadline_s, chunks=batch))
            probe = tier.take_probe()
            if probe:
                self._counters.probes[tier.name] += len(probe)
                ops.append(self._issue(tier, Verb.PROBE, limits.probe_deadline_s, keys=probe))
            writes = self._writable(tier)
            for keys in _batches(self._deletions.pop(tier.index, []), tier.capabilities.preferred_batch):
                ops.append(self._issue(tier, Verb.DELETE, limits.write_deadline_s, keys=tuple(keys)))
            for batch in _batches(writes, tier.capabilities.preferred_batch):
                ops.append(self._issue(tier, Verb.WRITE, limits.write_deadline_s, chunks=batch))
        return ops

    def _writable(self, tier: LowerTier) -> list[Chunk]:
        """Take from the front of the cascade queue what the tier can take now, and start to make room for the rest.

        Waiting chunks are not held: a store that needs their slots wins, and they are dropped and counted. Only what is
        being written is held, under the tier's bound.
        """
        batch: list[Chunk] = []
        for _ in range(min(len(tier.cascades), CASCADES_PER_STEP_MAX)):
            if len(tier.cascading) >= tier.limits.queue_chunks_max:
                break
            chunk = tier.cascades[0]
            size = frame_bytes_bound(chunk.raw_bytes)
            if not tier.usable or chunk.state is not ChunkState.READY:
                self._counters.cascades_dropped[tier.name] += 1
            elif tier.wants(chunk.key, self.now):
                if not self._has_room(tier, size):
                    if tier.may_get_room(size):
                        break
                    self._counters.cascades_dropped[tier.name] += 1
                else:
                    self._host.hold(chunk)
                    tier.begin_write(chunk.key, size)
                    batch.append(chunk)
            tier.cascades.popleft()
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
        chunks: Sequence[Chunk] = (),
    ) -> TierOp:
        self._last_op_id += 1
        slots: tuple[SlotRef, ...] = tuple(chunk.ref for chunk in chunks)
        op = TierOp(
            self._last_op_id,
            tier.index,
            verb,
            keys or tuple(chunk.key for chunk in chunks),
            slots,
            self.now + deadline_s,
        )
        pending = self._in_flight[op.op_id] = _OpInFlight(op, tuple(chunks))
        if verb is Verb.READ:
            pending.queue_bytes = self._speeds[tier.index].issued(sum(chunk.raw_bytes for chunk in chunks))
        return op

    # -- news --------------------------------------------------------------------------------------------------------

    def on_news(self, news: Completion | TierHealth) -> None:
        """Take in a completion or a change of a tier's health."""
        self.version += 1
        if isinstance(news, TierHealth):
            self._tiers[news.tier].usable = news.usable
            return
        pending = self._in_flight.get(news.op_id)
        if pending is None:
            return
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
            speed.ended(sum(chunk.raw_bytes for chunk in pending.chunks))

    def _announce_late(self, tier: LowerTier, pending: _OpInFlight) -> None:
        """The deadline passed while the I/O runs on: nobody waits for it any more; its slots stay held."""
        if pending.announced_late:
            return
        pending.announced_late = True
        if pending.op.verb is Verb.PROBE:
            for key in pending.op.keys:
                tier.answered(key, self.now, present=False)
        elif pending.op.verb is Verb.READ:
            for chunk in pending.chunks:
                tier.suspect(chunk.key, self.now)
                self._counters.reads_failed[tier.name] += 1
                self._host.drop(chunk)

    def _probe_ended(self, tier: LowerTier, pending: _OpInFlight, outcomes: Sequence[Outcome]) -> None:
        if pending.announced_late:
            return
        for key, outcome in zip(pending.op.keys, outcomes, strict=True):
            tier.answered(key, self.now, present=outcome.kind is OutcomeKind.OK)

    def _read_ended(self, tier: LowerTier, pending: _OpInFlight, outcomes: Sequence[Outcome]) -> None:
        for chunk, outcome in zip(pending.chunks, outcomes, strict=True):
            tier.end_read(chunk.key)
            if outcome.kind is OutcomeKind.OK and not pending.announced_late:
                self._counters.promotions[tier.name] += 1
                if self._host.settle(chunk, ChunkEvent.ARRIVED):
                    self.became_ready(chunk)
            else:
                if not pending.announced_late:
                    self._read_failed(tier, chunk.key, outcome)
                self._host.settle(chunk, ChunkEvent.FAILED)
            self._host.release(chunk)

    def _read_failed(self, tier: LowerTier, key: Key, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.ABSENT:
            self._forgotten(tier, key, known=tier.forget(key, self.now))
        elif outcome.kind is OutcomeKind.CORRUPT:
            # Deleted, so that a later store writes it again instead of finding a bad frame in its place.
            self._counters.chunks_corrupt[tier.name] += 1
            if key in tier.cascading:  # it is being written anew: the deletion could hit the new frame
                tier.suspect(key, self.now)
            else:
                tier.condemn(key)
                self._deletions.setdefault(tier.index, []).append(key)
        else:
            self._counters.reads_failed[tier.name] += 1
            tier.suspect(key, self.now)

    def _write_ended(self, tier: LowerTier, pending: _OpInFlight, outcomes: Sequence[Outcome]) -> None:
        for chunk, outcome in zip(pending.chunks, outcomes, strict=True):
            tier.end_write(chunk.key, frame_bytes_bound(chunk.raw_bytes))
            if outcome.kind is OutcomeKind.OK:
                tier.stored(chunk.key, outcome.frame_bytes, self.now)
                self._counters.cascades[tier.name] += 1
                self._events.add(CacheEventKind.STORED, tier.name, chunk.key)
            else:
                self._counters.writes_failed[tier.name] += 1
                if outcome.kind is OutcomeKind.NO_SPACE:
                    self._evict(tier, tier.next_victim())
            self._host.release(chunk)

    def _delete_ended(self, tier: LowerTier, pending: _OpInFlight, outcomes: Sequence[Outcome]) -> None:
        for key, outcome in zip(pending.op.keys, outcomes, strict=True):
            gone = outcome.kind in (OutcomeKind.OK, OutcomeKind.ABSENT)
            self._forgotten(tier, key, known=tier.deleted(key, ok=gone, now=self.now))

    def _forgotten(self, tier: LowerTier, key: Key, *, known: bool) -> None:
        if known:
            self._events.add(CacheEventKind.REMOVED, tier.name, key)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def has_pending_writes(self) -> bool:
        """Whether chunks wait for, or are in, a write below."""
        return any(tier.cascading or tier.cascades for tier in self._tiers)

    def validate(self) -> None:
        """Check that every op in flight holds its slots, and every tier's account.

        Raises:
            InvariantError: one of it is not so.
        """
        for pending in self._in_flight.values():
            for chunk in pending.chunks:
                require(self._host.owner(chunk.ref) is chunk, f"op {pending.op.op_id} touches a slot it does not hold")
        for tier in self._tiers:
            tier.validate()


def _batches(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
