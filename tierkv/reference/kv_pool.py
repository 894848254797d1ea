"""Memory of the paged KV pool."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tierkv.reference.configs import EngineConfig, ModelConfig

Allocate = Callable[[int], memoryview]
"""Allocates that number of writable zero bytes, for example of shared memory; they live as long as the view."""


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """The torch dtype of weights and KV."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def kv_tensors(config: EngineConfig, allocate: Allocate | None = None) -> list[Tensor]:
    """One rank's pool: contiguous tensors [num_blocks, 2 (K, V), block_tokens, kv_heads of the rank, head_dim].

    There are as many tensors as a group has layers: the i-th holds the i-th layer of the group that owns a block, as in
    vLLM. So a block that is read after it moved to another group shows foreign bytes, as it would there.

    Args:
        config: the engine's shape.
        allocate: allocates the memory, on the CPU; None: torch does, on the engine's device.
    """
    model = config.model
    kv_heads = model.kv_heads // config.tensor_parallel
    shape = (config.num_blocks, 2, config.block_tokens, kv_heads, model.head_dim)
    dtype = torch_dtype(model)

    def tensor() -> Tensor:
        if allocate is None:
            return torch.zeros(shape, dtype=dtype, device=config.device)
        return torch.frombuffer(allocate(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)

    return [tensor() for _ in range(model.layers // config.num_groups)]
