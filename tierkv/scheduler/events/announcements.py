"""Announcements: events for chunks that tiers have held since an earlier process, a few in each step.

A disk lists its chunks when a stack opens, and no event reports them: a consumer would learn of each one only when it
is read. Where their snapshots were kept, they are announced, the first chunk of a prompt before the next one, because
a consumer may know a chunk's place only by its parent. A tier that joins later is announced when it joins.

The first announcement waits for ``CONNECT_WAIT_S``: a publisher drops what it sends before a subscriber of the previous
process has connected again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.step_state import StepState
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.keys import Key

CONNECT_WAIT_S = 2.0
"""Seconds from the first step to the first announcement. ZeroMQ connects again every 0.1 s."""

ANNOUNCED_PER_STEP = 64
"""Chunks looked at in one step: described with 256 tokens each, they take less than a millisecond."""


class Announcements:
    """Chunks that are still to be announced. Sans-IO, single-threaded; a bounded number of keys per step.

    Args:
        block_events: describes events; knows the snapshots, and what was reported.
        tiers: tiers in service.
        step: has the time of the step.
    """

    def __init__(self, block_events: BlockEvents, tiers: TierList, step: StepState) -> None:
        self._block_events = block_events
        self._tiers = tiers
        self._step = step
        self._begin_s: float | None = None
        self._waiting: deque[Key] = deque()
        self._names: tuple[str, ...] = ()
        self._is_active = False

    @property
    def is_pending(self) -> bool:
        """Whether chunks are still to be looked at."""
        return bool(self._waiting)

    def begin(self, snapshots: Mapping[Key, Snapshot]) -> None:
        """Announce the chunks of restored snapshots in the coming steps."""
        self._is_active = True
        self._names = self._names_in_service()
        self._waiting.extend(parents_first(snapshots))

    def next_events(self) -> list[CacheEvent]:
        """Events of this step, one per tier. To be called when all events of the step have been described."""
        if not self._is_active:
            return []
        if self._begin_s is None:
            self._begin_s = self._step.now + CONNECT_WAIT_S
        if self._step.now < self._begin_s:
            return []
        names = self._names_in_service()
        if names != self._names:
            if not set(names) <= set(self._names):  # a tier has joined: it may hold any of the chunks
                self._waiting = deque(self._block_events.keys())
            self._names = names
        found: dict[str, list[Key]] = {}
        for _ in range(min(ANNOUNCED_PER_STEP, len(self._waiting))):
            key = self._waiting.popleft()
            for tier in self._tiers.in_service:
                if not (tier.capabilities.authoritative_index and tier.emits_events):
                    continue
                if tier.residency.rows.is_at_rest(key) and not self._block_events.is_reported(key, tier.name):
                    found.setdefault(tier.name, []).append(key)
        return [CacheEvent(CacheEventKind.STORED, name, tuple(keys)) for name, keys in found.items()]

    def _names_in_service(self) -> tuple[str, ...]:
        return tuple([tier.name for tier in self._tiers.in_service])


def parents_first(snapshots: Mapping[Key, Snapshot]) -> Iterable[Key]:
    """Keys in an order in which each chunk follows the one before it in its prompt, where that one is among them."""
    by_end = {(snapshot.group.index, snapshot.block_hashes[-1]): key for key, snapshot in snapshots.items()}
    ordered: dict[Key, None] = {}
    for key in snapshots:
        chain: list[Key] = []
        at: Key | None = key
        while at is not None and at not in ordered:
            chain.append(at)
            snapshot = snapshots[at]
            parent = snapshot.parent_block_hash
            at = None if parent is None else by_end.get((snapshot.group.index, parent))
            if len(chain) > len(snapshots):  # damaged: chunks that are parents of each other
                break
        ordered.update(dict.fromkeys(reversed(chain)))
    return ordered
