"""Lower tiers that a test drives by hand: instructions wait until the test completes them, well or badly.

Bytes are really copied between the slots of the bed and dicts of frames. A frame is valid if it equals the truth, as a
checksum would show; a read that finds another one answers CORRUPT.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from core_parts import TierSpec
from core_truth import Audit, Truth

from tierkv.manager.host.host_tier import HostTier
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierOp, TierReport, Verb

GARBAGE = b"garbage"
HEADER_BYTES = 4096

NOTHING_DONE = {OutcomeKind.FAILED, OutcomeKind.REFUSED, OutcomeKind.NO_SPACE, OutcomeKind.TIMED_OUT}
"""Outcomes of a write, probe or deletion that leave the tier as it was."""


class TierStore:
    """Content of one tier at rest."""

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.frames: dict[Key, bytes] = {}
        self.deletions_fail = spec.capabilities.read_only

    @property
    def used_bytes(self) -> int:
        """Number of bytes at rest."""
        return sum(HEADER_BYTES + len(frame) for frame in self.frames.values())


class ScriptedTiers:
    """The dispatch of a bed."""

    def __init__(
        self, specs: Sequence[TierSpec], host: HostTier, memory: list[bytes], truth: Truth, audit: Audit
    ) -> None:
        self.stores = [TierStore(spec) for spec in specs]
        self.pending: dict[int, TierOp] = {}
        self.completion: deque[TierReport] = deque()
        self.late: set[int] = set()
        self.elapsed_s = [0.0] * len(specs)  # what an instruction to each tier is said to have taken
        self.reads: dict[Key, int] = {}
        self._host = host
        self._memory = memory
        self._truth = truth
        self._audit = audit

    def submit(self, op: TierOp) -> None:
        """Accept an instruction; its slots are in use from now on."""
        assert op.op_id not in self.pending
        assert len(op.slots) == (len(op.keys) if op.verb in (Verb.READ, Verb.WRITE) else 0)
        self.pending[op.op_id] = op
        for ref in op.slots:
            assert self._host.slots.owner(ref) is not None, f"{op} names a slot that is not leased"
            if op.verb is Verb.READ:
                self._audit.begin_write(("slot", ref.slot), f"op {op.op_id}")
            else:
                self._audit.begin_read(("slot", ref.slot), f"op {op.op_id}")

    def announce_late(self, op_id: int) -> None:
        """Report that the deadline of an instruction has passed; its I/O continues."""
        op = self.pending[op_id]
        self.late.add(op_id)
        outcomes = tuple(Outcome(OutcomeKind.TIMED_OUT) for _ in op.keys)
        self.completion.append(Completion(op_id, outcomes, ended=False))

    def complete(self, op_id: int, faults: Sequence[OutcomeKind | None] = ()) -> None:
        """End an instruction. faults: per key, or None; keys beyond its end succeed."""
        op = self.pending.pop(op_id)
        outcomes = []
        for i, key in enumerate(op.keys):
            fault = faults[i] if i < len(faults) else None
            outcomes.append(self._one(op, i, key, fault))
        self.late.discard(op_id)
        for ref in op.slots:
            assert self._host.slots.owner(ref) is not None, f"{op} outlived the lease on its slot"
            if op.verb is Verb.READ:
                self._audit.end_write(("slot", ref.slot), f"op {op.op_id}")
            else:
                self._audit.end_read(("slot", ref.slot), f"op {op.op_id}")
        self.completion.append(Completion(op_id, tuple(outcomes), elapsed_s=self.elapsed_s[op.tier]))

    def _one(self, op: TierOp, index: int, key: Key, fault: OutcomeKind | None) -> Outcome:
        store = self.stores[op.tier]
        match op.verb:
            case Verb.READ:
                return self._read(store, op.slots[index].slot, key, fault)
            case Verb.WRITE:
                return self._write(store, op.slots[index].slot, key, fault)
            case Verb.PROBE:
                if fault in NOTHING_DONE:
                    return Outcome(fault)
                return Outcome(OutcomeKind.OK if key in store.frames else OutcomeKind.ABSENT)
            case Verb.DELETE:
                if fault in NOTHING_DONE or store.deletions_fail:
                    return Outcome(OutcomeKind.FAILED)
                return Outcome(OutcomeKind.OK if store.frames.pop(key, None) is not None else OutcomeKind.ABSENT)

    def _read(self, store: TierStore, slot: int, key: Key, fault: OutcomeKind | None) -> Outcome:
        self.reads[key] = self.reads.get(key, 0) + 1
        if fault is OutcomeKind.ABSENT:
            store.frames.pop(key, None)  # deleted behind our back
        elif fault is OutcomeKind.CORRUPT and key in store.frames:
            store.frames[key] = GARBAGE
        elif fault is not None:
            self._memory[slot] = GARBAGE  # the buffer may hold anything after a failure
            return Outcome(fault)
        frame = store.frames.get(key)
        if frame is None:
            return Outcome(OutcomeKind.ABSENT)
        self._memory[slot] = frame
        if not self._truth.is_good(key, frame):
            return Outcome(OutcomeKind.CORRUPT)
        return Outcome(OutcomeKind.OK, HEADER_BYTES + len(frame))

    def _write(self, store: TierStore, slot: int, key: Key, fault: OutcomeKind | None) -> Outcome:
        assert store.spec.limits.writes, f"tier {store.spec.name} takes no writes"
        if fault in NOTHING_DONE:
            return Outcome(fault)
        store.frames[key] = self._memory[slot]
        capacity = store.spec.limits.capacity_bytes
        assert capacity is None or store.used_bytes <= capacity, f"tier {store.spec.name} is over its capacity"
        return Outcome(OutcomeKind.OK, HEADER_BYTES + len(self._memory[slot]))
