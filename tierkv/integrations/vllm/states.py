"""Checks of layers, and descriptions of those that keep a state in place of keys and values, such as Mamba.

Other such layers are gated delta nets and short convolutions. Where vLLM caches prefixes (``mamba_cache_mode`` is
"align"), it keeps some of the states at the ends of blocks. The table of such a group names a block for each kept
state, and the null block for all others. A prompt step ends where a state is kept, or its kernel keeps the state behind
the last whole block. Decoding passes every block end.

So after the tokens of block ``k`` are computed, the block at position ``k`` has the state behind them. Nothing writes
to it until it is reused, and vLLM resumes other requests from it. tierkv stores and loads exactly these blocks.

This does not hold where drafted tokens move states between blocks, nor where vLLM keeps states inside a block at the
position of its end. Both settings are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheSpecKind,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from tierkv.errors import ConfigError

SERVED_KINDS = (
    KVCacheSpecKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION,
    KVCacheSpecKind.SLIDING_WINDOW,
    KVCacheSpecKind.SLIDING_WINDOW_MLA,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    KVCacheSpecKind.MAMBA,
)
"""Kinds of layers whose blocks are stored and loaded."""


def spec_of(group: Any) -> Any:  # noqa: ANN401 - vLLM's, which has no types here
    """Spec of a group; the first one where each layer has its own, as in vLLM's scheduler."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def check_group(what: str, group: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that another request can use the blocks of a group, and that they depend on no tokens behind them.

    Args:
        what: name of the group or of the layer, for the message.
        group: vLLM's ``KVCacheGroupSpec``.

    Raises:
        ConfigError: the group is not supported. The message names it and the fix.
    """
    spec = group.kv_cache_spec
    for one in spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,):
        _check_layers(what, group, one)


def _check_layers(what: str, group: Any, spec: Any) -> None:  # noqa: ANN401 - (the same)
    """Check the layers of a group that have one spec."""
    kind = get_kv_cache_spec_kind(group.kv_cache_spec)
    what = f"{what} ({type(spec).__name__})"
    cannot = "tierkv does not support this model yet; serve it without tierkv, by removing kv_transfer_config"
    if type(spec).__name__ == "RSWASpec":
        raise ConfigError(f"{what} drops tokens of an answer from its KV cache as the answer grows: {cannot}")
    if kind not in SERVED_KINDS:
        served = ", ".join(each.value for each in SERVED_KINDS)
        raise ConfigError(f"{what} is of the kind {kind.value!r}; supported kinds are {served}: {cannot}")
    if group.host_resident or not group.enable_kv_transfer or not spec.prefix_cacheable:
        raise ConfigError(f"{what} has data that no other request can use: {cannot}")
    if getattr(spec, "non_causal", False) or getattr(spec, "prefix_replay_tokens", 0):
        raise ConfigError(f"{what}: its blocks depend on tokens behind them: {cannot}")
    # A group that vLLM marks as a draft's is served. vLLM drops the last block of its own hits there, because a draft's
    # KV of a token knows the token behind it. The model checks each draft, so a full hit costs one draft at most.
    if getattr(spec, "extra_retained_tokens", 0):
        raise ConfigError(f"{what} is used for speculative decoding: remove speculative_config")


def keeps_state(group: Any) -> bool:  # noqa: ANN401 - (the same)
    """Whether the layers of a group keep a state."""
    return bool(get_kv_cache_spec_kind(group.kv_cache_spec) is KVCacheSpecKind.MAMBA)


def check_states(groups: Iterable[Any], hash_block_tokens: int) -> None:
    """Check that a state in a block is the one behind the block's tokens.

    Args:
        groups: vLLM's ``KVCacheGroupSpec`` of each group.
        hash_block_tokens: tokens per hash of a request.

    Raises:
        ConfigError: the engine's configuration is not supported. The message names the setting and the fix.
    """
    all_groups = list(groups)
    for group in all_groups:
        if keeps_state(group):
            check_state(spec_of(group), f"layer {group.layer_names[0]} keeps a state")
            check_sizes({spec_of(one).block_size for one in all_groups}, hash_block_tokens)


def check_state(spec: Any, what: str) -> None:  # noqa: ANN401 - (the same)
    """Check that vLLM keeps states for other requests, and does not move them.

    Args:
        spec: vLLM's ``MambaSpec``.
        what: first words of the message.

    Raises:
        ConfigError: the engine's configuration is not supported. The message names the setting and the fix.
    """
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"mamba_cache_mode = {spec.mamba_cache_mode!r}: {what}, and vLLM keeps none for other requests in this "
            f"mode; "
            "set enable_prefix_caching = True, and remove mamba_cache_mode"
        )
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"speculative_config: {what}, and vLLM moves states between blocks as drafted tokens are accepted; remove "
            "it for this model"
        )


def check_sizes(block_tokens: set[int], hash_block_tokens: int) -> None:
    """Check that an engine with states keeps none inside a block.

    Args:
        block_tokens: block sizes of all groups in tokens.
        hash_block_tokens: tokens per hash of a request.

    Raises:
        ConfigError: the engine's configuration is not supported. The message names the setting and the fix.
    """
    if block_tokens != {hash_block_tokens}:
        sizes = " and ".join(str(size) for size in sorted(block_tokens))
        raise ConfigError(
            f"prefix_match_unit = {hash_block_tokens} with blocks of {sizes} tokens: vLLM then also keeps states "
            "inside a block, which tierkv does not support yet; remove prefix_match_unit, and give all layers blocks "
            "of "
            "one size"
        )


def describe_states(groups: Iterable[Any]) -> list[Any]:
    """Describe the states of each group that has them: kind of layer, and shape and dtype of every part.

    The layout of a convolution's state (``VLLM_SSM_CONV_STATE_LAYOUT``) is visible in its shape.
    """
    specs = [spec_of(group) for group in groups if keeps_state(group)]
    return [
        [spec.mamba_type.name, [list(shape) for shape in spec.shapes], [str(dtype) for dtype in spec.dtypes]]
        for spec in specs
    ]


def layer_states(groups: Iterable[Any]) -> list[str]:
    """Describe the states of each group of vLLM's ``OffloadingConfig`` as text; empty for groups without states.

    To be called in a worker while vLLM sets it up, because it needs the layers. vLLM's ``OffloadingConnector`` takes
    layers of any kind for full attention that are derived from it.

    Raises:
        ConfigError: a layer is not supported (:func:`check_group`), or its states are not (:func:`check_state`).
    """
    vllm_config = get_current_vllm_config()
    layers = vllm_config.compilation_config.static_forward_context
    return [_states_of(vllm_config, {name: layers[name] for name in group.layer_names}) for group in groups]


def _states_of(vllm_config: Any, layers: Mapping[str, Any]) -> str:  # noqa: ANN401 - (the same)
    groups = [KVCacheGroupSpec([name], layer.get_kv_cache_spec(vllm_config)) for name, layer in layers.items()]
    for group in groups:
        check_group(f"layer {group.layer_names[0]}", group)
    kept = [group for group in groups if keeps_state(group)]
    for group in kept:
        check_state(group.kv_cache_spec, f"layer {group.layer_names[0]} keeps a state")
    described = [json.dumps(state) for state in describe_states(kept)]
    return " ".join(dict.fromkeys(described))
