"""Cache events with payloads: the tokens of a chunk, described even after its request has ended.

A raw event knows keys. Tokens, parent and adapter are known to the request, which may end before the event is read. So
a *snapshot* is taken when a store is granted. It describes each stored event of the chunk, in every tier, and is
dropped with the last of them.

Two prompts that diverge inside a chunk have two chunks with the same first hash blocks. These are removed with the last
of the chunks, so that a consumer with a plain set of blocks has exactly the present ones.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tierkv.errors import EngineProtocolError
from tierkv.manager.step_budget import BudgetShare
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.store.candidates import Candidate
from tierkv.types.block_events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.engine import GroupKind, Request
from tierkv.types.geometry import Geometry, GroupGeometry, cdiv
from tierkv.types.keys import Key, split_key

SNAPSHOTS_MAX = 100_000
"""Chunks whose payload is remembered; the oldest is dropped first.

About 5 KiB each for chunks of 256 tokens.
"""


FORGOTTEN_PER_KEY = 8
"""Shared blocks that are forgotten in one batch for the cost of one key operation."""


@dataclass(slots=True, eq=False)
class Medium:
    """Content of one tier, from its first event to the event that it was emptied."""

    sharing: dict[int, dict[bytes, int]] = field(default_factory=dict)
    """By group: in how many chunks each hash block is, beside those that end with it."""
    cleared: bool = False
    """Whether an event reported that the tier was emptied."""


@dataclass(slots=True)
class Snapshot:
    """Payload of one chunk.

    Tokens are kept as machine words: Python integers would take ten times as much memory.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    tokens: array[int]
    lora_id: int | None
    lora_name: str | None
    group: GroupGeometry
    storing: int = 0
    """Number of stores of the chunk in flight."""
    media: set[Medium] = field(default_factory=set)
    """Tiers that hold the chunk, as reported by events; cleared ones until the chunk is looked at again."""

    @property
    def is_needed(self) -> bool:
        """Whether a tier holds the chunk, or a store of it is in flight."""
        return self.storing > 0 or any(not medium.cleared for medium in self.media)

    def stored(self, medium: str) -> BlockStored:
        """Event that the chunk is readable in ``medium``."""
        return BlockStored(
            block_hashes=self.block_hashes,
            parent_block_hash=self.parent_block_hash,
            token_ids=tuple(self.tokens),
            block_size=self.group.chunk_tokens // self.group.hashes_per_chunk,
            lora_id=self.lora_id,
            lora_name=self.lora_name,
            extra_keys=None,
            group_idx=self.group.index,
            kind=self.group.kind.value,
            window=None,  # only chunks of full attention have snapshots
            medium=medium,
        )


def take_snapshot(request: Request, group: GroupGeometry, index: int) -> Snapshot:
    """Payload of chunk ``index`` of a request in a group.

    Raises:
        EngineProtocolError: the request has no tokens, or fewer tokens or hashes than the chunk; a truncated payload
            would be wrong (S102).
    """
    tokens = getattr(request, "all_token_ids", None)
    if tokens is None:
        raise EngineProtocolError(
            f"request {request.request_id!r} has no all_token_ids, so events cannot describe its chunks; add what "
            "tierkv.types.engine.TokenizedRequest asks for, or set events.self_describing = false"
        )
    first = index * group.hashes_per_chunk
    hashes = tuple(request.block_hashes[first : first + group.hashes_per_chunk])
    start = index * group.chunk_tokens
    words = array("q", tokens[start : start + group.chunk_tokens])
    if len(hashes) != group.hashes_per_chunk or len(words) != group.chunk_tokens:
        raise EngineProtocolError(
            f"request {request.request_id!r} has {len(hashes)} of {group.hashes_per_chunk} hashes and {len(words)} of "
            f"{group.chunk_tokens} tokens of chunk {index}: block_hashes and all_token_ids must reach its end when its "
            "blocks are computed"
        )
    return Snapshot(
        block_hashes=hashes,
        parent_block_hash=request.block_hashes[first - 1] if index else None,
        tokens=words,
        lora_id=getattr(request, "lora_id", None),
        lora_name=getattr(request, "lora_name", None),
        group=group,
    )


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
                except (EngineProtocolError, OverflowError, TypeError) as error:
                    # A fault of the engine costs a payload, never a step (promise 3).
                    self._warn_once("payload", f"events of some chunks are placeholders: {error}")
                    continue
                self._make_room()
                self._snapshots[candidate.key] = snapshot
            snapshot.storing += 1
            self._snapshots.move_to_end(candidate.key)

    def _make_room(self) -> None:
        while len(self._snapshots) >= self._snapshots_max:
            _, snapshot = self._snapshots.popitem(last=False)
            for medium in snapshot.media:
                if not medium.cleared:
                    self._unshared(snapshot, medium)
            self._counters.payloads_forgotten += 1

    def on_store_ended(self, keys: Iterable[Key]) -> None:
        """Note that a store of these chunks has ended; its event is described before ``finish_ended_stores``."""
        if self.active:
            self._ended.extend(keys)

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
                    described.append(AllBlocksCleared(event.tier))
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
            medium = self._media[name] = Medium()
        return medium

    def _stored(self, key: Key, name: str) -> BlockStored:
        snapshot = self._snapshots.get(key)
        if snapshot is not None:
            medium = self._medium(name)
            if medium not in snapshot.media:
                snapshot.media.add(medium)
                sharing = medium.sharing.setdefault(snapshot.group.index, {})
                for block_hash in snapshot.block_hashes[:-1]:  # the last one is the chunk's own
                    sharing[block_hash] = sharing.get(block_hash, 0) + 1
            return snapshot.stored(name)
        self._warn_undescribed(CacheEventKind.STORED)
        chunk_hash, group = split_key(key)
        return BlockStored((chunk_hash,), None, (), 0, None, None, None, group, None, None, name)

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
                self._forget_unneeded(key, snapshot)
            else:
                self._warn_undescribed(CacheEventKind.REMOVED)
            by_group.setdefault(group, []).extend(hashes)
        return (BlockRemoved(tuple(hashes), group, name) for group, hashes in by_group.items())

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
