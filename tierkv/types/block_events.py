"""Described events: the hash blocks that became readable in a tier or were removed from it, with their tokens.

A consumer that receives all of them, such as a router, knows which prefixes each tier has without asking. An event has
the name of its tier and a *medium*, the kind of storage in the words of routers. A router may give a medium that it
does not know the credit of a GPU, so a medium is never the name that a user chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEDIUM_HOST = "CPU"
"""Medium of the host tier."""

MEDIUM_LOCAL = "DISK"
"""Medium of a lower tier that this engine alone uses."""

MEDIUM_SHARED = "STORAGE"
"""Medium of a lower tier that other engines use as well."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """One chunk became readable in ``tier``.

    A *placeholder* describes a chunk whose request was not observed. It has the chunk's own hash and group, no tokens,
    and a ``block_size`` of 0.
    """

    block_hashes: tuple[bytes, ...]
    """Hash blocks of the chunk, in order. The last one is the hash in the chunk's key."""
    parent_block_hash: bytes | None
    """Hash block before the first; None at the start of a sequence, or where unknown."""
    token_ids: tuple[int, ...]
    """Tokens of the chunk, ``block_size`` per hash block."""
    block_size: int
    """Tokens per hash block."""
    lora_id: int | None
    """Number of the adapter, or None."""
    lora_name: str | None
    """Name of the adapter, or None."""
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None
    """Per block of the group, the values in its hash beside tokens, such as pictures; None: no block has any.

    A block of the group has one hash block or several. See :meth:`tierkv.types.engine.FullRequest.extra_keys`.
    """
    group_idx: int
    """Index of the KV cache group."""
    kind: str | None
    """Kind of attention of the group."""
    window: int | None
    """Window of the group in tokens, or None."""
    medium: str
    """:data:`MEDIUM_HOST`, :data:`MEDIUM_LOCAL` or :data:`MEDIUM_SHARED`."""
    tier: str
    """Name of the tier; "host" for the host tier."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Hash blocks of one group were removed from ``tier``."""

    block_hashes: tuple[bytes, ...]
    """The hash blocks. Of a chunk that was described when it was stored, all of them."""
    group_idx: int
    """Index of the KV cache group."""
    medium: str
    """Medium of the tier, as in :class:`BlockStored`."""
    tier: str
    """Name of the tier."""


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """All hash blocks were removed from ``tier``, not from other tiers of its medium."""

    medium: str
    """Medium of the tier, as in :class:`BlockStored`."""
    tier: str
    """Name of the tier."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
