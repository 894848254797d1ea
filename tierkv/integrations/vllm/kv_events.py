"""Translation of tierkv's events into vLLM's, so that a router of vLLM's events also gets those of every tier.

The host tier has vLLM's medium ``CPU``. Every lower tier has ``STORAGE``, its name as ``ownership``, and a ``locality``
that states whether other processes can reach it.

With the connector, :class:`KVEvents` builds the events that vLLM publishes. With the spec, vLLM's own tracker builds
them from chunk keys, which :class:`OffloadingEvents` provides.
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
from tierkv.config.schema import StackConfig
from tierkv.types import block_events as ours
from tierkv.types.cache_events import HOST, CacheEvent, CacheEventKind
from tierkv.types.geometry import Geometry
from tierkv.types.keys import split_key

ANNOUNCED_MAX = 20_000
"""Largest number of blocks (spec: chunks) remembered as announced, over all tiers. All may be revoked in one step."""

_T = TypeVar("_T", bound=Hashable)


def with_events(config: StackConfig, *, enabled: bool) -> StackConfig:
    """Return the stack's configuration, without events where vLLM publishes none (``kv_events_config``)."""
    if enabled or not config.events.enabled:
        return config
    return config.model_copy(update={"events": config.events.model_copy(update={"enabled": False})})


def localities(stack: ResolvedStack) -> dict[str, str]:
    """Locality by name of a lower tier: ``REMOTE`` where other processes may add chunks, otherwise ``LOCAL``."""
    shared = {tier.config.name: tier.backend.capabilities.shared for tier in stack.tiers}
    return {name: (Locality.REMOTE if far else Locality.LOCAL).value for name, far in shared.items()}


class Announced(Generic[_T]):
    """Items announced per tier and not revoked. Bounded: items beyond the bound are not remembered."""

    def __init__(self, items_max: int = ANNOUNCED_MAX) -> None:
        self._room = items_max
        self._items: dict[str, set[_T]] = {}
        self._incomplete: set[str] = set()

    def add(self, tier: str, items: Iterable[_T]) -> None:
        """Remember announced items."""
        held = self._items.setdefault(tier, set())
        for item in items:
            if item not in held:
                if self._room:
                    held.add(item)
                    self._room -= 1
                else:
                    self._incomplete.add(tier)

    def discard(self, tier: str, items: Iterable[_T]) -> None:
        """Forget revoked items."""
        held = self._items.get(tier, set())
        before = len(held)
        held.difference_update(items)
        self._room += before - len(held)

    def has(self, tier: str, item: _T) -> bool:
        """Whether an item is remembered as announced."""
        return item in self._items.get(tier, ())

    def clear(self, tier: str) -> tuple[set[_T], bool]:
        """Forget a tier. Return its remembered items, and whether these are all announced ones."""
        held, complete = self._items.pop(tier, set()), tier not in self._incomplete
        self._incomplete.discard(tier)
        self._room += len(held)
        return held, complete


class KVEvents:
    """Translation of described events for the connector. Engine's thread.

    Args:
        geometry: geometry of the stack.
        kv_cache_config: vLLM's configuration of the same engine, with the attention of its groups.
        localities: result of :func:`localities`; a tier without an entry has none.
        announced_max: largest number of remembered blocks.
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
        """Translate the result of ``Stack.events.take_block_events``, in the same order."""
        for event in events:
            match event:
                case ours.BlockStored():
                    yield self._stored(event)
                case ours.BlockRemoved():
                    self._announced.discard(event.tier, ((event.group_idx, one) for one in event.block_hashes))
                    yield self._removed(event.tier, event.group_idx, event.block_hashes)
                case ours.AllBlocksCleared():
                    yield from self._cleared(event.tier)

    def _stored(self, event: ours.BlockStored) -> BlockStored:
        hashes, block_size = event.block_hashes, event.block_size
        if block_size:  # vLLM's events have blocks of the group; the hash of a block is that of its last hash block
            scale = self._scales[event.group_idx]
            hashes, block_size = hashes[scale - 1 :: scale], block_size * scale
        self._announced.add(event.tier, ((event.group_idx, one) for one in hashes))
        kind, window = self._groups[event.group_idx]
        parent = event.parent_block_hash
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(one) for one in hashes],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(event.token_ids),
            block_size=block_size,
            lora_id=event.lora_id,
            lora_name=event.lora_name,
            extra_keys=None if event.extra_keys is None else list(event.extra_keys),
            group_idx=event.group_idx,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            **self._medium_of(event.tier),
        )

    def _removed(self, tier: str, group: int, hashes: Iterable[bytes]) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(one) for one in hashes], group_idx=group, **self._medium_of(tier)
        )

    def _cleared(self, tier: str) -> Iterator[KVCacheEvent]:
        """Revoke the events of a tier that was emptied.

        vLLM's ``AllBlocksCleared`` names no medium: a consumer then also forgets the GPU and all other tiers. So
        announced blocks are revoked one by one. Where not all of them are remembered, the general event follows,
        because a consumer may know too little, but not too much. It does not suffice alone: a router may regard blocks
        with an ``ownership`` as those of a pool that outlives the engine.
        """
        held, complete = self._announced.clear(tier)
        by_group: dict[int, list[bytes]] = {}
        for group, block_hash in held:
            by_group.setdefault(group, []).append(block_hash)
        for group, hashes in sorted(by_group.items()):
            yield self._removed(tier, group, hashes)
        if not complete:
            yield AllBlocksCleared()

    def _medium_of(self, tier: str) -> dict[str, str | None]:
        if tier == HOST:
            return {"medium": MEDIUM_CPU}
        return {"medium": MEDIUM_STORAGE, "ownership": tier, "locality": self._localities.get(tier)}


class OffloadingEvents:
    """Translation of cache events for vLLM's tracker of offloading events. Engine's thread.

    The tracker keeps the tokens of a chunk until every tier that promised a removal event has sent it. That memory is
    unbounded. So a lower tier makes the promise for up to ``announced_max`` chunks only. The removal of other chunks is
    reported with the chunk's own hash, without those of the blocks before it.

    Args:
        localities: result of :func:`localities`.
        announced_max: largest number of chunks with such a promise, or remembered of the host tier.
    """

    def __init__(self, localities: Mapping[str, str] | None = None, announced_max: int = ANNOUNCED_MAX) -> None:
        self._localities = localities or {}
        self._announced: Announced[bytes] = Announced(announced_max)

    def translate(self, events: Iterable[CacheEvent]) -> Iterator[OffloadingEvent]:
        """Translate the result of ``Stack.events.take`` for ``OffloadingManager.take_events``."""
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
        promised = [key for key in keys if self._announced.has(tier, key)]
        if promised:
            yield self._event(tier, promised, removed=False, removal_expected=tier != HOST)
        if len(promised) < len(keys):
            kept = set(promised)
            yield self._event(tier, [key for key in keys if key not in kept], removed=False)

    def _event(self, tier: str, keys: Iterable[bytes], *, removed: bool, **more: bool) -> OffloadingEvent:
        is_host = tier == HOST
        locality = self._localities.get(tier)
        return OffloadingEvent(
            keys=[make_offload_key(*split_key(key)) for key in keys],
            medium=Medium.CPU if is_host else Medium.STORAGE,
            removed=removed,
            locality=None if is_host or locality is None else Locality(locality),
            ownership=None if is_host else tier,
            **more,
        )
