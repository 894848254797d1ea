"""Chunk sizes: what divides what, and what an operator is told where it does not (spec, section 2)."""

from __future__ import annotations

import pytest
from core_truth import engine_spec
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry, cdiv


def test_sizes_of_several_groups() -> None:
    """One factor for all groups: tokens, hashes and bytes of a chunk follow from it."""
    engine = EngineSpec("m", "bf16", (GroupSpec(16, (100, 200)), GroupSpec(32, (50,))), hash_block_tokens=8)
    geometry = Geometry.of(engine, blocks=4)
    first, second = geometry.groups
    assert (first.chunk_tokens, first.hashes_per_chunk, first.payload_bytes) == (64, 8, 1200)
    assert (second.chunk_tokens, second.hashes_per_chunk, second.payload_bytes) == (128, 16, 200)
    assert (geometry.payload_bytes_max, geometry.chunk_tokens_max) == (1200, 128)


def test_s8_groups_may_differ() -> None:
    """S8: two full groups with different chunks are served; no hit is shorter than the coarser one."""
    assert Geometry.of(engine_spec([4, 6], 2)).chunk_tokens_max == 6


def test_s11_one_block_where_nothing_is_said() -> None:
    """S11: neither size given means chunks of one GPU block."""
    assert Geometry.of(engine_spec([16], 16)).blocks_per_chunk == 1


def test_s11_both_sizes() -> None:
    """S11: two sizes are one too many; the message names both."""
    with pytest.raises(ConfigError, match=r"chunk\.blocks = 2 and chunk\.tokens = 32"):
        Geometry.of(engine_spec([16], 16), blocks=2, tokens=32)


@given(st.integers(1, 64), st.integers(-5, 2000))
def test_s11_tokens_must_divide(block: int, tokens: int) -> None:
    """S11: a token size is a multiple of the GPU block, or the error names the next size that is."""
    engine = engine_spec([block], block)
    if tokens > 0 and tokens % block == 0:
        assert Geometry.of(engine, tokens=tokens).groups[0].chunk_tokens == tokens
        return
    with pytest.raises(ConfigError) as caught:
        Geometry.of(engine, tokens=tokens)
    named = int(str(caught.value).rsplit(maxsplit=1)[-1])
    assert named == max(block, cdiv(tokens, block) * block)
    assert Geometry.of(engine, tokens=named).groups[0].chunk_tokens == named


def test_s11_tokens_need_equal_blocks() -> None:
    """S11: one token size cannot mean the same number of blocks in groups with different blocks."""
    with pytest.raises(ConfigError, match=r"use chunk\.blocks"):
        Geometry.of(engine_spec([16, 32], 16), tokens=64)


@pytest.mark.parametrize("blocks", [0, -1])
def test_s11_blocks_are_positive(blocks: int) -> None:
    """S11: a chunk of no blocks is no chunk."""
    with pytest.raises(ConfigError, match=f"chunk.blocks = {blocks}"):
        Geometry.of(engine_spec([16], 16), blocks=blocks)


@pytest.mark.parametrize(("block", "hashed"), [(16, 5), (16, 32), (0, 1), (16, 0), (16, -4)])
def test_s11_a_block_is_whole_hash_blocks(block: int, hashed: int) -> None:
    """S11: a GPU block that ends inside a hash block would have no key of its own."""
    with pytest.raises(ConfigError, match="multiple of hash_block_tokens"):
        Geometry.of(EngineSpec("m", "bf16", (GroupSpec(block, (8,)),), hashed))


@pytest.mark.parametrize("pages", [(), (0,), (8, -1)])
def test_a_group_has_bytes(pages: tuple[int, ...]) -> None:
    """A group without bytes would store empty chunks and find them again."""
    with pytest.raises(ConfigError, match="page_bytes"):
        Geometry.of(EngineSpec("m", "bf16", (GroupSpec(16, pages),), 16))


def test_an_engine_has_groups() -> None:
    """An engine without a group is a mistake in the adapter, told as one."""
    with pytest.raises(ConfigError, match="no KV cache group"):
        Geometry.of(EngineSpec("m", "bf16", (), 16))
