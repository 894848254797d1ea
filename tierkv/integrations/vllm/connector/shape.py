"""Translation of vLLM's configuration into an :class:`EngineSpec`. Unsupported settings are refused by name.

Scheduler and workers derive equal results from their own copies of the configuration.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpecKind,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from tierkv.errors import ConfigError
from tierkv.integrations.vllm.device import device_words, named_backends
from tierkv.integrations.vllm.engine_checks import (
    check_cache,
    check_context,
    check_model,
    check_nodes,
    check_speculation,
)
from tierkv.integrations.vllm.identity.files import digest_of, model_name
from tierkv.integrations.vllm.identity.weights import revision_of, weights_words
from tierkv.integrations.vllm.pages import group_runs
from tierkv.integrations.vllm.states import check_group, check_states, describe_states, spec_of
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupKind, GroupSpec

_log = logging.getLogger(__name__)

_KINDS = {
    KVCacheSpecKind.FULL_ATTENTION: GroupKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION: GroupKind.FULL_ATTENTION,
    KVCacheSpecKind.SLIDING_WINDOW: GroupKind.SLIDING_WINDOW,
    KVCacheSpecKind.SLIDING_WINDOW_MLA: GroupKind.SLIDING_WINDOW,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION: GroupKind.CHUNKED_LOCAL,
    KVCacheSpecKind.MAMBA: GroupKind.SSM,
}

_DIVIDED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Attention whose pages hold keys and values of each head of a worker."""


def engine_spec(vllm_config: Any, kv_cache_config: Any) -> EngineSpec:  # noqa: ANN401 - vLLM's, which has no types here
    """Derive the engine's shape from vLLM's ``VllmConfig`` and ``KVCacheConfig``.

    Raises:
        ConfigError: the configuration is not supported. The message names the setting and the fix.
        EngineProtocolError: the layout of the KV memory is not supported.
    """
    _check_engine(vllm_config)
    check_cache(len(kv_cache_config.kv_cache_groups))
    check_model(vllm_config)
    check_speculation(vllm_config)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        check_group(f"KV cache group {index}, layers {_names(group.layer_names)}", group)
    check_context(vllm_config)
    hash_block_tokens = _hash_block_tokens(vllm_config, kv_cache_config)
    check_states(kv_cache_config.kv_cache_groups, hash_block_tokens)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    runs = group_runs(kv_cache_config)
    copies = int(getattr(kv_cache_config, "kv_tp_replicas", 1))  # the least of all layers
    worker_heads = int(model.get_total_num_kv_heads()) // vllm_config.parallel_config.world_size
    return EngineSpec(
        model=model_name(model.model),
        revision=revision_of(model),
        dtype=_dtype_name(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype),
        layout=_layout(vllm_config, kv_cache_config),
        groups=tuple(
            replace(
                _group_spec(group, tuple(run.page_bytes for run in runs[i])), copies=copies, heads=heads, head_rows=rows
            )
            for i, group in enumerate(kv_cache_config.kv_cache_groups)
            for heads, rows in [_heads(group, _kv_layout(cache, kv_cache_config), worker_heads)]
        ),
        hash_block_tokens=hash_block_tokens,
        num_workers=vllm_config.parallel_config.world_size,
        # Not data_parallel_rank: vLLM sets that to 0 where replicas need not step together.
        replica=vllm_config.parallel_config.data_parallel_index,
        capabilities=EngineCapabilities(
            worker_processes=True, prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching)
        ),
    )


def check_hash_seed(vllm_config: Any) -> bool:  # noqa: ANN401 - (the same)
    """Whether another process gets equal block hashes for equal tokens. Logs a warning if not.

    vLLM seeds hashes that are not cryptographic at random in each process, unless the environment variable
    PYTHONHASHSEED is set. Then no other process finds the stored chunks: there is no error, only misses.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("xxhash") or os.environ.get("PYTHONHASHSEED") is not None:
        return True
    _log.warning(
        "prefix_caching_hash_algo = %r: vLLM seeds these hashes at random in each process, so after a restart, and "
        "from other servers, no stored chunk will be found. Use --prefix-caching-hash-algo sha256 (or "
        "sha256_cbor), or set PYTHONHASHSEED to the same number everywhere",
        algorithm,
    )
    return False


# -- unsupported configurations ----------------------------------------------------------------------------------------


def _check_engine(vllm_config: Any) -> None:  # noqa: ANN401 - (the same)
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(
                f"{name} = {size}: tierkv supports engines whose workers all have every layer and every token; set it "
                "to 1 and use tensor_parallel_size"
            )
    check_nodes(vllm_config)


def _names(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


# -- namespace of the bytes --------------------------------------------------------------------------------------------


def _group_spec(group: Any, page_bytes: tuple[int, ...]) -> GroupSpec:  # noqa: ANN401 - (the same)
    spec = spec_of(group)
    kind = _KINDS[get_kv_cache_spec_kind(group.kv_cache_spec)]
    window = None
    if kind is GroupKind.SLIDING_WINDOW:
        window = get_kv_cache_spec_sliding_window(spec)
    elif kind is GroupKind.CHUNKED_LOCAL:
        window = spec.attention_chunk_size
    return GroupSpec(block_tokens=spec.block_size, page_bytes=page_bytes, kind=kind, window_tokens=window)


def _heads(group: Any, layout: str, heads: int) -> tuple[int, int]:  # noqa: ANN401 - (the same)
    """Heads in a page of one worker, and how often they follow each other; no heads if a page cannot be divided.

    Args:
        group: vLLM's ``KVCacheGroupSpec``.
        layout: name of the KV layout.
        heads: heads of the model by the number of workers; each worker has as many in every layer, or the layer's heads
            are not divided evenly.
    """
    spec = spec_of(group)
    rows = {"LBHNC": 1, "LBNHC": getattr(spec, "block_size", 0)}.get(layout, 0)
    if type(spec) not in _DIVIDED or not rows or spec.num_kv_heads != heads or spec.page_size_padded is not None:
        return 0, 1
    head_bytes = (spec.head_size + (spec.head_size_v or spec.head_size)) * spec.dtype.itemsize
    has_more = spec.real_page_size_bytes != spec.block_size * heads * head_bytes  # such as scales
    return (0, 1) if has_more or spec.kv_quant_mode.is_per_token_head else (heads, rows)


def _hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:  # noqa: ANN401 - (the same)
    """Tokens per hash of a request, as resolved by the engine core."""
    known = getattr(kv_cache_config, "hash_block_size", None)
    return int(known or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(vllm_config: Any, kv_cache_config: Any) -> str:  # noqa: ANN401 - (the same)
    """Describe further facts that the bytes of a page depend on, as one line of text.

    These are the resolved layout, the order of layers, and the device and attention backend, which arrange a page for
    their kernels. What :func:`.weights_words` names changes the values themselves.
    """
    cache = vllm_config.cache_config
    parts = {
        "kv": _kv_layout(cache, kv_cache_config),
        "layers": digest_of([list(group.layer_names) for group in kv_cache_config.kv_cache_groups]),
    }
    if states := describe_states(kv_cache_config.kv_cache_groups):
        parts["states"] = digest_of([states, bool(getattr(cache, "use_replayssm", False))])
    parts |= weights_words(vllm_config)
    words = [f"{name}={value}" for name, value in parts.items()]
    return " ".join([*words, device_words(named_backends(vllm_config))])


def _kv_layout(cache_config: Any, kv_cache_config: Any) -> str:  # noqa: ANN401 - (the same)
    return str(getattr(kv_cache_config, "kv_cache_layout", None) or cache_config.kv_cache_layout or "unknown")
