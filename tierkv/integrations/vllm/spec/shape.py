"""What a vLLM engine looks like to tierkv at the spec seam: all that ``OffloadingConfig`` tells, and no more.

The scheduler's side is told the bytes of a block, not how they are spread over layers; and vLLM 0.32 does not tell what
a group attends to. So each group has one page per block here, of all its bytes, and the workers, who see the tensors,
fill it. What the pages mean is part of the namespace all the same: the model and its layers by group, the KV layout,
the number format, what states are (which a worker tells: :mod:`~.notes`), the device, and how many workers share a
block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierkv.config.schema import StackConfig
from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.types.engine import EngineSpec, GroupKind, GroupSpec
from tierkv.types.geometry import Geometry

VLLM_KEYS = frozenset({
    "spec_name", "spec_module_path", "blocks_per_chunk", "block_size", "offload_prompt_only", "canonical_layout",
    "self_describing_kv_events", "sync_load_budget_bytes",
})  # fmt: skip
"""Keys that vLLM itself reads beside ours in ``kv_connector_extra_config``."""


def offloading_engine(config: Any, device: str, states: Sequence[str]) -> EngineSpec:  # noqa: ANN401 - vLLM's, which has no types here
    """The engine's shape.

    Args:
        config: vLLM's ``OffloadingConfig``.
        device: what else the bytes of a page depend on; see :func:`~tierkv.integrations.vllm.device.device_words`.
        states: per group what its states are, in words; empty: it keeps none. See :mod:`~.notes`.
    """
    parallel = config.parallel
    words = ["offloading", f"kv={config.kv_cache_layout or 'unknown'}"]
    words.append(f"layers={_digest([list(group.layer_names) for group in config.groups])}")
    if any(states):
        words.append(f"states={_digest(list(states))}")
    return EngineSpec(
        model=config.model.name,
        dtype=config.model.dtype,
        layout=" ".join([*words, device]),
        groups=tuple(_group(group, config, state) for group, state in zip(config.groups, states, strict=True)),
        hash_block_tokens=config.cache.tokens_per_hash,
        num_workers=parallel.world_size,
        replica=parallel.data_parallel_index,
    )


def check_engine(config: Any) -> None:  # noqa: ANN401 - (the same)
    """Make sure that an engine with this ``OffloadingConfig`` can be served.

    Raises:
        ConfigError: the engine is configured in a way that cannot be served correctly; names the setting and the fix.
    """
    parallel = config.parallel
    for name in ("pp_size", "pcp_size", "dcp_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise ConfigError(
                f"{name} = {size}: tierkv serves engines whose workers all hold every layer and every token; set it to "
                "1 and use tensor_parallel_size"
            )
    if config.canonical_layout:
        raise ConfigError("canonical_layout = True: tierkv stores pages as the workers have them; leave the key out")
    if config.worker_kv_bytes_per_block <= 0:
        raise ConfigError("vLLM tells no size of a KV block: tierkv cannot serve this model at this seam")


def _group(group: Any, config: Any, state: str) -> GroupSpec:  # noqa: ANN401 - (the same)
    page_bytes = (config.worker_kv_bytes_per_block,)
    if state:
        return GroupSpec(group.tokens_per_block, page_bytes, GroupKind.SSM)
    window = getattr(group, "sliding_window_size_in_chunks", None)  # vLLM 0.33 tells
    if window is None:
        return GroupSpec(group.tokens_per_block, page_bytes)
    tokens = window * group.tokens_per_block * config.cache.blocks_per_chunk
    return GroupSpec(group.tokens_per_block, page_bytes, GroupKind.SLIDING_WINDOW, tokens)


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def chunked(config: Any, stack: StackConfig) -> Any:  # noqa: ANN401 - (the same)
    """The same ``OffloadingConfig`` with the stack's chunk, which is the one that counts.

    Raises:
        ConfigError: vLLM was told of another size, or of other stores, than the stack.
    """
    groups = tuple(GroupSpec(group.tokens_per_block, (1,)) for group in config.groups)
    shape = EngineSpec(model="", dtype="", groups=groups, hash_block_tokens=config.cache.tokens_per_hash)
    blocks = Geometry.of(shape, blocks=stack.chunk.blocks, tokens=stack.chunk.tokens).blocks_per_chunk
    told = config.cache.blocks_per_chunk
    for key in ("blocks_per_chunk", "block_size"):
        if key in config.extra_config and told != blocks:
            raise ConfigError(
                f"kv_connector_extra_config.{key} = {config.extra_config[key]!r} is {told} blocks per chunk, but the "
                f"stack's chunk has {blocks}: leave {key} out, tierkv.chunk is enough"
            )
    prompt_only = config.extra_config.get("offload_prompt_only")
    if prompt_only is not None and bool(prompt_only) != stack.store.prompt_only:
        raise ConfigError(
            f"kv_connector_extra_config.offload_prompt_only = {prompt_only!r}, but the stack's store.prompt_only is "
            f"{stack.store.prompt_only}: leave offload_prompt_only out"
        )
    rescaled = tuple(_rescaled(group, told, blocks) for group in config.groups)
    return replace(config, groups=rescaled, cache=replace(config.cache, blocks_per_chunk=blocks))


def _rescaled(group: Any, told: int, blocks: int) -> Any:  # noqa: ANN401 - (the same)
    """VLLM 0.33 gives windows in chunks of the size that it was told; blocks are what the two sizes share."""
    window = getattr(group, "sliding_window_size_in_chunks", None)
    if window is None:
        return group
    return replace(group, sliding_window_size_in_chunks=max(1, -(-window * told // blocks)))


def with_pages(geometry: Geometry, group_pages: Sequence[Sequence[Any]]) -> Geometry:
    """The worker's view of the same chunks: the pages that it really has, in a part as long as all agreed on.

    Args:
        geometry: of the stack.
        group_pages: per group, its tensors as ``[num_blocks, page_bytes]`` bytes.

    Raises:
        EngineProtocolError: the tensors have more bytes per block than vLLM told.
    """
    if len(group_pages) != len(geometry.groups):
        raise EngineProtocolError(
            f"vLLM registers KV tensors of {len(group_pages)} groups, its scheduler told of {len(geometry.groups)}"
        )
    groups = []
    for group, pages in zip(geometry.groups, group_pages, strict=True):
        page_bytes = tuple(page.shape[1] for page in pages)
        if sum(page_bytes) * geometry.blocks_per_chunk > group.worker_bytes:
            raise EngineProtocolError(
                f"group {group.index}: the KV tensors have {sum(page_bytes)} bytes per block, vLLM's scheduler told of "
                f"{group.worker_bytes // geometry.blocks_per_chunk}"
            )
        groups.append(replace(group, page_bytes=page_bytes))
    return replace(geometry, groups=tuple(groups))


def config_labels(stack: Mapping[str, str | int]) -> dict[str, str | int]:
    """What vLLM 0.33 publishes of the stack, as labels."""
    return {f"tierkv_{name}": value for name, value in stack.items()}
