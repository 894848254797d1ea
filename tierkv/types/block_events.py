"""Events that say what they are about: which blocks came or went, and the tokens they stand for.

A consumer (a router, for one) that hears them all knows which prefixes lie in which medium, without asking anybody.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """One chunk became readable in ``medium``.

    block_hashes: the hash blocks of the chunk, in order; the last one is the hash in the chunk's key.
    parent_block_hash: the hash block before the first; None at the start of a sequence, and where it is not known.
    token_ids: the tokens of the chunk, ``block_size`` per hash block.
    lora_id, lora_name: the adapter, if any. extra_keys: not used yet.
    group_idx: index of the KV cache group. kind, window: what the group attends to; window in tokens.
    medium: name of the tier; "host" for the arena.

    A *placeholder* is all that can be said of a chunk whose request was not seen: its own hash and its group, with no
    tokens and a ``block_size`` of 0.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: None
    group_idx: int
    kind: str | None
    window: int | None
    medium: str


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Hash blocks of one group left ``medium``. Of a chunk that was stored with its payload, all of its hashes."""

    block_hashes: tuple[bytes, ...]
    group_idx: int
    medium: str


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Everything left ``medium`` at once."""

    medium: str


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
