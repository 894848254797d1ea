"""Chunk sizes: the sizes that divide each other, and the errors for those that do not (spec, section 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_truth import engine_spec
from group_parts import attended, full, local, ssm, window
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupKind, GroupSpec
from tierkv.types.geometry import Geometry, cdiv


def test_sizes_of_several_groups() -> None:
    """One factor for all groups: tokens, hashes and bytes of a chunk follow from it."""
    engine = EngineSpec("m", "bf16", (GroupSpec(16, (100, 200)), GroupSpec(32, (50,))), hash_block_tokens=8)
    geometry = Geometry.of(engine, blocks=4)
    first, second = geometry.groups
    assert (first.chunk_tokens, first.hashes_per_chunk, first.payload_bytes) == (64, 8, 1200)
    assert (second.chunk_tokens, second.hashes_per_chunk, second.payload_bytes) == (128, 16, 200)
    assert geometry.payload_bytes_max == 1200


def geometry_of(*groups: GroupSpec, blocks: int = 1) -> Geometry:
    """Geometry of an engine with these groups."""
    return Geometry.of(EngineSpec("m", "bf16", groups, hash_block_tokens=1), blocks=blocks)


@pytest.mark.parametrize(
    ("group", "factor", "chunks"),
    [
        pytest.param(window(4096, 16), 1, 256, id="s6-fits"),
        pytest.param(window(4097, 16), 1, 257, id="s6-one-more"),
        pytest.param(window(4096, 16), 5, 52, id="s6-larger-chunks"),
        pytest.param(window(1, 16), 4, 1, id="s6-inside-a-chunk"),
        pytest.param(local(8192, 16), 2, 256, id="s6-local"),
        pytest.param(ssm(16), 4, 1, id="s7"),
        pytest.param(full(16), 4, None, id="full"),
    ],
)
def test_s6_s7_chunks_of_a_window(group: GroupSpec, factor: int, chunks: int | None) -> None:
    """S6, S7: a window is rounded up to whole chunks, a state is one chunk, full attention has no window."""
    geometry = geometry_of(group, blocks=factor)
    assert geometry.groups[0].window_chunks == chunks
    assert geometry.has_windows == (chunks is not None)


SIZES = st.sampled_from([1, 2, 4, 16])
WINDOWS = st.integers(1, 40)


@given(
    st.builds(ssm, SIZES) | st.builds(window, WINDOWS, SIZES) | st.builds(local, WINDOWS, SIZES),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_s6_w_chunks_cover_the_window(spec: GroupSpec, factor: int, stop: int) -> None:
    """S6: the last W chunks hold every token that the next one attends to, wherever a hit may end.

    That is the end of a chunk, or up to ``end_slack`` tokens before. Of each chunk the ``tail_blocks`` suffice, which
    are always stored.
    """
    group = geometry_of(spec, blocks=factor).groups[0]
    assert group.window_chunks is not None
    assert group.end_slack is not None
    for end in range(stop * group.chunk_tokens - group.end_slack, stop * group.chunk_tokens + 1):
        first = max(0, stop - group.window_chunks) * group.chunk_tokens
        for token in attended(spec, end):
            assert token >= first
            assert token // spec.block_tokens % factor >= factor - group.tail_blocks


def test_a_hit_ends_where_its_window_does() -> None:
    """Reason for ``end_slack``: 2 tokens before the end of its chunk, a window as long as a chunk needs two chunks."""
    assert attended(window(16, 16), 48 - 2).start < 32
    assert [group.end_slack for group in geometry_of(window(16), local(16), ssm(), full()).groups] == [1, 1, 0, None]


def test_s8_two_full_groups_with_different_chunks() -> None:
    """S8: hits end anywhere, so no chunk of a window is useless."""
    geometry = geometry_of(full(4), full(6), window(2, 2))
    assert [group.aligned_chunks for group in geometry.groups] == [None] * 3


@pytest.mark.parametrize(
    ("groups", "aligned"),
    [
        pytest.param([full(256), window(64, 64)], [None, 4], id="s9"),
        pytest.param([full(256), window(256, 64)], [None, None], id="all-of-it-is-needed"),
        pytest.param([full(256), window(192, 64)], [None, 4], id="three-of-four"),
        pytest.param([full(256), ssm(64), full(256)], [None, 4, None], id="two-alike"),
        pytest.param([full(96), ssm(64)], [None, None], id="does-not-divide"),
        pytest.param([full(64), ssm(256)], [None, None], id="coarser-than-full"),
        pytest.param([window(64, 64), ssm(64)], [None, None], id="windows-only"),
    ],
)
def test_s9_aligned_chunks(groups: list[GroupSpec], aligned: list[int | None]) -> None:
    """S9: if hits end with a chunk of full attention, only the last W of its chunks of a window are useful."""
    assert [group.aligned_chunks for group in geometry_of(*groups).groups] == aligned


def test_s10_lookup_order() -> None:
    """S10: full attention first, then windows by their chunks, the widest first; among equals the first comes first."""
    groups = [ssm(), window(16), full(), window(8), local(16), full(), window(4)]
    assert geometry_of(*groups).lookup_order == (2, 5, 1, 4, 3, 0, 6)


@pytest.mark.parametrize("kind", [GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL])
@pytest.mark.parametrize("length", [None, 0])
def test_a_window_has_a_length(kind: GroupKind, length: int | None) -> None:
    """A window without a length cannot be served."""
    with pytest.raises(ConfigError, match="group 1: window_tokens"):
        geometry_of(full(), GroupSpec(4, (16,), kind, length))


@pytest.mark.parametrize("kind", [GroupKind.FULL_ATTENTION, GroupKind.SSM])
def test_only_windows_have_a_length(kind: GroupKind) -> None:
    """A length where there is no window means that the kind is wrong: it would load too much, or too little."""
    with pytest.raises(ConfigError, match="has no window"):
        geometry_of(GroupSpec(4, (16,), kind, 32))


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


@pytest.mark.parametrize("kind", ["sliding_window", "slide", None])
def test_a_kind_in_other_words_is_refused(kind: object) -> None:
    """``KeyError: 'slide'`` said nothing to the author of an engine."""
    group = GroupSpec(16, (8,), kind=kind)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ConfigError, match=r"group 0: kind = .*: give one of GroupKind\.FULL_ATTENTION, "):
        Geometry.of(EngineSpec("m", "bf16", (group,), 16))


def test_an_engine_has_groups() -> None:
    """An engine without a group is a mistake in the adapter, reported as one."""
    with pytest.raises(ConfigError, match="no KV cache group"):
        Geometry.of(EngineSpec("m", "bf16", (), 16))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": full()}, r"EngineSpec\.groups = GroupSpec.*: give a tuple of tierkv\.GroupSpec"),
        ({"rank": 1}, r"EngineSpec\.rank = 1 of world_size = 1"),
        ({"world_size": 0}, r"EngineSpec\.rank = 0 of world_size = 0"),
        ({"capabilities": EngineCapabilities(prefill_tokens_per_s=0)}, "prefill_tokens_per_s = 0: give a number above"),
        ({"capabilities": EngineCapabilities(prefill_tokens_per_s=math.nan)}, "prefill_tokens_per_s = nan"),
        ({"capabilities": EngineCapabilities(prefill_tokens_per_s="fast")}, "prefill_tokens_per_s = 'fast'"),
    ],
)
def test_a_description_of_an_engine_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    """The forgotten comma of a tuple ended with a TypeError; a speed of 0, in a division by zero in a lookup."""
    with pytest.raises(ConfigError, match=message):
        Geometry.of(replace(EngineSpec("m", "float32", (full(),), 4), **fields))


def test_a_speed_may_be_a_number_of_numpy() -> None:
    """Measured speeds often are."""
    capabilities = EngineCapabilities(prefill_tokens_per_s=np.int64(900))  # type: ignore[arg-type]  # not a float
    Geometry.of(EngineSpec("m", "float32", (full(),), 4, capabilities=capabilities))
