"""Identity of SGLang's pages: the engine's shape as its pools and its storage configuration state it.

SGLang's storage configuration names neither the type of KV values nor the revision of the model. The type is read from
the pools; the revision or an epoch must be given, otherwise pages of old weights would be found after an update.
Does not import SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tierkv.config.schema import StackConfig
from tierkv.errors import ConfigError
from tierkv.integrations.sglang.pages import HostPool, PoolPages
from tierkv.types.engine import EngineSpec, GroupSpec

StorageConfig: TypeAlias = Any
"""SGLang's ``HiCacheStorageConfig``."""

_UNTYPED = frozenset({"torch.uint8", "torch.int8", "None"})
"""Types of pools that name no number format: SGLang keeps 8-bit floats as plain bytes."""

# Attributes of pools that change the meaning of their bytes, where a pool has them.
_SHAPE = ("layout", "layer_num", "start_layer", "end_layer", "head_num", "head_group_num", "head_dim", "v_head_dim")
_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "dtype", "storage_format_tag")


def engine_spec(
    config: StackConfig,
    storage: StorageConfig,
    pools: Sequence[tuple[str, HostPool, PoolPages]],
    options: Mapping[str, Any],
) -> EngineSpec:
    """Return the engine's shape.

    Args:
        config: description of the stack.
        storage: SGLang's ``HiCacheStorageConfig``.
        pools: name, pool and pages of each host pool; the first one holds the KV.
        options: options of the adapter, from SGLang's extra configuration.

    Raises:
        ConfigError: neither a revision nor an epoch is given, the model or the type of values has no name, or a chunk
            is not one page.
    """
    named = config.namespace
    model = named.model or storage.model_name
    revision = named.revision or str(options.get("revision") or "")
    if not revision and "epoch" not in named.model_fields_set:
        raise ConfigError(
            "SGLang does not say which revision of the model it serves, so pages of other weights would be loaded: "
            'give "revision" in --hicache-storage-backend-extra-config, or revision or epoch in [namespace] of the '
            "stack description"
        )
    if not model:
        raise ConfigError("SGLang gave no model name: set model in [namespace] of the stack description")
    page_size = pools[0][2].page_size
    if config.chunk.blocks not in {None, 1} or config.chunk.tokens not in {None, page_size}:
        raise ConfigError(
            f"[chunk] has blocks = {config.chunk.blocks}, tokens = {config.chunk.tokens}: SGLang stores single pages; "
            "leave the table out and set --page-size"
        )
    dtype = str(options.get("dtype") or "")
    if not dtype and any(str(getattr(pool, "dtype", None)) in _UNTYPED for _, pool, _ in pools):
        raise ConfigError(
            "the host pool holds KV values as plain bytes, so SGLang does not say which 8-bit format they have: give "
            '"dtype" in --hicache-storage-backend-extra-config, with the value of --kv-cache-dtype'
        )
    rank, world_size = _rank(storage)
    return EngineSpec(
        model=model,
        revision=revision,
        dtype=",".join([dtype, *(str(getattr(pool, "dtype", None)) for _, pool, _ in pools)]).lstrip(","),
        layout="sglang " + ";".join(_pool_shape(name, pool) for name, pool, _ in pools) + _split(storage),
        groups=tuple(GroupSpec(page_size, pages.piece_bytes) for _, _, pages in pools),
        hash_block_tokens=page_size,
        rank=rank,
        world_size=world_size,
        replica=storage.dp_rank,
    )


def _pool_shape(name: str, pool: HostPool) -> str:
    facts = [f"{field}={getattr(pool, field)}" for field in _SHAPE + _LATENT if getattr(pool, field, None) is not None]
    return f"{name}:{type(pool).__name__}({','.join(facts)},page={pool.page_size})"


def _split(storage: StorageConfig) -> str:
    """Return how heads and pages are divided among ranks."""
    return f" latent={storage.is_mla_model} heads={storage.should_split_heads}/{storage.tp_lcm_size}"


def _rank(storage: StorageConfig) -> tuple[int, int]:
    """Number of this rank's share of the model, and number of shares.

    Ranks of tensor parallelism hold equal pages of latent attention, so these have one share, which one rank writes.
    """
    rank, size = (storage.dcp_rank, storage.dcp_size) if storage.is_mla_model else (storage.tp_rank, storage.tp_size)
    for inner_rank, inner_size in (
        (storage.pp_rank, storage.pp_size),
        (storage.attn_cp_rank, storage.attn_cp_size),
    ):
        rank, size = rank * inner_size + inner_rank, size * inner_size
    return rank, size
