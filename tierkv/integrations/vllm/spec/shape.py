"""Translation of vLLM's ``OffloadingConfig`` into an :class:`EngineSpec`, for the spec.

The scheduler's side gets the bytes per block, but not their distribution over layers. vLLM 0.32 does not describe the
attention of a group either. So each group has one page per block with all its bytes, and the workers, which have the
tensors, fill it. The meaning of the pages is still part of the namespace: the model and its layers by group, the KV
layout, the number format, states and weights (described by a worker: :mod:`~.notes`), the device, and the number
of workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierkv.config.schema import StackConfig
from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.integrations.vllm.identity.files import model_name
from tierkv.integrations.vllm.spec.notes import Noted
from tierkv.types.engine import EngineSpec, GroupKind, GroupSpec
from tierkv.types.geometry import Geometry

VLLM_KEYS = frozenset({
    "spec_name", "spec_module_path", "blocks_per_chunk", "block_size", "offload_prompt_only", "canonical_layout",
    "self_describing_kv_events", "sync_load_budget_bytes",
})  # fmt: skip
"""Keys that vLLM itself reads in ``kv_connector_extra_config``."""


def offloading_engine(config: Any, device: str, noted: Noted) -> EngineSpec:  # noqa: ANN401 - vLLM's, which has no types here
    """Derive the engine's shape.

    Args:
        config: vLLM's ``OffloadingConfig``.
        device: result of :func:`~tierkv.integrations.vllm.device.device_words`.
        noted: the first worker's note about states and weights.
    """
    parallel = config.parallel
    words = ["offloading", f"kv={config.kv_cache_layout or 'unknown'}"]
    copies = (
        parallel.world_size if getattr(config, "replicated_layout", False) else 1
    )  # with latent attention in all layers
    words.append(f"layers={_digest([list(group.layer_names) for group in config.groups])}")
    if any(noted.states):
        words.append(f"states={_digest(list(noted.states))}")
    if noted.words:
        words.append(noted.words)
    return EngineSpec(
        model=model_name(config.model.name),
        revision=noted.revision,
        dtype=config.model.dtype,
        layout=" ".join([*words, device]),
        groups=tuple(
            replace(_group(group, config, state), copies=copies)
            for group, state in zip(config.groups, noted.states, strict=True)
        ),
        hash_block_tokens=config.cache.tokens_per_hash,
        num_workers=parallel.world_size,
        replica=parallel.data_parallel_index,
    )


def check_engine(config: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that tierkv supports an engine with this ``OffloadingConfig``.

    Raises:
        ConfigError: the configuration is not supported. The message names the setting and the fix.
    """
    parallel = config.parallel
    for name in ("pp_size", "pcp_size", "dcp_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise ConfigError(
                f"{name} = {size}: tierkv supports engines whose workers all have every layer and every token; set it "
                "to 1 and use tensor_parallel_size"
            )
    if config.canonical_layout:
        raise ConfigError("canonical_layout = True: tierkv stores pages as the workers have them; remove the key")
    if config.worker_kv_bytes_per_block <= 0:
        raise ConfigError("vLLM reports no size of a KV block: TierKVSpec does not support this model")


def _group(group: Any, config: Any, state: str) -> GroupSpec:  # noqa: ANN401 - (the same)
    page_bytes = (config.worker_kv_bytes_per_block,)
    if state:
        return GroupSpec(group.tokens_per_block, page_bytes, GroupKind.SSM)
    window = getattr(group, "sliding_window_size_in_chunks", None)  # set by vLLM 0.33
    if window is None:
        return GroupSpec(group.tokens_per_block, page_bytes)
    tokens = window * group.tokens_per_block * config.cache.blocks_per_chunk
    return GroupSpec(group.tokens_per_block, page_bytes, GroupKind.SLIDING_WINDOW, tokens)


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def with_stack_chunks(config: Any, stack: StackConfig) -> Any:  # noqa: ANN401 - (the same)
    """Return the ``OffloadingConfig`` with the stack's chunk size, which takes precedence.

    Raises:
        ConfigError: vLLM's settings for chunk size or stores contradict the stack, or the stack divides chunks.
    """
    if stack.chunk.parts is not None:
        raise ConfigError(
            f"chunk.parts = {stack.chunk.parts}: vLLM does not describe the heads of a page to TierKVSpec; remove "
            "chunk.parts, or use TierKVConnector"
        )
    groups = tuple(GroupSpec(group.tokens_per_block, (1,)) for group in config.groups)
    shape = EngineSpec(model="", dtype="", groups=groups, hash_block_tokens=config.cache.tokens_per_hash)
    blocks = Geometry.of(shape, blocks=stack.chunk.blocks, tokens=stack.chunk.tokens).blocks_per_chunk
    given = config.cache.blocks_per_chunk
    for key in ("blocks_per_chunk", "block_size"):
        if key in config.extra_config and given != blocks:
            raise ConfigError(
                f"kv_connector_extra_config.{key} = {config.extra_config[key]!r} is {given} blocks per chunk, but the "
                f"stack's chunk has {blocks}: remove {key}, because tierkv.chunk is enough"
            )
    prompt_only = config.extra_config.get("offload_prompt_only")
    if prompt_only is not None and bool(prompt_only) != stack.store.prompt_only:
        raise ConfigError(
            f"kv_connector_extra_config.offload_prompt_only = {prompt_only!r}, but the stack's store.prompt_only is "
            f"{stack.store.prompt_only}: remove offload_prompt_only"
        )
    rescaled = tuple(_rescaled(group, given, blocks) for group in config.groups)
    return replace(config, groups=rescaled, cache=replace(config.cache, blocks_per_chunk=blocks))


def _rescaled(group: Any, given: int, blocks: int) -> Any:  # noqa: ANN401 - (the same)
    """Convert the window of a group from vLLM's chunks (0.33) to the stack's, through blocks."""
    window = getattr(group, "sliding_window_size_in_chunks", None)
    if window is None:
        return group
    return replace(group, sliding_window_size_in_chunks=max(1, -(-window * given // blocks)))


def with_pages(geometry: Geometry, group_pages: Sequence[Sequence[Any]]) -> Geometry:
    """Return the geometry with the real pages of a worker. The size of a worker's part stays the agreed one.

    Args:
        geometry: geometry of the stack.
        group_pages: per group, its tensors as ``[num_blocks, page_bytes]`` bytes.

    Raises:
        EngineProtocolError: the tensors have more bytes per block than vLLM reported.
    """
    if len(group_pages) != len(geometry.groups):
        raise EngineProtocolError(
            f"vLLM registers KV tensors of {len(group_pages)} groups, its scheduler has {len(geometry.groups)}"
        )
    groups = []
    for group, pages in zip(geometry.groups, group_pages, strict=True):
        page_bytes = tuple(page.shape[1] for page in pages)
        if sum(page_bytes) * geometry.blocks_per_chunk > group.worker_bytes:
            raise EngineProtocolError(
                f"group {group.index}: the KV tensors have {sum(page_bytes)} bytes per block, vLLM's scheduler has "
                f"{group.worker_bytes // geometry.blocks_per_chunk}"
            )
        groups.append(replace(group, page_bytes=page_bytes))
    return replace(geometry, groups=tuple(groups))


def config_labels(stack: Mapping[str, str | int]) -> dict[str, str | int]:
    """Labels of the stack for the info metric of vLLM 0.33."""
    return {f"tierkv_{name}": value for name, value in stack.items()}
