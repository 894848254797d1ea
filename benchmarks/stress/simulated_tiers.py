"""Lower tiers on simulated time: dispatch without threads, with its queue. Every chunk that is read is there."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.core.rig import open_policy
from tierkv.abc import Capabilities
from tierkv.dispatch.lanes.ticket import Ticket, TicketQueue
from tierkv.frames.frame import frame_bytes
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.structures.key_table import KeyDirectory
from tierkv.types.keys import Key
from tierkv.types.tier_ops import UNWANTED, Completion, Outcome, OutcomeKind, TierContent, TierOp, Verb

CAPABILITIES = Capabilities(
    durable=True,
    authoritative_index=True,
    scan=True,
    preferred_batch=128,
    preferred_write_bytes=32 << 20,
    preferred_read_bytes=4 << 20,
    spare_share=1 / 16,
    preferred_concurrency=4,
)
"""Capabilities of the disk tier."""

SHARED = Capabilities(durable=True, shared=True, bounded=False, preferred_concurrency=4)
"""Capabilities of a store that other processes use too."""


TIMED_OUT = Outcome(OutcomeKind.TIMED_OUT)
OPS_MAX = 1_000_000
"""Operations that may wait: no limit."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Duration of a call to a tier: ``latency_s``, and ``chunk_s`` per chunk. threads: calls at a time."""

    latency_s: float = 0.0002
    chunk_s: float = 0.001
    threads: int = CAPABILITIES.preferred_concurrency

    def call_s(self, chunks: int) -> float:
        """Seconds of a call with this number of chunks."""
        return self.latency_s + chunks * self.chunk_s


def local_tiers(payload_bytes: int, stored: Sequence[Sequence[Key]]) -> list[LowerTier]:
    """Tables of local tiers without a bound, one for each of ``stored``: the chunks that it has."""
    size, directory = frame_bytes(payload_bytes), KeyDirectory()
    limits = LowerTierLimits(capacity_bytes=None, write=WritePolicy.THROUGH, queue_chunks_max=1024)
    tiers = []
    for index, keys in enumerate(stored):
        policy = open_policy("lru", max(1, len(keys)))
        tier = LowerTier(index, f"tier-{index}", CAPABILITIES, limits, policy, directory)
        tier.load_index(TierContent(keys, array("Q", [size]) * len(keys)))
        tiers.append(tier)
    return tiers


def shared_tier(index: int) -> LowerTier:
    """Table of a tier that other processes use too, such as an object store: existence is probed."""
    limits = LowerTierLimits(capacity_bytes=None, write=WritePolicy.THROUGH, queue_chunks_max=1024)
    return LowerTier(index, f"tier-{index}", SHARED, limits, open_policy("lru", 1))


@dataclass(slots=True)
class _Lane:
    """Operations of one tier: those that wait, in dispatch's order, and the times at which threads are free."""

    pace: Pace
    free_at_s: list[float]
    waiting: TicketQueue = field(default_factory=partial(TicketQueue, OPS_MAX))
    later: tuple[float, Pace] | None = None
    """Time from which calls begin at another pace."""

    def pace_at(self, time_s: float) -> Pace:
        """Pace of a call that begins then."""
        return self.pace if self.later is None or time_s < self.later[0] else self.later[1]


class SimulatedTiers:
    """Dispatch on simulated time: each operation completes in its own time, on the first free thread of its tier.

    A call that takes longer than its deadline is reported as late, and runs on.

    Args:
        paces: of the tiers, by number.
        payload_bytes: of a chunk.
    """

    def __init__(self, paces: Sequence[Pace], payload_bytes: int) -> None:
        self._lanes = [_Lane(pace, [0.0] * pace.threads) for pace in paces]
        self._frame_bytes = frame_bytes(payload_bytes)
        self._done: list[tuple[float, int, Completion]] = []
        self.chunks_read = 0

    def change_pace(self, tier: int, time_s: float, pace: Pace) -> None:
        """Have calls to a tier that begin at a time, or later, take this pace."""
        self._lanes[tier].later = (time_s, pace)

    def submit(self, op: TierOp, now_s: float) -> None:
        """Queue an operation."""
        self._lanes[op.tier].waiting.put(Ticket(op, now_s))

    def advance(self, now_s: float) -> None:
        """Perform operations until now."""
        for lane in self._lanes:
            self._advance(lane, now_s)

    def drain(self, now_s: float, keys_max: int) -> list[Completion]:
        """Return operations that have ended until now, of ``keys_max`` keys together, or at least one."""
        completions: list[Completion] = []
        while self._done and self._done[0][0] <= now_s and keys_max > 0:
            num_keys = self._done[0][2].num_keys
            if completions and num_keys > keys_max:
                break
            completions.append(heapq.heappop(self._done)[2])
            keys_max -= num_keys
        return completions

    def next_s(self) -> float | None:
        """Time at which the next operation ends, if one is under way."""
        return self._done[0][0] if self._done else None

    def _advance(self, lane: _Lane, now_s: float) -> None:
        """Begin the operations whose thread was free before ``now_s``."""
        while lane.free_at_s[0] <= now_s and (ticket := lane.waiting.take()) is not None:
            op = ticket.op
            if ticket.drop_unwanted(now_s):
                outcomes = (UNWANTED,) * len(op.keys)
                heapq.heappush(self._done, (now_s, op.op_id, Completion(op.op_id, outcomes)))
                continue
            begins_s = max(ticket.submitted_s, heapq.heappop(lane.free_at_s))
            ends_s = begins_s + lane.pace_at(begins_s).call_s(len(op.keys))
            heapq.heappush(lane.free_at_s, ends_s)
            late_s, waited_s = begins_s + op.timeout_s, begins_s - ticket.submitted_s
            if late_s < ends_s:
                outcomes = (TIMED_OUT,) * len(op.keys)
                late = Completion(op.op_id, outcomes, False, late_s - ticket.submitted_s, waited_s)  # noqa: FBT003
                heapq.heappush(self._done, (late_s, op.op_id, late))
            heapq.heappush(self._done, (ends_s, op.op_id, self._completion(op, ends_s - ticket.submitted_s, waited_s)))

    def _completion(self, op: TierOp, elapsed_s: float, queued_s: float) -> Completion:
        moves = op.verb in {Verb.READ, Verb.WRITE}
        self.chunks_read += len(op.keys) if op.verb is Verb.READ else 0
        outcome = Outcome(OutcomeKind.OK, self._frame_bytes if moves else 0)
        return Completion(op.op_id, (outcome,) * len(op.keys), elapsed_s=elapsed_s, queued_s=queued_s)
