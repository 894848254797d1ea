"""Groups of every kind, and small looks at store jobs, for tests of the store half."""

from __future__ import annotations

from core_parts import Core
from core_truth import TOKEN_BYTES, BedRequest

from tierkv.types.engine import GroupKind, GroupSpec
from tierkv.types.transfers import ConnectorMeta, TransferJob


def full(block_tokens: int = 4) -> GroupSpec:
    """A full-attention group."""
    return GroupSpec(block_tokens, (block_tokens * TOKEN_BYTES,))


def window(window_tokens: int, block_tokens: int = 4) -> GroupSpec:
    """A sliding-window group."""
    return GroupSpec(block_tokens, (block_tokens * TOKEN_BYTES,), GroupKind.SLIDING_WINDOW, window_tokens)


def local(window_tokens: int, block_tokens: int = 4) -> GroupSpec:
    """A chunked-local group."""
    return GroupSpec(block_tokens, (block_tokens * TOKEN_BYTES,), GroupKind.CHUNKED_LOCAL, window_tokens)


def ssm(block_tokens: int = 4) -> GroupSpec:
    """A state space group."""
    return GroupSpec(block_tokens, (block_tokens * TOKEN_BYTES,), GroupKind.SSM)


def only_store(meta: ConnectorMeta) -> TransferJob:
    """The one store of a step."""
    (job,) = meta.stores
    return job


def chunk_indices(core: Core, request: BedRequest, meta: ConnectorMeta, group: int = 0) -> list[int]:
    """Which chunks of a request a step stores, in a group."""
    keys = core.truth.keys(request, group)
    return [
        keys.index(key)
        for job in meta.stores
        for key, of_group in zip(job.keys, job.chunk_groups, strict=True)
        if of_group == group and key in keys
    ]
