"""Sizes of hash blocks, GPU blocks and chunks, per KV cache group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

from tierkv.errors import ConfigError
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupKind, GroupSpec

_T = TypeVar("_T")


def cdiv(dividend: int, divisor: int) -> int:
    """Ceiling division."""
    return -(-dividend // divisor)


def batches(items: Sequence[_T], size_max: int) -> list[Sequence[_T]]:
    """As few batches as possible, of nearly one length: a rest of one chunk would cost what a whole batch costs."""
    count = len(items)
    if count <= size_max:  # usual
        return [items[:]] if count else []
    size = cdiv(count, cdiv(count, size_max))
    return [items[i : i + size] for i in range(0, count, size)]


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Sizes of one group."""

    index: int
    """Index of the group."""
    block_tokens: int
    """Tokens per GPU block."""
    chunk_tokens: int
    """Tokens per chunk (T in the specification)."""
    hashes_per_chunk: int
    """Hash blocks per chunk."""
    page_bytes: tuple[int, ...]
    """Bytes of one block in each tensor of one worker."""
    worker_bytes: int
    """Bytes of a worker's parts of a chunk. A part has, tensor by tensor, its piece of the pages of all blocks."""
    payload_bytes: int
    """Bytes of one chunk: its parts in turn."""
    parts: int = 1
    """Parts of a chunk, all of one length. Each has some of the heads."""
    worker_parts: int = 1
    """Consecutive parts that one worker holds."""
    copies: int = 1
    """Workers of consecutive ranks that hold equal parts."""
    head_rows: int = 1
    """Number of times that the heads follow each other in a page."""
    kind: GroupKind = GroupKind.FULL_ATTENTION
    """Attention of the group's layers."""
    window_chunks: int | None = None
    """Number of chunks before the end of a hit that the hit needs (W); None: all chunks."""
    aligned_chunks: int | None = None
    """Every hit of the engine ends at a multiple of this number of chunks (A); None: anywhere."""
    end_slack: int | None = None
    """Largest number of tokens before the end of a chunk at which a hit may end with W chunks; None: any number."""
    tail_blocks: int = 1
    """Blocks at the end of a chunk that every hit needs. Only the other blocks may be missing when it is stored."""
    needs_end: bool = True
    """Whether every hit needs the block of its last token."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of all groups."""

    blocks_per_chunk: int
    """GPU blocks per chunk (F), the same for all groups."""
    hash_block_tokens: int
    """Tokens per hash block."""
    groups: tuple[GroupGeometry, ...]
    """Sizes by group."""
    num_workers: int = 1
    """Workers that share the stack."""
    # Derived once, because every request uses them.
    has_windows: bool = field(init=False, repr=False, compare=False)
    """Whether some group needs only the end of a prefix."""
    lookup_order: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Group indices: full attention first, then windows, widest first; ties keep their order (S10)."""

    def __post_init__(self) -> None:
        """Derive the fields that follow from the groups."""

        def rank(group: GroupGeometry) -> tuple[bool, int]:
            return group.window_chunks is not None, -(group.window_chunks or 0)

        object.__setattr__(self, "has_windows", any(group.window_chunks is not None for group in self.groups))
        object.__setattr__(self, "lookup_order", tuple(group.index for group in sorted(self.groups, key=rank)))

    @property
    def payload_bytes_max(self) -> int:
        """Bytes of the largest chunk of any group."""
        return max(group.payload_bytes for group in self.groups)

    @classmethod
    def of(
        cls, engine: EngineSpec, *, blocks: int | None = None, tokens: int | None = None, parts: int | None = None
    ) -> Geometry:
        """Derive the sizes from an engine and a chunk size in GPU blocks or tokens (neither: one block).

        Args:
            engine: shape of the engine.
            blocks: GPU blocks per chunk.
            tokens: tokens per chunk.
            parts: parts that each chunk is divided in by heads; None: as many as there are workers with other pages.

        Raises:
            ConfigError: a field of the engine has another type; both sizes are given; a size does not divide (the
                message names the next valid size); the GPU block is no multiple of the hash block (S11); or the numbers
                of workers, copies and parts do not fit.
        """
        _check_types(engine)
        if not engine.groups:
            raise ConfigError("the engine has no KV cache group: give at least one in EngineSpec.groups")
        for i, group in enumerate(engine.groups):
            _check_group(i, group, engine.hash_block_tokens)
        factor = _blocks_per_chunk(engine, blocks, tokens)
        _check_workers(engine)
        _check_shares(engine)
        aligned_tokens = _aligned_tokens(engine.groups, factor)
        groups = tuple(
            _group_geometry(i, group, factor, engine, aligned_tokens, parts=parts)
            for i, group in enumerate(engine.groups)
        )
        return cls(factor, engine.hash_block_tokens, groups, engine.num_workers)


def _group_geometry(  # noqa: PLR0913 - a group, and the sizes that all groups share
    index: int, group: GroupSpec, factor: int, engine: EngineSpec, aligned_tokens: int | None, *, parts: int | None
) -> GroupGeometry:
    chunk_tokens = group.block_tokens * factor
    window = _window_chunks(group, chunk_tokens)
    worker_bytes = factor * sum(group.page_bytes)
    worker_parts = _worker_parts(index, group, engine.num_workers, parts)
    shares = engine.num_workers // group.copies
    return GroupGeometry(
        index=index,
        block_tokens=group.block_tokens,
        chunk_tokens=chunk_tokens,
        hashes_per_chunk=chunk_tokens // engine.hash_block_tokens,
        page_bytes=group.page_bytes,
        worker_bytes=worker_bytes,
        payload_bytes=worker_bytes * shares,
        parts=shares * worker_parts,
        worker_parts=worker_parts,
        copies=group.copies,
        head_rows=group.head_rows,
        kind=group.kind,
        window_chunks=window,
        aligned_chunks=_aligned_chunks(chunk_tokens, window, aligned_tokens),
        end_slack=_END_SLACK[group.kind],
        tail_blocks=_tail_blocks(group, factor),
        # A section may begin where a hit ends, and a window of one token has nothing before it.
        needs_end=group.kind is not GroupKind.CHUNKED_LOCAL and group.window_tokens != 1,
    )


_END_SLACK = {
    GroupKind.FULL_ATTENTION: None,
    # A token attends to itself and to window_tokens - 1 tokens before it. W chunks cover them if the hit ends with a
    # chunk, or one token before (the engine always computes the last token of a prompt). If the hit ends earlier, one
    # more chunk may be needed, and it may have been stored without the front blocks that would be used.
    GroupKind.SLIDING_WINDOW: 1,
    GroupKind.CHUNKED_LOCAL: 1,
    # A state belongs to one token, the last of its chunk. One token earlier the state is different.
    GroupKind.SSM: 0,
}


def _window_chunks(group: GroupSpec, chunk_tokens: int) -> int | None:
    """Number of window chunks, W (S6, S7)."""
    if group.kind is GroupKind.FULL_ATTENTION:
        return None
    if group.kind is GroupKind.SSM:
        return 1
    return cdiv(group.window_tokens or 1, chunk_tokens)


def _tail_blocks(group: GroupSpec, factor: int) -> int:
    """Number of blocks of the chunk that a hit ending with the chunk, or one token before it, needs."""
    if group.kind is GroupKind.SSM:
        return 1
    if group.window_tokens is None:
        return factor
    return min(factor, cdiv(group.window_tokens, group.block_tokens))


def _aligned_tokens(groups: tuple[GroupSpec, ...], factor: int) -> int | None:
    """Chunk size in tokens at whose multiples every hit ends; None unless all full-attention groups share it (S8)."""
    sizes = {group.block_tokens * factor for group in groups if group.kind is GroupKind.FULL_ATTENTION}
    return sizes.pop() if len(sizes) == 1 else None


def _aligned_chunks(chunk_tokens: int, window: int | None, aligned_tokens: int | None) -> int | None:
    """Alignment in chunks, A; None where it would exclude no chunk (S9)."""
    if window is None or aligned_tokens is None or aligned_tokens % chunk_tokens:
        return None
    aligned = aligned_tokens // chunk_tokens
    return aligned if aligned > window else None


_TEXTS = ("model", "dtype", "revision", "layout")
_NUMBERS = ("hash_block_tokens", "rank", "world_size", "num_workers", "replica")
_GROUP_NUMBERS = ("block_tokens", "copies", "heads", "head_rows")


def _check_types(engine: EngineSpec) -> None:
    """Check the types of all fields: a namespace with another type in it would be written, and never be read again."""
    _require_type("engine", engine, EngineSpec, "a tierkv.EngineSpec")
    for name in _TEXTS:
        _require_type(f"EngineSpec.{name}", getattr(engine, name), str, "text")
    for name in _NUMBERS:
        _require_type(f"EngineSpec.{name}", getattr(engine, name), int, "a whole number")
    _require_type("EngineSpec.capabilities", engine.capabilities, EngineCapabilities, "a tierkv.EngineCapabilities")
    _require_type("EngineSpec.groups", engine.groups or (), (tuple, list), "a tuple of tierkv.GroupSpec")
    for i, group in enumerate(engine.groups or ()):
        _require_type(f"EngineSpec.groups[{i}]", group, GroupSpec, "a tierkv.GroupSpec")
        for name in _GROUP_NUMBERS:
            _require_type(f"group {i}: {name}", getattr(group, name), int, "a whole number")
        if group.window_tokens is not None:
            _require_type(f"group {i}: window_tokens", group.window_tokens, int, "a whole number, or None")
        _require_type(f"group {i}: page_bytes", group.page_bytes, (tuple, list), "the bytes of each tensor's pages")
        for size in group.page_bytes:
            _require_type(f"group {i}: page_bytes", size, int, "whole numbers")


def _check_shares(engine: EngineSpec) -> None:
    if not 0 <= engine.rank < engine.world_size:
        raise ConfigError(
            f"EngineSpec.rank = {engine.rank} of world_size = {engine.world_size}: the shares of a model are counted "
            "from 0 to world_size - 1"
        )
    rate: Any = engine.capabilities.prefill_tokens_per_s
    if rate is not None and not (isinstance(rate, Real) and 0 < float(rate) < math.inf):
        raise ConfigError(
            f"EngineCapabilities.prefill_tokens_per_s = {rate!r:.80}: give a number above 0; None where it is unknown"
        )


def _require_type(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r:.80}: give {wanted}")


def _check_group(index: int, group: GroupSpec, hash_block_tokens: int) -> None:
    if hash_block_tokens < 1 or group.block_tokens < 1 or group.block_tokens % hash_block_tokens:
        raise ConfigError(
            f"group {index}: block_tokens {group.block_tokens} is not a multiple of "
            f"hash_block_tokens {hash_block_tokens}"
        )
    if not group.page_bytes or min(group.page_bytes) < 1:
        raise ConfigError(f"group {index}: page_bytes {group.page_bytes} must name a tensor of 1 byte or more")
    if group.kind not in tuple(GroupKind):
        kinds = ", ".join(str(kind) for kind in GroupKind)
        raise ConfigError(f"group {index}: kind = {group.kind!r}: give one of {kinds}")
    windowed = group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
    if windowed and (group.window_tokens is None or group.window_tokens < 1):
        raise ConfigError(
            f"group {index}: window_tokens {group.window_tokens} of a {group.kind.value} group must be 1 or more"
        )
    if not windowed and group.window_tokens is not None:
        raise ConfigError(
            f"group {index}: window_tokens {group.window_tokens} is given, but a {group.kind.value} group has no window"
        )


def _check_workers(engine: EngineSpec) -> None:
    if engine.num_workers < 1:
        raise ConfigError(f"num_workers = {engine.num_workers}: give 1 or more")
    for i, group in enumerate(engine.groups):
        if group.copies < 1 or engine.num_workers % group.copies:
            raise ConfigError(
                f"group {i}: copies = {group.copies} does not divide num_workers = {engine.num_workers}: give 1, or "
                "the number of workers whose pages are equal"
            )


def _worker_parts(index: int, group: GroupSpec, num_workers: int, parts: int | None) -> int:
    """Parts of one worker."""
    if parts is None:
        return 1
    shares = num_workers // group.copies
    worker_parts, rest = divmod(parts, shares)
    if rest or not worker_parts:
        raise ConfigError(
            f"chunk.parts = {parts} is not a multiple of the {shares} workers with pages of their own: give the "
            "largest number of workers that will use these chunks"
        )
    if group.heads % worker_parts or not group.heads:
        why = f"a worker has {group.heads} heads" if group.heads else "its pages cannot be divided by heads"
        raise ConfigError(
            f"chunk.parts = {parts} gives each of {shares} workers {worker_parts}, but in group {index} {why}: remove "
            "chunk.parts, or give a number whose parts have whole heads"
        )
    if any(size % (group.head_rows * group.heads) for size in group.page_bytes):
        raise ConfigError(
            f"chunk.parts = {parts}: the pages of group {index}, of {group.page_bytes} bytes, do not have "
            f"{group.head_rows} times {group.heads} heads of one length; remove chunk.parts"
        )
    return worker_parts


def _blocks_per_chunk(engine: EngineSpec, blocks: int | None, tokens: int | None) -> int:
    if blocks is not None and tokens is not None:
        raise ConfigError(f"chunk.blocks = {blocks} and chunk.tokens = {tokens}: give one of them, not both")
    if tokens is None:
        if blocks is not None and blocks < 1:
            raise ConfigError(f"chunk.blocks = {blocks}: give 1 or more GPU blocks")
        return blocks or 1
    sizes = {group.block_tokens for group in engine.groups}
    if len(sizes) > 1:
        raise ConfigError(
            f"chunk.tokens = {tokens}: the engine's groups have blocks of {sorted(sizes)} tokens; "
            "use chunk.blocks instead"
        )
    (size,) = sizes
    if tokens < 1 or tokens % size:
        raise ConfigError(
            f"chunk.tokens = {tokens} is not a multiple of the engine's block of {size} tokens; "
            f"the next valid size is {max(1, cdiv(tokens, size)) * size}"
        )
    return tokens // size
