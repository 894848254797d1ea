"""Snapshots: everything that an event reports about a chunk, also after its request has ended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.types.block_events import BlockStored
from tierkv.types.engine import Request
from tierkv.types.geometry import GroupGeometry


@dataclass(slots=True, eq=False)
class Medium:
    """Content of one tier, from its first event to the event that it was emptied."""

    tier: str
    """Name of the tier."""
    kind: str
    """Its medium in the words of routers (:mod:`tierkv.types.block_events`)."""
    is_listed: bool = False
    """Whether the tier lists its chunks when it is opened again, so that their snapshots are worth keeping."""
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
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    storing: int = 0
    """Number of stores of the chunk in flight."""
    media: set[Medium] = field(default_factory=set)
    """Tiers that hold the chunk, as reported by events; cleared ones until the chunk is looked at again."""
    is_kept: bool = False
    """Whether the file of kept tokens has it."""
    is_restored: bool = False
    """Whether it is of an earlier process, and no event of a tier that lists its content has named the chunk yet."""

    @property
    def is_needed(self) -> bool:
        """Whether a tier holds the chunk, or a store of it is in flight."""
        return self.storing > 0 or self.is_restored or any(not medium.cleared for medium in self.media)

    def stored(self, medium: Medium) -> BlockStored:
        """Event that the chunk is readable in a tier."""
        return BlockStored(
            block_hashes=self.block_hashes,
            parent_block_hash=self.parent_block_hash,
            token_ids=tuple(self.tokens),
            block_size=self.group.chunk_tokens // self.group.hashes_per_chunk,
            lora_id=self.lora_id,
            lora_name=self.lora_name,
            extra_keys=self.extra_keys,
            group_idx=self.group.index,
            kind=self.group.kind.value,
            window=None,  # only chunks of full attention have snapshots
            medium=medium.kind,
            tier=medium.tier,
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
            f"request {request.request_id!r} has no all_token_ids, so events cannot describe its chunks; add it "
            "(tierkv.types.engine.FullRequest), or set events.self_describing = false"
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
        extra_keys=_extra_keys(request, group, start),
    )


def _extra_keys(request: Request, group: GroupGeometry, start: int) -> tuple[tuple[Any, ...] | None, ...] | None:
    """Values in the hash of each block of a chunk beside its tokens; None: nothing, or the engine does not say it."""
    ask = getattr(request, "extra_keys", None)
    if ask is None:
        return None
    blocks = range(start, start + group.chunk_tokens, group.block_tokens)
    found = tuple([ask(first, first + group.block_tokens) for first in blocks])
    return None if found.count(None) == len(found) else found
