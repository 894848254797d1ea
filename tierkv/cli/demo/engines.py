"""The engines that the demo can serve with. No torch: the parent process never loads it."""

from __future__ import annotations

from dataclasses import replace

from tierkv.reference.configs import EngineConfig, ModelConfig

_TINY = ModelConfig(
    layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512, vocab=512, dtype="bfloat16"
)

MODELS = {
    "tiny": EngineConfig(model=_TINY, num_blocks=96, block_tokens=16, max_batched_tokens=256, max_running=4),
    # Two groups with a window of 64 tokens and one of full attention: 48 blocks hold a conversation, beside 10 for its
    # windows, and more only while a long prompt is computed.
    "hybrid": EngineConfig(
        model=replace(_TINY, layers=6, windows=(64, 64, None)),
        num_blocks=160, block_tokens=16, num_groups=3, max_batched_tokens=256, max_running=4,
    ),
}  # fmt: skip
"""By the name that the command line takes. Each pool is far too small for ten conversations: about three fit."""

TENSOR_PARALLEL_MAX = _TINY.kv_heads


def engine_of(model: str, tensor_parallel: int) -> EngineConfig:
    """The engine of a model, its heads split over ``tensor_parallel`` ranks. Several have processes for their copies.

    Raises:
        ValueError: they do not split so.
    """
    return replace(MODELS[model], tensor_parallel=tensor_parallel, worker_processes=tensor_parallel > 1)
