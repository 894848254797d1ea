"""Our events as vLLM's, so that a router that listens to vLLM hears of every tier.

The host tier has vLLM's medium ``CPU``; every lower tier has ``STORAGE``, its own name as ``ownership``, and as
``locality`` whether others can reach it.

With the connector (seam B), :class:`KVEvents` makes what vLLM publishes. With the spec (seam A), vLLM's own tracker
makes that from chunk keys, and :class:`OffloadingEvents` gives it those.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, make_offload_key

from tierkv.config.resolving import ResolvedStack
from tierkv.config.schema import HOST_TIER, StackConfig
from tierkv.types import block_events as ours
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.geometry import Geometry
from tierkv.types.keys import split_key

ANNOUNCED_MAX = 20_000
"""Blocks (seam A: chunks) remembered as announced, over all tiers: so many can be taken back in one step."""

_T = TypeVar("_T", bound=Hashable)


def with_events(config: StackConfig, *, enabled: bool) -> StackConfig:
    """The same stack, keeping no events where vLLM publishes none (``kv_events_config``)."""
    if enabled or not config.events.enabled:
        return config
    return config.model_copy(update={"events": config.events.model_copy(update={"enabled": False})})


def localities(stack: ResolvedStack) -> dict[str, str]:
    """By the name of a lower tier: ``REMOTE`` where others may have put chunks there, else ``LOCAL``."""
    shared = {tier.config.name: tier.backend.capabilities.shared for tier in stack.tiers}
    return {name: (Locality.REMOTE if far else Locality.LOCAL).value for name, far in shared.items()}


class Announced(Generic[_T]):
    """What was announced of each tier and not taken back. Bounded: what finds no room any more is not remembered."""

    def __init__(self, items_max: int = ANNOUNCED_MAX) -> None:
        self._room = items_max
        self._items: dict[str, set[_T]] = {}
        self._incomplete: set[str] = set()

    def add(self, tier: str, items: Iterable[_T]) -> None:
        """These were announced."""
        held = self._items.setdefault(tier, set())
        for item in items:
            if item not in held:
                if self._room:
                    held.add(item)
                    self._room -= 1
                else:
                    self._incomplete.add(tier)

    def discard(self, tier: str, items: Iterable[_T]) -> None:
        """These were taken back."""
        held = self._items.get(tier, set())
        before = len(held)
        held.difference_update(items)
        self._room += before - len(held)

    def holds(self, tier: str, item: _T) -> bool:
        """Whether it is remembered as announced."""
        return item in self._items.get(tier, ())

    def clear(self, tier: str) -> tuple[set[_T], bool]:
        """All that is remembered of a tier, and whether that is all that was announced; it is forgotten."""
        held, complete = self._items.pop(tier, set()), tier not in self._incomplete
        self._incomplete.discard(tier)
        self._room += len(held)
        return held, complete


class KVEvents:
    """Seam B: from what a stack describes to what vLLM publishes. Engine's thread.

    Args:
        geometry: of the stack.
        kv_cache_config: vLLM's, of the same engine: what its groups attend to, in its own words.
        localities: see :func:`localities`; a tier that is not in it has none.
        announced_max: blocks remembered.
    """

    def __init__(
        self,
        geometry: Geometry,
        kv_cache_config: Any,  # noqa: ANN401 - vLLM's, which has no types here
        localities: Mapping[str, str] | None = None,
        announced_max: int = ANNOUNCED_MAX,
    ) -> None:
        self._groups = [
            (get_kv_cache_spec_kind(group.kv_cache_spec).value, get_kv_cache_spec_sliding_window(group.kv_cache_spec))
            for group in kv_cache_config.kv_cache_groups
        ]
        self._scales = [group.block_tokens // geometry.hash_block_tokens for group in geometry.groups]
        self._localities = localities or {}
        self._announced: Announced[tuple[int, bytes]] = Announced(announced_max)

    def translate(self, events: Iterable[ours.BlockEvent]) -> Iterator[KVCacheEvent]:
        """What ``Stack.events.take_block_events`` gave, in vLLM's words and in the same order."""
        for event in events:
            match event:
                case ours.BlockStored():
                    yield self._stored(event)
                case ours.BlockRemoved():
                    self._announced.discard(event.medium, ((event.group_idx, one) for one in event.block_hashes))
                    yield self._removed(event.medium, event.group_idx, event.block_hashes)
                case ours.AllBlocksCleared():
                    yield from self._cleared(event.medium)

    def _stored(self, event: ours.BlockStored) -> BlockStored:
        hashes, block_size = event.block_hashes, event.block_size
        if block_size:  # vLLM's events are about blocks of the group; a block's hash is that of its last hash block
            scale = self._scales[event.group_idx]
            hashes, block_size = hashes[scale - 1 :: scale], block_size * scale
        self._announced.add(event.medium, ((event.group_idx, one) for one in hashes))
        kind, window = self._groups[event.group_idx]
        parent = event.parent_block_hash
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(one) for one in hashes],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(event.token_ids),
            block_size=block_size,
            lora_id=event.lora_id,
            lora_name=event.lora_name,
            group_idx=event.group_idx,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            **self._place(event.medium),
        )

    def _removed(self, tier: str, group: int, hashes: Iterable[bytes]) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(one) for one in hashes], group_idx=group, **self._place(tier)
        )

    def _cleared(self, tier: str) -> Iterator[KVCacheEvent]:
        """VLLM's ``AllBlocksCleared`` names no medium: who hears it forgets the GPU and every other tier as well.

        So everything that was announced is taken back one by one, where all of it is remembered; where it is not, the
        listener had better know too little than too much.
        """
        held, complete = self._announced.clear(tier)
        if not complete:
            yield AllBlocksCleared()
            return
        by_group: dict[int, list[bytes]] = {}
        for group, block_hash in held:
            by_group.setdefault(group, []).append(block_hash)
        for group, hashes in sorted(by_group.items()):
            yield self._removed(tier, group, hashes)

    def _place(self, tier: str) -> dict[str, str | None]:
        if tier == HOST_TIER:
            return {"medium": MEDIUM_CPU}
        return {"medium": MEDIUM_STORAGE, "ownership": tier, "locality": self._localities.get(tier)}


class OffloadingEvents:
    """Seam A: from chunk keys that came and went to what vLLM's tracker of offloading events takes. Engine's thread.

    The tracker keeps the payload of a chunk, with all its tokens, until every tier that promised it has told that the
    chunk is gone. That memory is vLLM's and has no bound of its own; so a lower tier makes that promise for so many
    chunks only. The removal of any other is told by the chunk's own hash, without those of the blocks before it.

    Args:
        localities: see :func:`localities`.
        announced_max: chunks that have such a promise, or are remembered of the host tier.
    """

    def __init__(self, localities: Mapping[str, str] | None = None, announced_max: int = ANNOUNCED_MAX) -> None:
        self._localities = localities or {}
        self._announced: Announced[bytes] = Announced(announced_max)

    def translate(self, events: Iterable[CacheEvent]) -> Iterator[OffloadingEvent]:
        """What ``Stack.events.take`` gave, for ``OffloadingManager.take_events``."""
        for event in events:
            match event.kind:
                case CacheEventKind.STORED:
                    yield from self._stored(event.tier, event.keys)
                case CacheEventKind.REMOVED:
                    self._announced.discard(event.tier, event.keys)
                    yield self._event(event.tier, event.keys, removed=True)
                case CacheEventKind.CLEARED:
                    keys, _ = self._announced.clear(event.tier)
                    if keys:
                        yield self._event(event.tier, keys, removed=True)

    def _stored(self, tier: str, keys: Sequence[bytes]) -> Iterator[OffloadingEvent]:
        self._announced.add(tier, keys)
        promised = [key for key in keys if self._announced.holds(tier, key)]
        if promised:
            yield self._event(tier, promised, removed=False, removal_expected=tier != HOST_TIER)
        if len(promised) < len(keys):
            kept = set(promised)
            yield self._event(tier, [key for key in keys if key not in kept], removed=False)

    def _event(self, tier: str, keys: Iterable[bytes], *, removed: bool, **more: bool) -> OffloadingEvent:
        is_host = tier == HOST_TIER
        locality = self._localities.get(tier)
        return OffloadingEvent(
            keys=[make_offload_key(*split_key(key)) for key in keys],
            medium=Medium.CPU if is_host else Medium.STORAGE,
            removed=removed,
            locality=None if is_host or locality is None else Locality(locality),
            ownership=None if is_host else tier,
            **more,
        )
