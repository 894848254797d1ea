"""Instructions to lower tiers that have not ended: the slots they hold, and the effects of their completion.

Every instruction is kept under its id until dispatch reports that its I/O ended. Until then the slots that it uses are
held. Outcomes are per key: one bad frame fails one chunk.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress

from tierkv.errors import require
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk_state import ChunkEvent, ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.lower_room import LowerRoom
from tierkv.manager.moves.tier_reads import TierReads
from tierkv.manager.moves.write_back import Demotions
from tierkv.manager.moves.write_through import Cascades
from tierkv.manager.step_state import StepState
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.keys import Key
from tierkv.types.tier_ops import (
    Completion,
    Outcome,
    OutcomeKind,
    TierContent,
    TierHealth,
    TierListing,
    TierOp,
    TierReport,
    Verb,
    always,
)

_PERHAPS_WRITTEN = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT)
"""Outcomes of a write after which the tier may still contain the frame."""
_ANSWERS = (OutcomeKind.OK, OutcomeKind.ABSENT)
"""Outcomes that show that a tier answers."""
_LOST = (OutcomeKind.ABSENT, OutcomeKind.CORRUPT)
"""Outcomes of a read after which the tier has no good frame."""
_GONE = (OutcomeKind.OK, OutcomeKind.ABSENT)
"""Outcomes of a deletion after which the tier does not contain the frame."""
_CHANGES = (Verb.WRITE, Verb.DELETE)
_WHEN_STORED = (WritePolicy.THROUGH, WritePolicy.ON_REUSE)
"""Tiers that get chunks from the host tier before an eviction."""


@dataclass(slots=True)
class OpInFlight:
    """One instruction that has not ended."""

    op: TierOp
    issued_s: float
    """Time when it was issued."""
    slots: Sequence[int] = ()
    """Host slots that it holds; empty for probes and deletions."""
    announced_late: bool = False
    """Whether its deadline has passed."""
    ended_bytes: int = 0
    """Of a read: bytes that the tier had delivered when it was issued."""


def _timeout_s(limits: LowerTierLimits, verb: Verb) -> float:
    if verb is Verb.READ:
        return limits.read_deadline_s
    return limits.probe_deadline_s if verb is Verb.PROBE else limits.write_deadline_s


class InFlightOps:
    """Issues instructions and applies their completions. Sans-IO.

    Args:
        reads: reads from each tier, by its number. Measured here; tiers are added and removed by the owner.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        step: StepState,
        host: HostTier,
        tiers: TierList,
        reads: Mapping[int, TierReads],
        cascades: Cascades,
        demotions: Demotions,
        room: LowerRoom,
        events: EventLog,
    ) -> None:
        self._step = step
        self._host = host
        self._tiers = tiers
        self._sizes = cascades.sizes
        self._cascades = cascades
        self._demotions = demotions
        self._room = room
        self._events = events
        self._counters = cascades.counters
        self._ops: dict[int, OpInFlight] = {}
        self._last_op_id = 0
        self._reads = reads
        self._ended: dict[Verb, Callable[[LowerTier, OpInFlight, Sequence[Outcome]], None]] = {
            Verb.READ: self._read_ended,
            Verb.WRITE: self._write_ended,
            Verb.DELETE: self._delete_ended,
        }

    def __len__(self) -> int:
        """Number of instructions that have not ended."""
        return len(self._ops)

    def __iter__(self) -> Iterator[OpInFlight]:
        """The instructions that have not ended, oldest first."""
        return iter(self._ops.values())

    def issue(
        self,
        tier: LowerTier,
        verb: Verb,
        keys: tuple[Key, ...] = (),
        slots: Sequence[int] = (),
        turn_chunks: int = 0,
    ) -> TierOp:
        """Issue an instruction. keys: those in ``slots``, if left out; turn_chunks: of a read, see :class:`TierOp`."""
        self._last_op_id += 1
        op = TierOp(
            self._last_op_id,
            tier.index,
            verb,
            keys or self._host.slots.keys_of(slots),
            self._host.slots.refs(slots),
            _timeout_s(tier.limits, verb),
            tier.written_ranks.of(self._host.slots.ranks_of(slots)) if verb is Verb.WRITE else (),
            turn_chunks,
            partial(self._host.waiters.has_any, slots) if verb is Verb.READ else always,
        )
        pending = self._ops[op.op_id] = OpInFlight(op, self._step.now, slots)
        if verb is Verb.PROBE:
            self._step.probe_began()
        elif verb is Verb.READ:
            pending.ended_bytes = self._reads[tier.index].speed.ended_bytes
        return op

    # -- completions ---------------------------------------------------------------------------------------------------

    def on_completion(self, completion: TierReport) -> None:
        """Apply a completion, a change of a tier's health, or a part of a tier's content."""
        if isinstance(completion, TierHealth):
            self._health_changed(self._tiers[completion.tier], usable=completion.usable)
            return
        if isinstance(completion, TierListing):
            self._listed(self._tiers[completion.tier], completion)
            return
        pending = self._ops.get(completion.op_id)
        if pending is None:
            return
        self._step.version += pending.op.verb in (Verb.PROBE, Verb.READ)  # a read may find that the chunk is gone
        tier = self._tiers[pending.op.tier]
        if any(outcome.kind in _ANSWERS for outcome in completion.outcomes):
            tier.answered_s = self._step.now
        if pending.op.verb is Verb.READ:
            self._measure(pending, completion)
        elif pending.op.verb is Verb.PROBE and not pending.announced_late:
            self._probe_ended(tier, pending, completion)
        if not completion.ended:
            self._announce_late(tier, pending)
            return
        del self._ops[completion.op_id]
        if pending.announced_late and pending.op.verb in _CHANGES:
            tier.late_change_ended()
        if pending.op.verb in self._ended:
            self._ended[pending.op.verb](tier, pending, completion.outcomes)

    def _health_changed(self, tier: LowerTier, *, usable: bool) -> None:
        self._step.version += 1
        tier.health_changed(usable=usable)
        if tier.phase.usable:
            self._step.answered_s = self._step.now
        else:
            self._cascades.out_of_service(tier)
            self._demotions.out_of_service(tier)

    def _listed(self, tier: LowerTier, listing: TierListing) -> None:
        """Index chunks of a tier that could not list them when the stack opened."""
        tier.load_index(listing.content)
        tier.knows_content = listing.is_last
        if tier.emits_events:
            rows = tier.residency.rows
            self._events.extend(
                CacheEventKind.STORED, tier.name, [key for key in listing.content.keys if rows.has_bytes_of(key)]
            )

    def _measure(self, pending: OpInFlight, completion: Completion) -> None:
        """Measure the speed of a tier by a read. A read that failed at once is not measured; a late one is."""
        reads = self._reads[pending.op.tier]
        served = not completion.ended or any(outcome.kind is OutcomeKind.OK for outcome in completion.outcomes)
        own_bytes = self._sizes.raw(pending.op.keys)
        if served and not pending.announced_late:
            delivered = reads.speed.ended_bytes - pending.ended_bytes + own_bytes
            self._step.speed_changes += reads.speed.measured(
                delivered, completion.elapsed_s, is_late=not completion.ended
            )
        if completion.ended:
            is_unwanted = completion.outcomes[0].kind is OutcomeKind.UNWANTED  # and so are all others
            reads.ended(own_bytes, pending.op.turn_chunks, delivered=not is_unwanted)

    def _announce_late(self, tier: LowerTier, pending: OpInFlight) -> None:
        """End the wait for I/O that missed its deadline and runs on. Its slots stay held."""
        if pending.announced_late:
            return
        pending.announced_late = True
        if pending.op.verb in _CHANGES:
            tier.change_is_late()
        if pending.op.verb is Verb.READ:
            for key in pending.op.keys:
                tier.mark_absent(key, self._step.now)
            self._counters.reads_failed[tier.name] += len(pending.op.keys)
            self._host.drop(pending.slots)
        elif pending.op.verb is Verb.WRITE:
            self._host.cancel_demotions(pending.slots)  # no bound until their slots are free: evict others instead

    def _probe_ended(self, tier: LowerTier, pending: OpInFlight, completion: Completion) -> None:
        """Apply the answers to a probe that have arrived, at its end or at its deadline."""
        self._step.probe_ended()
        not_asked: list[Key] = []
        for key, outcome in zip(pending.op.keys, completion.outcomes, strict=True):
            if outcome.kind is OutcomeKind.REFUSED:
                not_asked.append(key)
            else:
                tier.probed(key, self._step.now, present=outcome.kind is OutcomeKind.OK)
        asked = len(pending.op.keys) - len(not_asked)
        is_late = self._step.now - pending.issued_s >= pending.op.timeout_s
        if is_late and tier.answered_s < pending.issued_s:  # it hangs: no request waits for it
            for key in not_asked:
                tier.probed(key, self._step.now, present=False)
            not_asked = []
        tier.probes.ended(pending.op.keys, not_asked, asked, completion.elapsed_s - completion.queued_s)
        if any(outcome.kind in _ANSWERS for outcome in completion.outcomes):
            self._step.probed_s = self._step.answered_s = self._step.now
        unknown = set(not_asked)
        known = [key for key in pending.op.keys if key not in unknown]
        self._cascades.resume(tier, known, self._step.now)
        self._demotions.answered(tier, known)
        if not tier.phase.usable:
            tier.probes.clear()

    def _read_ended(self, tier: LowerTier, pending: OpInFlight, outcomes: Sequence[Outcome]) -> None:
        tier.residency.end_read(pending.op.keys)
        arrived: Sequence[int] = () if pending.announced_late else pending.slots
        failed: Sequence[int] = pending.slots if pending.announced_late else ()
        well, reads = OutcomeKind.OK, list(zip(pending.op.keys, pending.slots, outcomes, strict=True))
        if arrived and (bad := [read for read in reads if read[2].kind is not well]):
            arrived = [slot for _, slot, outcome in reads if outcome.kind is well]
            failed = [slot for _, slot, _ in bad]
            for key, _, outcome in bad:
                self._read_failed(tier, key, outcome)
            self._write_again(tier, [key for key, _, outcome in bad if outcome.kind in _LOST])
        if arrived and not tier.capabilities.authoritative_index:
            for key, _, outcome in reads:
                if outcome.kind is well:
                    tier.probed(key, self._step.now, present=True)
        if arrived:
            self._step.answered_s = self._step.delivered_s[tier.name] = self._step.now
            self._counters.promotions[tier.name] += len(arrived)
            filled = self._host.filled(arrived, ChunkEvent.ARRIVED)
            self._cascades.became_ready(filled, self._step.now, tier)
        self._host.failed(failed)

    def _read_failed(self, tier: LowerTier, key: Key, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.ABSENT:
            self._counters.reads_absent[tier.name] += 1
            if tier.forget(key, self._step.now) and tier.emits_events:
                self._events.add(CacheEventKind.REMOVED, tier.name, key)
        elif outcome.kind is OutcomeKind.CORRUPT:
            # Deleted, so that a later store writes it again instead of finding a bad frame in its place.
            self._counters.chunks_corrupt[tier.name] += 1
            if tier.residency.rows.is_writing(key):  # the deletion could delete the new frame
                tier.mark_absent(key, self._step.now)
            else:
                tier.residency.schedule_delete(key)
        elif outcome.kind is not OutcomeKind.UNWANTED:
            self._counters.reads_failed[tier.name] += 1
            tier.mark_absent(key, self._step.now, briefly=outcome.kind is OutcomeKind.FAILED)

    def _write_again(self, tier: LowerTier, keys: Sequence[Key]) -> None:
        """Queue lost chunks that a request has stored while they were being read. The tier counted as having them."""
        found = [(slot, key) for key in keys if (slot := self._host.slots.find(key)) is not None]
        stored = [chunk for chunk in found if self._host.slots.state(chunk[0]) is ChunkState.READY]
        if tier.limits.write in _WHEN_STORED:
            self._cascades.queue(tier, stored, self._step.now)

    def _write_ended(self, tier: LowerTier, pending: OpInFlight, outcomes: Sequence[Outcome]) -> None:
        keys, slots, written, well = pending.op.keys, pending.slots, pending.op.ranks, OutcomeKind.OK
        lengths = array("Q", [outcome.frame_bytes for outcome in outcomes if outcome.kind is well])
        stored: Sequence[Key] = keys
        if len(lengths) < len(keys):
            is_stored = [outcome.kind is well for outcome in outcomes]
            stored, slots = tuple(compress(keys, is_stored)), tuple(compress(slots, is_stored))
            written = tuple(compress(written, is_stored))
        ranks = self._host.slots.ranks_of(slots)
        if stored:
            self._step.answered_s = self._step.now
            tier.stored(TierContent(stored, lengths, array("Q", written)), self._step.now, ranks)
            self._cascades.count_written(tier, len(stored))
            if tier.emits_events:
                self._events.extend(CacheEventKind.STORED, tier.name, stored)
        tier.residency.end_write(keys, self._sizes.frame_bounds(keys))
        self._room.evict_cut(tier, stored, ranks)
        if tier.capabilities.authoritative_index:  # answers about a shared tier expire: one write per lease is enough
            tier.write_queue.forget(pending.op.slots)
        for key, ref, outcome in zip(keys, pending.op.slots, outcomes, strict=True) if len(stored) < len(keys) else ():
            if outcome.kind is well:
                continue
            self._counters.writes_failed[tier.name] += 1
            tier.write_queue.forget((ref,))
            if outcome.kind is OutcomeKind.NO_SPACE:
                if tier.is_full(self._sizes.frame_bound(key), self._step.now):
                    self._room.evict_one(tier)
            elif outcome.kind in _PERHAPS_WRITTEN:
                tier.mark_uncertain(key, self._sizes.frame_bound(key))
        self._demotions.end_writes(pending.slots)

    def _delete_ended(self, tier: LowerTier, pending: OpInFlight, outcomes: Sequence[Outcome]) -> None:
        now = self._step.now
        removed: list[Key] = []
        for key, outcome in zip(pending.op.keys, outcomes, strict=True):
            if outcome.kind not in _GONE:
                tier.not_deleted(key, tried=outcome.kind is not OutcomeKind.REFUSED, now=now)
            elif tier.deleted(key, now=now):
                removed.append(key)
        if tier.emits_events:
            self._events.extend(CacheEventKind.REMOVED, tier.name, removed)
        self._cascades.resume(tier, pending.op.keys, now)

    # -- check ---------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check that every instruction in flight holds its slots, and the account of every tier.

        Raises:
            InvariantError: one does not, or an account is wrong.
        """
        for pending in self._ops.values():
            for key, ref in zip(pending.op.keys, pending.op.slots, strict=bool(pending.op.slots)):
                chunk = self._host.slots.owner(ref)
                held = chunk is not None and chunk.key == key and chunk.pins
                require(held, f"op {pending.op.op_id} touches a slot it does not hold")
        writes = [pending.slots for pending in self._ops.values() if pending.op.verb is Verb.WRITE]
        waiting = set(chain(self._demotions.held, *writes))
        require(self._host.slots.demoting <= waiting, "a chunk is demoting, but neither written nor asked for")
        for tier in self._tiers.with_detached:
            tier.validate()
