"""Location of pages in vLLM's KV memory: every layout of 0.32, built by hand as vLLM builds it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.pages import check_heads, group_pages, group_runs
from tierkv.types.engine import GroupSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs_torch

BLOCKS, LAYERS, HEADS, TOKENS, CONTENT = 5, 3, 2, 4, 8
PAGE = HEADS * TOKENS * CONTENT
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""From the outermost axis to the innermost: layers, blocks, heads, tokens, content."""


@dataclass
class Tensor:
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class Group:
    layer_names: list[str]


@dataclass
class Config:
    num_blocks: int
    kv_cache_tensors: list[Tensor] = field(default_factory=list)
    kv_cache_groups: list[Group] = field(default_factory=list)


def laid_out(order: str, group_names: list[list[str]]) -> tuple[Config, dict[str, object], object]:
    """Memory in which all groups overlay each other, vLLM's description of it, and its view of each layer."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    stride, strides = 1, {}
    for axis in reversed(order):
        strides[axis] = stride
        stride *= sizes[axis]
    memory = torch.zeros(stride, dtype=torch.int8)
    config, views = Config(BLOCKS), {}
    for names in group_names:
        config.kv_cache_groups.append(Group(names))
        config.kv_cache_tensors.append(Tensor(names, strides["L"], strides["B"]))
        for i, name in enumerate(names):
            shape = [sizes[axis] for axis in "BHNC"]
            views[name] = memory.as_strided(shape, [strides[axis] for axis in "BHNC"], i * strides["L"])
    return config, views, memory


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_is_all_of_its_bytes_and_no_others(order: str) -> None:
    """A byte too few is a wrong token after a hit, a byte too many another request's KV overwritten by a load."""
    config, views, memory = laid_out(order, [["a", "b", "c"], ["d", "e", "f"]])
    assert sum(run.page_bytes for run in group_runs(config)[0]) == LAYERS * PAGE
    for group, names in zip(group_pages(config, views), [["a", "b", "c"], ["d", "e", "f"]], strict=True):
        for block in range(BLOCKS):
            memory.zero_()
            for pages in group:
                assert pages.is_contiguous()
                pages[block] = 7
            for name in names:
                assert (views[name][block] == 7).all(), "every byte of the block"
            assert int((memory == 7).sum()) == LAYERS * PAGE, "and no other"


def test_views_are_the_engines_memory() -> None:
    """Copies of the KV memory would be stale in the next step, and as large as the GPU."""
    config, views, memory = laid_out("LBHNC", [["a", "b", "c"]])
    storage = memory.untyped_storage().data_ptr()
    assert all(pages.untyped_storage().data_ptr() == storage for pages in group_pages(config, views)[0])


def test_a_backend_may_see_smaller_blocks() -> None:
    """Kernels may want smaller blocks than vLLM's manager has: the memory is the same."""
    config, views, memory = laid_out("LBNHC", [["a", "b", "c"]])
    shape, strides = (2 * BLOCKS, HEADS, TOKENS // 2, CONTENT), (PAGE // 2, CONTENT, HEADS * CONTENT, 1)
    halved = {name: view.as_strided(shape, strides, view.storage_offset()) for name, view in views.items()}
    first = group_pages(config, halved)[0][1]
    first[2] = 9
    assert (views["b"][2] == 9).all()
    assert int((memory == 9).sum()) == PAGE


def test_padded_pages_of_mixed_size_inside_a_block() -> None:
    """Block-outside layouts pack pages of several sizes, with a gap at the end: the block is one run."""
    config = Config(BLOCKS, [Tensor(["a", "b"], 10, 64), Tensor(["c"], 30, 64, offset=20)], [Group(["a", "b", "c"])])
    memory = torch.zeros(BLOCKS * 64, dtype=torch.int8)
    starts = {"a": 0, "b": 10, "c": 20}
    views = {name: memory.as_strided((BLOCKS, 10), (64, 1), start) for name, start in starts.items()}
    assert [run.page_bytes for run in group_runs(config)[0]] == [64]
    (pages,) = group_pages(config, views)[0]
    pages[3] = 5
    assert (memory[3 * 64 : 4 * 64] == 5).all()
    assert int((memory == 5).sum()) == 64


def test_any_layer_leads_to_the_whole_block() -> None:
    """A group may name its layers in another order than its memory has them."""
    config, views, memory = laid_out("BLNHC", [["a", "b", "c"]])
    config.kv_cache_groups[0].layer_names = ["c", "a", "b"]
    (pages,) = group_pages(config, views)[0]
    pages[0] = 3
    assert (memory[: LAYERS * PAGE] == 3).all()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(4, [], [Group(["a"])]), "layers without memory"),
        (Config(4, [], [Group([])]), "no layer"),
        (Config(4, [Tensor(["a"], 4 * 16 + 8, 16)], [Group(["a"])]), "does not support this KV cache layout"),
    ],
)
def test_an_unknown_layout_is_refused(config: Config, words: str) -> None:
    """Guessing where bytes lie would serve wrong ones."""
    with pytest.raises(EngineProtocolError, match=words):
        group_runs(config)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (None, "expected one KV tensor, got NoneType"),
        (torch.zeros(4, 8, dtype=torch.int8), "4 blocks of 16 bytes were expected"),
        (torch.zeros(7, 16, dtype=torch.int8), "4 blocks of 16 bytes were expected"),
        (torch.zeros(99, dtype=torch.int8).as_strided((4, 8), (16, 1), 40), "bytes 40 to 104, but the memory has 99"),
    ],
)
def test_a_tensor_that_is_not_as_described_is_refused(tensor: object, words: str) -> None:
    """The description comes from the scheduler's side, the memory from the worker's: they must agree."""
    config = Config(4, [Tensor(["a"], 64, 16)], [Group(["a"])])
    with pytest.raises(EngineProtocolError, match=words):
        group_pages(config, {"a": tensor})


@pytest.mark.parametrize(("order", "rows"), [("LBHNC", 1), ("LBNHC", TOKENS)])
def test_pages_are_divided_where_the_heads_lie_as_the_shape_says(order: str, rows: int) -> None:
    """The tensor itself decides: a backend may use another order, other heads, or smaller blocks."""
    config, views, _ = laid_out(order, [["a", "b"]])
    right = GroupSpec(TOKENS, (PAGE, PAGE), heads=HEADS, head_rows=rows)
    check_heads(config, views, [right])
    others = [
        GroupSpec(TOKENS, (PAGE, PAGE), heads=HEADS, head_rows=TOKENS + 1 - rows),
        GroupSpec(TOKENS, (PAGE, PAGE), heads=2 * HEADS, head_rows=rows),
        GroupSpec(2 * TOKENS, (PAGE, PAGE), heads=HEADS, head_rows=rows),
    ]
    for wrong in others:
        with pytest.raises(EngineProtocolError, match=r"chunk\.parts: layer a .* remove chunk\.parts"):
            check_heads(config, views, [wrong])
