"""Where a block's bytes lie in vLLM's KV memory, per group, and views of them. Nothing is copied.

vLLM allocates one run of bytes and lays its layers into it; ``KVCacheConfig.kv_cache_tensors`` says where: page of
layer ``l`` and block ``b`` begins at ``offset + l * layer_stride + b * block_stride``. Groups overlay each other: a
block belongs to one group at a time. Two families of layouts matter here:

- *layer outside* (vLLM's default, and what tierkv asks for): a layer has a region of its own, its pages one after the
  other. One run a layer; where heads lie outside blocks too, one a layer and head.
- *block outside*: a block holds the pages of all layers. One run for the group: the whole block.

So each run is ``[num_blocks, page_bytes]`` without gaps, which is what the workers' copies want.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tierkv.errors import EngineProtocolError


class KVCacheTensor(Protocol):
    """What is read of vLLM's class of that name."""

    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


class KVCacheGroup(Protocol):
    """What is read of vLLM's ``KVCacheGroupSpec``."""

    layer_names: list[str]


class KVCacheConfig(Protocol):
    """What is read of vLLM's class of that name."""

    num_blocks: int
    kv_cache_tensors: Sequence[Any]
    kv_cache_groups: Sequence[Any]


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of one size, one behind the other, a page per block.

    layer: whose tensor leads to the memory. start_bytes: from the first byte of that layer's block 0 to the run's.
    page_bytes: of one block.
    """

    layer: str
    start_bytes: int
    page_bytes: int


def group_runs(config: KVCacheConfig) -> list[list[PageRun]]:
    """The runs of each group, in the order of its layers. Scheduler and workers find the same.

    Raises:
        EngineProtocolError: the memory is laid out in a way that tierkv does not know; says how.
    """
    places = {layer: (tensor, index) for tensor in config.kv_cache_tensors for index, layer in enumerate(tensor.layers)}
    return [_runs_of(group.layer_names, places, config.num_blocks) for group in config.kv_cache_groups]


def _runs_of(layers: Sequence[str], places: Mapping[str, tuple[KVCacheTensor, int]], num_blocks: int) -> list[PageRun]:
    missing = [layer for layer in layers if layer not in places]
    if missing or not layers:
        raise EngineProtocolError(f"a KV cache group has layers without memory of their own: {missing or 'no layer'}")
    runs: list[PageRun] = []
    for layer in layers:
        tensor, index = places[layer]
        region = tensor.block_stride * num_blocks
        if tensor.layer_stride < region:  # block outside: the first layer leads to all
            return [PageRun(layer, -(tensor.offset + index * tensor.layer_stride), tensor.block_stride)]
        if tensor.layer_stride % region:
            raise EngineProtocolError(
                f"layer {layer}: {tensor.layer_stride} bytes a layer are no multiple of {num_blocks} blocks of "
                f"{tensor.block_stride} bytes: tierkv does not know this KV cache layout"
            )
        parts = tensor.layer_stride // region  # more than one: heads outside blocks
        runs += [PageRun(layer, part * region, tensor.block_stride) for part in range(parts)]
    return runs


def group_pages(config: KVCacheConfig, kv_caches: Mapping[str, Any]) -> list[list[Any]]:
    """Per group, for each of its runs a ``[num_blocks, page_bytes]`` view of bytes (torch, uint8).

    Args:
        config: how the memory is laid out.
        kv_caches: vLLM's tensors by layer.

    Raises:
        EngineProtocolError: a layer has no tensor, several, or one that is not laid out as the configuration says.
    """
    return [[_view(config.num_blocks, run, kv_caches) for run in runs] for runs in group_runs(config)]


def _view(num_blocks: int, run: PageRun, kv_caches: Mapping[str, Any]) -> object:
    import torch  # noqa: PLC0415 - the scheduler's side needs the sizes only

    tensor = kv_caches.get(run.layer)
    if not isinstance(tensor, torch.Tensor):
        raise EngineProtocolError(f"layer {run.layer}: expected one KV tensor, got {type(tensor).__name__}")
    ratio, rest = divmod(tensor.shape[0], num_blocks)  # a backend may see a block as several smaller ones
    stride = tensor.stride(0) * tensor.element_size() * ratio
    if rest or stride != run.page_bytes:
        raise EngineProtocolError(
            f"layer {run.layer}: a tensor of shape {tuple(tensor.shape)} with {stride} bytes from block to block; "
            f"{num_blocks} blocks of {run.page_bytes} bytes were expected"
        )
    first = tensor.storage_offset() * tensor.element_size() + run.start_bytes
    storage = tensor.untyped_storage()
    stop = first + num_blocks * run.page_bytes
    if first < 0 or stop > storage.nbytes():
        raise EngineProtocolError(
            f"layer {run.layer}: its pages are said to lie at bytes {first} to {stop}, but the memory has "
            f"{storage.nbytes()}"
        )
    bare = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return bare.set_(storage, first, (num_blocks, run.page_bytes), (run.page_bytes, 1))
