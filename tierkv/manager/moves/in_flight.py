"""Instructions to lower tiers that have not ended: the slots they hold, and the effects of their completion.

Every instruction is kept under its id until dispatch reports that its I/O ended. Until then the slots that it uses are
held. Outcomes are per key: one bad frame fails one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from tierkv.errors import require
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk_state import ChunkEvent
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.read_speed import TierSpeed
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.write_back import Demotions
from tierkv.manager.moves.write_through import Cascades
from tierkv.manager.step_state import StepState
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth, TierOp, Verb

_PERHAPS_WRITTEN = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT)
"""Outcomes of a write after which the tier may contain the frame all the same."""
_CHANGES = (Verb.WRITE, Verb.DELETE)


@dataclass(slots=True)
class OpInFlight:
    """One instruction that has not ended."""

    op: TierOp
    slots: Sequence[int] = ()
    """Host slots that it holds; empty for probes and deletions."""
    announced_late: bool = False
    """Whether its deadline has passed."""
    queue_bytes: int = 0
    """Of a read: bytes on their way from the tier when it was issued, its own included."""


class InFlightOps:
    """Issues instructions and applies their completions. Sans-IO.

    Args:
        speeds: read speed of each tier, by its number. Measured here; tiers are added and removed by the owner.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        step: StepState,
        host: HostTier,
        tiers: TierList,
        speeds: Mapping[int, TierSpeed],
        cascades: Cascades,
        demotions: Demotions,
        events: EventLog,
    ) -> None:
        self._step = step
        self._host = host
        self._tiers = tiers
        self._sizes = cascades.sizes
        self._cascades = cascades
        self._demotions = demotions
        self._events = events
        self._counters = cascades.counters
        self._ops: dict[int, OpInFlight] = {}
        self._last_op_id = 0
        self._speeds = speeds
        self._ended: dict[Verb, Callable[[LowerTier, OpInFlight, Sequence[Outcome]], None]] = {
            Verb.PROBE: self._probe_ended,
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
        deadline_s: float,
        keys: tuple[Key, ...] = (),
        slots: Sequence[int] = (),
    ) -> TierOp:
        """Issue an instruction with a deadline in ``deadline_s`` seconds. keys: those in ``slots``, if left out."""
        self._last_op_id += 1
        op = TierOp(
            self._last_op_id,
            tier.index,
            verb,
            keys or tuple(map(self._host.slots.key, slots)),
            self._host.slots.refs(slots),
            self._step.now + deadline_s,
        )
        pending = self._ops[op.op_id] = OpInFlight(op, slots)
        if verb is Verb.READ:
            pending.queue_bytes = self._speeds[tier.index].issued(self._sizes.raw(op.keys))
        return op

    # -- completions ---------------------------------------------------------------------------------------------------

    def on_completion(self, completion: Completion | TierHealth) -> None:
        """Apply a completion or a change of a tier's health."""
        if isinstance(completion, TierHealth):
            self._step.version += 1
            tier = self._tiers[completion.tier]
            tier.health_changed(usable=completion.usable)
            if not tier.phase.usable:
                self._cascades.out_of_service(tier)
            return
        pending = self._ops.get(completion.op_id)
        if pending is None:
            return
        self._step.version += pending.op.verb in (Verb.PROBE, Verb.READ)  # a read may find that the chunk is gone
        tier = self._tiers[pending.op.tier]
        if pending.op.verb is Verb.READ:
            self._measure(pending, completion)
        if not completion.ended:
            self._announce_late(tier, pending)
            return
        del self._ops[completion.op_id]
        if pending.announced_late and pending.op.verb in _CHANGES:
            tier.late_change_ended()
        self._ended[pending.op.verb](tier, pending, completion.outcomes)

    def _measure(self, pending: OpInFlight, completion: Completion) -> None:
        """Measure the speed of a tier by a read. A read that failed at once is not measured; a late one is."""
        speed = self._speeds[pending.op.tier]
        served = not completion.ended or any(outcome.kind is OutcomeKind.OK for outcome in completion.outcomes)
        if served and not pending.announced_late:
            speed.measured(pending.queue_bytes, completion.elapsed_s)
        if completion.ended:
            speed.ended(self._sizes.raw(pending.op.keys))

    def _announce_late(self, tier: LowerTier, pending: OpInFlight) -> None:
        """End the wait for I/O that missed its deadline and runs on. Its slots stay held."""
        if pending.announced_late:
            return
        pending.announced_late = True
        if pending.op.verb in _CHANGES:
            tier.change_is_late()
        if pending.op.verb is Verb.PROBE:
            for key in pending.op.keys:
                tier.probed(key, self._step.now, present=False)
        elif pending.op.verb is Verb.READ:
            for key in pending.op.keys:
                tier.mark_absent(key, self._step.now)
            self._counters.reads_failed[tier.name] += len(pending.op.keys)
            self._host.drop(pending.slots)
        elif pending.op.verb is Verb.WRITE:
            self._host.cancel_demotions(pending.slots)  # no bound until their slots are free: evict others instead

    def _probe_ended(self, tier: LowerTier, pending: OpInFlight, outcomes: Sequence[Outcome]) -> None:
        if pending.announced_late:
            return
        for key, outcome in zip(pending.op.keys, outcomes, strict=True):
            tier.probed(key, self._step.now, present=outcome.kind is OutcomeKind.OK)

    def _read_ended(self, tier: LowerTier, pending: OpInFlight, outcomes: Sequence[Outcome]) -> None:
        tier.residency.end_read(pending.op.keys)
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
            filled = self._host.filled(arrived, ChunkEvent.ARRIVED)
            self._cascades.became_ready(filled, self._step.now, promoted=True)
        self._host.failed(failed)

    def _read_failed(self, tier: LowerTier, key: Key, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.ABSENT:
            if tier.forget(key, self._step.now) and tier.emits_events:
                self._events.add(CacheEventKind.REMOVED, tier.name, key)
        elif outcome.kind is OutcomeKind.CORRUPT:
            # Deleted, so that a later store writes it again instead of finding a bad frame in its place.
            self._counters.chunks_corrupt[tier.name] += 1
            if tier.residency.is_writing(key):  # the deletion could delete the new frame
                tier.mark_absent(key, self._step.now)
            else:
                tier.residency.schedule_delete(key)
        else:
            self._counters.reads_failed[tier.name] += 1
            tier.mark_absent(key, self._step.now)

    def _write_ended(self, tier: LowerTier, pending: OpInFlight, outcomes: Sequence[Outcome]) -> None:
        keys, well = pending.op.keys, OutcomeKind.OK
        stored = [(key, out.frame_bytes) for key, out in zip(keys, outcomes, strict=True) if out.kind is well]
        if stored:
            tier.stored(stored, self._step.now)
            self._cascades.count_written(tier, len(stored))
            if tier.emits_events:
                self._events.extend(CacheEventKind.STORED, tier.name, [key for key, _ in stored])
        tier.residency.end_write(keys, self._sizes.frame_bounds(keys))
        if tier.capabilities.authoritative_index:  # answers about a shared tier expire: one write per lease is enough
            tier.write_queue.forget(pending.op.slots)
        for key, ref, outcome in zip(keys, pending.op.slots, outcomes, strict=True) if len(stored) < len(keys) else ():
            if outcome.kind is well:
                continue
            self._counters.writes_failed[tier.name] += 1
            tier.write_queue.forget((ref,))
            if outcome.kind is OutcomeKind.NO_SPACE:
                self._cascades.evict_one(tier)
            elif outcome.kind in _PERHAPS_WRITTEN:
                tier.mark_uncertain(key, self._sizes.frame_bound(key))
        self._demotions.end_writes(pending.slots)

    def _delete_ended(self, tier: LowerTier, pending: OpInFlight, outcomes: Sequence[Outcome]) -> None:
        removed = [
            key
            for key, outcome in zip(pending.op.keys, outcomes, strict=True)
            if tier.deleted(key, ok=outcome.kind in (OutcomeKind.OK, OutcomeKind.ABSENT), now=self._step.now)
        ]
        if tier.emits_events:
            self._events.extend(CacheEventKind.REMOVED, tier.name, removed)
        self._cascades.deletion_ended(tier, pending.op.keys, self._step.now)

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
        require(self._host.demoting <= set(chain(*writes)), "a chunk is demoting, but not being written")
        for tier in self._tiers.with_detached:
            tier.validate()
