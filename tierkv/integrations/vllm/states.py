"""Layers that keep a state in place of keys and values: Mamba, gated delta nets, short convolutions.

Where vLLM caches prefixes (``mamba_cache_mode`` "align"), it keeps some of the states that lie at the end of a block:
the table of such a group names a block for each of these, and the null block for all others. Prompts are cut so that a
step ends where a state is to be kept, and decoding passes every such place. So once the tokens of block ``k`` are
computed, the block at position ``k`` holds the state behind them, and nothing writes to it until it is handed out
again; from then on vLLM itself resumes other requests from it. That is what tierkv stores, and all that it loads.

It is not so where drafted tokens move states between blocks, and where vLLM also keeps states inside a block, which
then stand at the position of its end. Both are refused.
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


def spec_of(group: Any) -> Any:  # noqa: ANN401 - vLLM's, which has no types here
    """The group's spec; where its layers have one each, the first, as vLLM's own scheduler side has it."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def keeps_state(group: Any) -> bool:  # noqa: ANN401 - (the same)
    """Whether the layers of a group keep a state."""
    return bool(get_kv_cache_spec_kind(group.kv_cache_spec) is KVCacheSpecKind.MAMBA)


def check_states(groups: Iterable[Any], hash_block_tokens: int) -> None:
    """Make sure that a state in a block is the one behind the block's tokens.

    Args:
        groups: vLLM's ``KVCacheGroupSpec`` of each group.
        hash_block_tokens: tokens that one of a request's hashes covers.

    Raises:
        ConfigError: it is not; names the setting and the fix.
    """
    all_groups = list(groups)
    for group in all_groups:
        if keeps_state(group):
            check_state(spec_of(group), f"layer {group.layer_names[0]} keeps a state")
            check_sizes({spec_of(one).block_size for one in all_groups}, hash_block_tokens)


def check_state(spec: Any, what: str) -> None:  # noqa: ANN401 - (the same)
    """Make sure that vLLM keeps states for other requests, and leaves them where they are.

    Args:
        spec: vLLM's ``MambaSpec``.
        what: the first words of the message.

    Raises:
        ConfigError: it does not; names the setting and the fix.
    """
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"mamba_cache_mode = {spec.mamba_cache_mode!r}: {what}, and vLLM keeps none for other requests so; set "
            "enable_prefix_caching = True, and leave mamba_cache_mode out"
        )
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"speculative_config: {what}, and vLLM moves states between blocks as drafted tokens are accepted; leave "
            "it out for this model"
        )


def check_sizes(block_tokens: set[int], hash_block_tokens: int) -> None:
    """Make sure that an engine with states keeps none inside a block.

    Args:
        block_tokens: tokens of a block, of all groups.
        hash_block_tokens: tokens that one of a request's hashes covers.

    Raises:
        ConfigError: it does; names the setting and the fix.
    """
    if block_tokens != {hash_block_tokens}:
        sizes = " and ".join(str(size) for size in sorted(block_tokens))
        raise ConfigError(
            f"prefix_match_unit = {hash_block_tokens} with blocks of {sizes} tokens: vLLM then keeps states that lie "
            "inside a block, too, and tierkv does not serve that yet; leave prefix_match_unit out, and give all layers "
            "blocks of one size"
        )


def describe_states(groups: Iterable[Any]) -> list[Any]:
    """What the bytes of states mean: of each group that has them its kind of layer, and every part's shape and dtype.

    How vLLM lays out the state of a convolution (``VLLM_SSM_CONV_STATE_LAYOUT``) shows in its shape.
    """
    specs = [spec_of(group) for group in groups if keeps_state(group)]
    return [
        [spec.mamba_type.name, [list(shape) for shape in spec.shapes], [str(dtype) for dtype in spec.dtypes]]
        for spec in specs
    ]


def layer_states(groups: Iterable[Any]) -> list[str]:
    """The same in words, one for each group that vLLM's ``OffloadingConfig`` names; empty: it keeps no state.

    For a worker while vLLM sets it up: it has the layers themselves.

    Raises:
        ConfigError: see :func:`check_state`.
    """
    vllm_config = get_current_vllm_config()
    layers = vllm_config.compilation_config.static_forward_context
    return [_states_of(vllm_config, {name: layers[name] for name in group.layer_names}) for group in groups]


def _states_of(vllm_config: Any, layers: Mapping[str, Any]) -> str:  # noqa: ANN401 - (the same)
    groups = [KVCacheGroupSpec([name], layer.get_kv_cache_spec(vllm_config)) for name, layer in layers.items()]
    kept = [group for group in groups if keeps_state(group)]
    for group in kept:
        check_state(group.kv_cache_spec, f"layer {group.layer_names[0]} keeps a state")
    described = [json.dumps(state) for state in describe_states(kept)]
    return " ".join(dict.fromkeys(described))
