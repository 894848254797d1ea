"""How tokens, hash blocks, GPU blocks and chunks line up, per KV cache group (spec, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.errors import ConfigError
from tierkv.types.engine import EngineSpec, GroupSpec


def cdiv(dividend: int, divisor: int) -> int:
    """Ceiling division."""
    return -(-dividend // divisor)


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One group's sizes.

    block_tokens: tokens per GPU block. chunk_tokens: tokens per chunk (T in the specification).
    hashes_per_chunk: hash blocks per chunk. page_bytes: bytes of one block in each tensor.
    payload_bytes: bytes of one chunk: for each tensor in turn, the pages of all its blocks.
    """

    index: int
    block_tokens: int
    chunk_tokens: int
    hashes_per_chunk: int
    page_bytes: tuple[int, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups' sizes. ``blocks_per_chunk`` is F, one number for all groups."""

    blocks_per_chunk: int
    hash_block_tokens: int
    groups: tuple[GroupGeometry, ...]

    @property
    def payload_bytes_max(self) -> int:
        """Bytes of the largest group's chunk."""
        return max(group.payload_bytes for group in self.groups)

    @property
    def chunk_tokens_max(self) -> int:
        """Tokens of the coarsest group's chunk: no hit is shorter (S43, S44)."""
        return max(group.chunk_tokens for group in self.groups)

    @classmethod
    def of(cls, engine: EngineSpec, *, blocks: int | None = None, tokens: int | None = None) -> Geometry:
        """Sizes for an engine and a chunk size, given in GPU blocks or in tokens (neither: one block).

        Raises:
            ConfigError: both sizes given, a size that does not divide (names the next one that does), or a GPU block
                that is no multiple of the hash block (S11).
        """
        if not engine.groups:
            raise ConfigError("the engine has no KV cache group: give at least one in EngineSpec.groups")
        for i, group in enumerate(engine.groups):
            _check_group(i, group, engine.hash_block_tokens)
        factor = _blocks_per_chunk(engine, blocks, tokens)
        return cls(
            factor,
            engine.hash_block_tokens,
            tuple(
                GroupGeometry(
                    index=i,
                    block_tokens=group.block_tokens,
                    chunk_tokens=group.block_tokens * factor,
                    hashes_per_chunk=group.block_tokens * factor // engine.hash_block_tokens,
                    page_bytes=group.page_bytes,
                    payload_bytes=factor * sum(group.page_bytes),
                )
                for i, group in enumerate(engine.groups)
            ),
        )


def _check_group(index: int, group: GroupSpec, hash_block_tokens: int) -> None:
    if hash_block_tokens < 1 or group.block_tokens < 1 or group.block_tokens % hash_block_tokens:
        raise ConfigError(
            f"group {index}: block_tokens {group.block_tokens} is not a multiple of "
            f"hash_block_tokens {hash_block_tokens}"
        )
    if not group.page_bytes or min(group.page_bytes) < 1:
        raise ConfigError(f"group {index}: page_bytes {group.page_bytes} must name a tensor of 1 byte or more")


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
