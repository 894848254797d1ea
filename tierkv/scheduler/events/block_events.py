"""Cache events with payloads: the tokens of a chunk, described even after its request has ended.

A raw event knows keys. Tokens, parent and adapter are known to the request, which may end before the event is read. So
a *snapshot* is taken when a store is granted. It describes each stored event of the chunk, in every tier, and is
dropped with the last of them.

Two prompts that diverge inside a chunk have two chunks with the same first hash blocks. These are removed with the last
of the chunks, so that a consumer with a plain set of blocks has exactly the present ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from tierkv.errors import EngineProtocolError
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.step_budget import BudgetShare
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.keeping import NoKeeper, TokenKeeper
from tierkv.scheduler.events.snapshots import Medium, Snapshot, take_snapshot
from tierkv.scheduler.store.candidates import Candidate
from tierkv.types.block_events import (
    MEDIUM_HOST,
    MEDIUM_LOCAL,
    MEDIUM_SHARED,
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
)
from tierkv.types.cache_events import HOST, CacheEvent, CacheEventKind
from tierkv.types.engine import GroupKind, Request
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.keys import Key, split_key

SNAPSHOTS_MAX = 100_000
"""Chunks whose payload is remembered; the oldest is dropped first.

About 5 KiB each for chunks of 256 tokens.
"""


FORGOTTEN_PER_KEY = 8
"""Shared blocks that are forgotten in one batch for the cost of one key operation."""


class BlockEvents:
    """Takes snapshots, and describes events by them. Sans-IO, single-threaded; O(1) per key.

    Args:
        geometry: sizes of groups and chunks.
        counters: for metrics.
        warn: called once per kind of event that cannot be described.
        active: whether events are wanted with payloads. Otherwise nothing is kept and every event is a placeholder
            (S96).
        snapshots_max: largest number of snapshots.
    """

    def __init__(
        self,
        geometry: Geometry,
        counters: CoreCounters,
        warn: Callable[[str], None],
        *,
        active: bool,
        snapshots_max: int = SNAPSHOTS_MAX,
    ) -> None:
        self.active = active
        self.keeper: TokenKeeper = NoKeeper()
        """Keeps snapshots of chunks in tiers that list their content, for the next process. Set before the first
        event."""
        self.tiers: TierList | None = None
        """Lower tiers whose names events have. Set once, before the first event; None: all are local."""
        self.has_cleared = False
        """Whether :meth:`forget_some` has something to do."""
        self._geometry = geometry
        self._counters = counters
        self._warn = warn
        self._snapshots_max = snapshots_max
        self._snapshots: OrderedDict[Key, Snapshot] = OrderedDict()
        self._ended: list[Key] = []
        self._media: dict[str, Medium] = {}
        self._unchecked = 0  # the oldest snapshots, which may be of chunks that no tier holds since an event CLEARED
        self._old_sharing: list[dict[bytes, int]] = []  # of cleared tiers
        self._warned: set[str] = set()

    def __len__(self) -> int:
        """Number of snapshots."""
        return len(self._snapshots)

    def keys(self) -> Iterable[Key]:
        """Chunks with a snapshot, the oldest first."""
        return self._snapshots.keys()

    # -- stores --------------------------------------------------------------------------------------------------------

    def on_store_granted(self, request: Request, candidates: Iterable[Candidate]) -> None:
        """Take snapshots of these chunks of a request, which are about to be stored."""
        if not self.active:
            return
        for candidate in candidates:
            group = self._geometry.groups[candidate.group]
            if group.kind is not GroupKind.FULL_ATTENTION:
                continue
            snapshot = self._snapshots.get(candidate.key)
            if snapshot is None:
                try:
                    snapshot = take_snapshot(request, group, candidate.number)
                except (
                    EngineProtocolError,
                    ArithmeticError,
                    AttributeError,
                    LookupError,
                    TypeError,
                    ValueError,
                ) as error:
                    # A fault of the engine costs a payload, never a step (promise 3).
                    self._warn_once("payload", f"events of some chunks are placeholders: {error}")
                    continue
                self._make_room()
                self._snapshots[candidate.key] = snapshot
            snapshot.storing += 1
            self._snapshots.move_to_end(candidate.key)

    def _make_room(self) -> None:
        while len(self._snapshots) >= self._snapshots_max:
            key, snapshot = self._snapshots.popitem(last=False)
            self._forget_kept(key, snapshot)
            for medium in snapshot.media:
                if not medium.cleared:
                    self._unshared(snapshot, medium)
            self._counters.payloads_forgotten += 1

    def on_store_ended(self, keys: Iterable[Key]) -> None:
        """Note that a store of these chunks has ended; its event is described before ``finish_ended_stores``."""
        if self.active:
            self._ended.extend(keys)

    # -- an earlier process ------------------------------------------------------------------------------------------

    def restore(self, snapshots: Mapping[Key, Snapshot]) -> None:
        """Add snapshots that an earlier process took, as the oldest ones. Called once, before the first store."""
        self._snapshots.update(snapshots)

    def is_reported(self, key: Key, name: str) -> bool:
        """Whether an event has reported a chunk with a snapshot in a tier."""
        snapshot, medium = self._snapshots.get(key), self._media.get(name)
        return snapshot is not None and medium in snapshot.media

    # -- events ------------------------------------------------------------------------------------------------------

    def describe(self, events: Iterable[CacheEvent]) -> list[BlockEvent]:
        """Events with payloads: one per stored chunk, one per group of a removal."""
        described: list[BlockEvent] = []
        for event in events:
            match event.kind:
                case CacheEventKind.STORED:
                    described += [self._stored(key, event.tier) for key in event.keys]
                case CacheEventKind.REMOVED:
                    described += self._removed(event.keys, event.tier)
                case CacheEventKind.CLEARED:
                    self._cleared(event.tier)
                    described.append(self.cleared_event(event.tier))
        return described

    def finish_ended_stores(self) -> None:
        """Drop snapshots of ended stores without a tier. All events before these ends were described."""
        for key in self._ended:
            snapshot = self._snapshots.get(key)
            if snapshot is not None:
                snapshot.storing = max(0, snapshot.storing - 1)
                self._forget_unneeded(key, snapshot)
        self._ended.clear()

    def forget_some(self, share: BudgetShare) -> None:
        """Forget snapshots that events CLEARED left without a tier, as many as a part of the step's budget allows."""
        if self._unchecked:
            count = share.take(self._unchecked)
            for key in list(islice(self._snapshots, count)):
                snapshot = self._snapshots[key]
                self._snapshots.move_to_end(key)
                snapshot.media = {medium for medium in snapshot.media if not medium.cleared}
                self._forget_unneeded(key, snapshot)
            self._unchecked -= count
        if self._old_sharing:
            sharing = self._old_sharing[-1]
            for _ in range(min(len(sharing), FORGOTTEN_PER_KEY * share.take(cdiv(len(sharing), FORGOTTEN_PER_KEY)))):
                sharing.popitem()
            if not sharing:
                self._old_sharing.pop()
        self.has_cleared = bool(self._unchecked or self._old_sharing)

    def _medium(self, name: str) -> Medium:
        medium = self._media.get(name)
        if medium is None:
            medium = self._media[name] = self._new_medium(name)
        return medium

    def _new_medium(self, name: str) -> Medium:
        if name == HOST:
            return Medium(name, MEDIUM_HOST)
        tier = None if self.tiers is None else self.tiers.get(name)
        if tier is None:  # unknown, or detached meanwhile
            return Medium(name, MEDIUM_LOCAL)
        can = tier.capabilities
        return Medium(name, MEDIUM_SHARED if can.shared else MEDIUM_LOCAL, can.authoritative_index)

    def _stored(self, key: Key, name: str) -> BlockStored:
        snapshot, medium = self._snapshots.get(key), self._medium(name)
        if snapshot is not None:
            if medium.is_listed:
                snapshot.is_restored = False
                if self.keeper.is_kept and not snapshot.is_kept:
                    self.keeper.keep(key, snapshot)
                    snapshot.is_kept = True
            if medium not in snapshot.media:
                snapshot.media.add(medium)
                sharing = medium.sharing.setdefault(snapshot.group.index, {})
                for block_hash in snapshot.block_hashes[:-1]:  # the last one is the chunk's own
                    sharing[block_hash] = sharing.get(block_hash, 0) + 1
            return snapshot.stored(medium)
        self._warn_undescribed(CacheEventKind.STORED)
        chunk_hash, group = split_key(key)
        return BlockStored((chunk_hash,), None, (), 0, None, None, None, group, None, None, medium.kind, name)

    def _removed(self, keys: Sequence[Key], name: str) -> Iterator[BlockRemoved]:
        """One event per group, in the order of first occurrence (S99)."""
        by_group: dict[int, list[bytes]] = {}
        medium = self._medium(name)
        for key in keys:
            chunk_hash, group = split_key(key)
            snapshot = self._snapshots.get(key)
            hashes: Sequence[bytes] = (chunk_hash,)
            if snapshot is not None:
                hashes = (*self._unshared(snapshot, medium), chunk_hash)
                snapshot.media.discard(medium)
                snapshot.is_restored = snapshot.is_restored and not medium.is_listed
                self._forget_unneeded(key, snapshot)
            else:
                self._warn_undescribed(CacheEventKind.REMOVED)
            by_group.setdefault(group, []).extend(hashes)
        return (BlockRemoved(tuple(hashes), group, medium.kind, name) for group, hashes in by_group.items())

    def _unshared(self, snapshot: Snapshot, medium: Medium) -> list[bytes]:
        """Hashes, except the last, that no other chunk in ``medium`` has; the chunk was removed from it."""
        sharing = medium.sharing.get(snapshot.group.index, {})
        alone = []
        for block_hash in snapshot.block_hashes[:-1]:
            count = sharing.get(block_hash, 0) - (medium in snapshot.media)
            if count > 0:
                sharing[block_hash] = count
            else:
                sharing.pop(block_hash, None)
                alone.append(block_hash)
        return alone

    def cleared_event(self, name: str) -> AllBlocksCleared:
        """Event that a tier was emptied, or that a consumer must regard it as empty."""
        return AllBlocksCleared(self._medium(name).kind, name)

    def _cleared(self, name: str) -> None:
        """Note that a tier was emptied, at one cost however much it held; :meth:`forget_some` does the rest."""
        medium = self._media.pop(name, None)
        if medium is not None:
            medium.cleared = True
            self._old_sharing += medium.sharing.values()
            self._unchecked = len(self._snapshots)
            self.has_cleared = True

    def _forget_unneeded(self, key: Key, snapshot: Snapshot) -> None:
        """Drop the snapshot if it is not needed any more."""
        if not snapshot.is_needed:
            del self._snapshots[key]
            self._forget_kept(key, snapshot)

    def _forget_kept(self, key: Key, snapshot: Snapshot) -> None:
        if snapshot.is_kept and self.keeper.is_kept:
            self.keeper.forget(key)

    def _warn_undescribed(self, kind: CacheEventKind) -> None:
        if self.active:
            self._counters.events_undescribed += 1
            self._warn_once(
                kind.value,
                f"a chunk was {kind.value} whose request was not seen by this process, or whose group is not of full "
                "attention: its event names its own hash only (logged once)",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(message)
