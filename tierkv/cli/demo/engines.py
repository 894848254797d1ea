"""Engines of the demo. Does not import torch, which the parent process never loads."""

from __future__ import annotations

from dataclasses import replace

from tierkv.reference.configs import EngineConfig, ModelConfig

_TINY = ModelConfig(
    layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512, vocab=512, dtype="bfloat16"
)

MODELS = {
    "tiny": EngineConfig(model=_TINY, num_blocks=96, block_tokens=16, max_batched_tokens=256, max_running=4),
    # Two groups with a window of 64 tokens and one with full attention: a conversation needs 48 blocks, and 10 for its
    # windows. It needs more only while a long prompt is computed.
    "hybrid": EngineConfig(
        model=replace(_TINY, layers=6, windows=(64, 64, None)),
        num_blocks=160, block_tokens=16, num_groups=3, max_batched_tokens=256, max_running=4,
    ),
}  # fmt: skip
"""Engines by name on the command line. Each pool is too small for ten conversations: about three fit."""

TENSOR_PARALLEL_MAX = _TINY.kv_heads


def engine_of(model: str, tensor_parallel: int) -> EngineConfig:
    """Engine of a model with its heads split over ranks. Several ranks have processes for their copies.

    Raises:
        ValueError: the heads cannot be split evenly.
    """
    return replace(MODELS[model], tensor_parallel=tensor_parallel, worker_processes=tensor_parallel > 1)
