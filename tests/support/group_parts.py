"""Groups of every kind, and what their layers attend to."""

from __future__ import annotations

from core_truth import TOKEN_BYTES

from tierkv.types.engine import GroupKind, GroupSpec


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


def attended(group: GroupSpec, position: int) -> range:
    """The tokens before ``position`` that the token there attends to, as models define it; of a state, its last."""
    match group.kind:
        case GroupKind.FULL_ATTENTION:
            return range(position)
        case GroupKind.SSM:
            return range(max(0, position - 1), position)
    assert group.window_tokens is not None
    if group.kind is GroupKind.SLIDING_WINDOW:
        return range(max(0, position - group.window_tokens + 1), position)
    return range(position // group.window_tokens * group.window_tokens, position)


def first_block(group: GroupSpec, position: int) -> int:
    """The first block of a table that an engine keeps for the token at ``position``."""
    return attended(group, position).start // group.block_tokens
