"""Location of a block's bytes in vLLM's KV memory, per group, and views of them. Nothing is copied.

vLLM allocates one run of bytes for all layers. ``KVCacheConfig.kv_cache_tensors`` gives the locations: the page of
layer ``l`` and block ``b`` begins at ``offset + l * layer_stride + b * block_stride``. Groups share the memory: a
block belongs to one group at a time. Two families of layouts are supported:

- *layer outside* (vLLM's default, and the layout that tierkv requests): each layer has its own region with consecutive
  pages. There is one run per layer, or one per layer and head where heads are also outside blocks.
- *block outside*: a block has the pages of all layers. There is one run for the group: the whole block.

So each run is ``[num_blocks, page_bytes]`` without gaps, as the workers' copies need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tierkv.errors import EngineProtocolError
from tierkv.types.engine import GroupSpec


class KVCacheTensor(Protocol):
    """Attributes read from vLLM's class of the same name."""

    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


class KVCacheConfig(Protocol):
    """Attributes read from vLLM's class of the same name."""

    num_blocks: int
    kv_cache_tensors: Sequence[Any]
    kv_cache_groups: Sequence[Any]


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of one size, one page per block."""

    layer: str
    """Layer whose tensor gives access to the memory."""
    start_bytes: int
    """Offset of the run from the first byte of that layer's block 0."""
    page_bytes: int
    """Bytes of one page."""


def group_runs(config: KVCacheConfig) -> list[list[PageRun]]:
    """Return the runs of each group, in the order of its layers. Scheduler and workers get equal results.

    Raises:
        EngineProtocolError: the layout of the memory is not supported. The message describes it.
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
        if tensor.layer_stride < region:  # block outside: the first layer gives access to all
            return [PageRun(layer, -(tensor.offset + index * tensor.layer_stride), tensor.block_stride)]
        if tensor.layer_stride % region:
            raise EngineProtocolError(
                f"layer {layer}: {tensor.layer_stride} bytes a layer are no multiple of {num_blocks} blocks of "
                f"{tensor.block_stride} bytes: tierkv does not support this KV cache layout"
            )
        parts = tensor.layer_stride // region  # more than one: heads outside blocks
        runs += [PageRun(layer, part * region, tensor.block_stride) for part in range(parts)]
    return runs


def group_pages(config: KVCacheConfig, kv_caches: Mapping[str, Any]) -> list[list[Any]]:
    """Return per group and run a ``[num_blocks, page_bytes]`` view of bytes (torch, uint8).

    Args:
        config: layout of the memory.
        kv_caches: vLLM's tensors by layer.

    Raises:
        EngineProtocolError: a layer has no tensor, several tensors, or one without the configured layout.
    """
    return [[_view(config.num_blocks, run, kv_caches) for run in runs] for runs in group_runs(config)]


def check_heads(config: KVCacheConfig, kv_caches: Mapping[str, Any], groups: Sequence[GroupSpec]) -> None:
    """Check that pages can be divided by heads as the shape of the engine says (``chunk.parts``).

    Args:
        config: layout of the memory.
        kv_caches: vLLM's tensors by layer, ``[num_blocks, heads, tokens, content]`` in some order of memory.
        groups: shape of each group.

    Raises:
        EngineProtocolError: a tensor has other heads, or has them in another order.
    """
    for group, shape in zip(config.kv_cache_groups, groups, strict=True):
        for layer in group.layer_names:
            tensor = kv_caches[layer]
            inner = tensor[0] if shape.head_rows == 1 else tensor[0].transpose(0, 1)  # heads before tokens, or behind
            expected = (config.num_blocks, shape.heads, shape.block_tokens)
            if tensor.dim() != len(expected) + 1 or tuple(tensor.shape[:3]) != expected or not inner.is_contiguous():
                raise EngineProtocolError(
                    f"chunk.parts: layer {layer} has a tensor of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}, which tierkv cannot divide into {shape.heads} heads; remove chunk.parts"
                )


def _view(num_blocks: int, run: PageRun, kv_caches: Mapping[str, Any]) -> object:
    import torch  # noqa: PLC0415 - the scheduler's side needs only sizes

    tensor = kv_caches.get(run.layer)
    if not isinstance(tensor, torch.Tensor):
        raise EngineProtocolError(f"layer {run.layer}: expected one KV tensor, got {type(tensor).__name__}")
    ratio, rest = divmod(tensor.shape[0], num_blocks)  # a backend may divide a block into several smaller ones
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
            f"layer {run.layer}: its pages are at bytes {first} to {stop}, but the memory has {storage.nbytes()}"
        )
    bare = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return bare.set_(storage, first, (num_blocks, run.page_bytes), (run.page_bytes, 1))
