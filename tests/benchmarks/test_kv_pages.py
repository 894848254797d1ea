"""Cut of a prompt's KV into chunks, for codecs and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.models.kv_pages import PageLayout, PromptKv, groups_of
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.worker.pages import HostPages


def made(layers: int, tokens: int, channels: int) -> PromptKv:
    """KV in which every value says where it stands."""
    numbers = np.arange(2 * layers * tokens * channels, dtype=np.uint32) % 65_521
    keys, values = numbers.astype(np.uint16).reshape(2, layers, tokens, channels)
    return PromptKv(keys, values)


@given(
    block_tokens=st.integers(1, 8),
    blocks_per_chunk=st.integers(1, 4),
    tokens=st.integers(1, 80),
    channels=st.integers(1, 5),
    layers=st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
)
def test_what_is_cut_can_be_joined(
    block_tokens: int, blocks_per_chunk: int, tokens: int, channels: int, layers: list[int]
) -> None:
    """The effect of a codec is measured on KV that went through chunks: they alone must change nothing."""
    layout, kv = PageLayout(block_tokens, blocks_per_chunk), made(5, tokens, channels)
    whole = tokens // layout.chunk_tokens * layout.chunk_tokens
    if not whole:
        with pytest.raises(ValueError, match=f"{tokens} tokens do not fill a chunk of {layout.chunk_tokens}"):
            layout.cut(kv, layers)
        return
    back = layout.join(layout.cut(kv, layers), len(layers))
    assert np.array_equal(back.keys, kv.keys[layers, :whole])
    assert np.array_equal(back.values, kv.values[layers, :whole])


def test_a_chunk_is_what_the_worker_makes_of_pages() -> None:
    """Codecs that mix neighbours would otherwise be judged on an order that no tier ever sees."""
    layout, kv, channels = PageLayout(block_tokens=4, blocks_per_chunk=2), made(3, 16, 6), 6
    page_bytes = 2 * 4 * channels * 2
    spec = EngineSpec("any", "bfloat16", (GroupSpec(4, (page_bytes,) * 2),), 4)
    # An engine's tensors: [blocks, keys and values, tokens, channels], block 3 of the tensor being the prompt's first.
    tensors = [np.zeros((8, 2, 4, channels), np.uint16) for _ in range(2)]
    table = [3, 1, 6, 2]
    for tensor, layer in zip(tensors, (0, 2), strict=True):
        for place, block in enumerate(table):
            tokens = slice(4 * place, 4 * place + 4)
            tensor[block] = kv.keys[layer, tokens], kv.values[layer, tokens]
    pages = HostPages(Geometry.of(spec, blocks=2), [tensors])
    cut = layout.cut(kv, [0, 2])
    assert len(cut) == 2
    for chunk, blocks in zip(cut, (table[:2], table[2:]), strict=True):
        part = np.zeros(2 * 2 * page_bytes, np.uint8)
        pages.gather(0, 0, blocks, part)
        assert chunk.tobytes() == part.tobytes()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["full"] * 4, {"full": [[0, 1, 2, 3]]}),
        (["window", "window", "full"] * 2, {"window": [[0, 1], [3, 4]], "full": [[2, 5]]}),
        (["window", "window", "window", "full", "full"], {"window": [[0, 1], [2]], "full": [[3, 4]]}),
    ],
)
def test_layers_share_chunks_as_in_engines(kinds: list[str], expected: dict[str, list[list[int]]]) -> None:
    """Eighteen layers in one chunk would be a chunk that no engine has."""
    assert groups_of(kinds) == expected
