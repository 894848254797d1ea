"""Shape of a model's KV cache, measured in one short forward pass, because a configuration does not contain it.

Number of heads, head sizes (which differ between K and V in some models), dtype, device and windows are read from the
``DynamicCache`` that the model fills. Models whose cache has other data than K and V per token are refused by name.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tierkv.errors import ConfigError
from tierkv.types.engine import GroupKind, GroupSpec

Model = Any
"""A model of transformers, possibly wrapped by PEFT. Untyped, because types are checked without transformers."""
ModelConfig = Any
ModelCache = Any
CacheLayer = Any

PROBE_TOKENS = 3
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_DEPENDS_ON_PIECES = ("moshi", "kyutai_speech_to_text")
"""Models of transformers whose mask has no window, although their cache keeps one."""
_INSTEAD = "use model.generate without a prefix cache for it"


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer."""

    window: int | None
    """Tokens that a token attends to, itself included; None: all."""
    key: tuple[int, int]
    """Heads and head size of K."""
    value: tuple[int, int]
    """Heads and head size of V."""
    device: torch.device
    """Device of the layer's cache."""

    @property
    def token_values(self) -> int:
        """Number of values that the layer keeps per token."""
        return self.key[0] * self.key[1] + self.value[0] * self.value[1]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with equal attention: all tokens (``window`` None) or a window."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvShape:
    """All layers and their groups: full attention first, then by window, widest first."""

    layers: tuple[KvLayer, ...]
    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, layers: tuple[KvLayer, ...], dtype: torch.dtype) -> KvShape:
        """Group layers by window."""
        windows = sorted({layer.window for layer in layers}, key=lambda window: (window is not None, -(window or 0)))
        groups = tuple(
            LayerGroup(window, tuple(i for i, layer in enumerate(layers) if layer.window == window))
            for window in windows
        )
        return cls(layers, groups, dtype)

    @property
    def has_windows(self) -> bool:
        """Whether some layer has a window."""
        return any(group.window is not None for group in self.groups)

    def token_bytes(self, group: LayerGroup) -> int:
        """Bytes per token of a group."""
        return sum(self.layers[i].token_values for i in group.layers) * self.dtype.itemsize

    def page_shapes(self, group: LayerGroup, block_tokens: int) -> list[tuple[int, int, int]]:
        """Tokens, heads and head size of one block, per tensor of a group: K and V of each layer in turn."""
        pairs = [(self.layers[i].key, self.layers[i].value) for i in group.layers]
        return [(block_tokens, *sizes) for pair in pairs for sizes in pair]

    def group_specs(self, block_tokens: int) -> tuple[GroupSpec, ...]:
        """Groups as values of tierkv's core."""
        return tuple(
            GroupSpec(
                block_tokens,
                tuple(
                    tokens * heads * size * self.dtype.itemsize
                    for tokens, heads, size in self.page_shapes(group, block_tokens)
                ),
                GroupKind.FULL_ATTENTION if group.window is None else GroupKind.SLIDING_WINDOW,
                group.window,
            )
            for group in self.groups
        )


def text_config(model: Model) -> ModelConfig:
    """Configuration of the part of the model that generates text."""
    return model.config.get_text_config(decoder=True)


def rope_text(config: ModelConfig) -> str:
    """Settings of the rotary embeddings as text, under both names of transformers' versions."""
    return json.dumps([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")], default=str)


def input_device(model: Model) -> torch.device:
    """Device of the model's token ids."""
    device: torch.device = model.get_input_embeddings().weight.device
    return model.device if device.type == "meta" else device


def forward_options(model: Model) -> dict[str, Any]:
    """Arguments that avoid the computation of unused logits, where the model supports them."""
    base = getattr(model, "get_base_model", lambda: model)()
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(base.forward).parameters else {}


def cache_option(model: Model, cache: object) -> dict[str, Any]:
    """Argument by which a forward pass, and ``generate``, take a cache: transformers renamed it in 5.24."""
    base = getattr(model, "get_base_model", lambda: model)()
    name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
    return {name: cache}


def kv_shape(model: Model) -> KvShape:
    """Run the model over a few tokens and measure the cache that it fills.

    Raises:
        ConfigError: the model is not supported. The message gives the reason and the fix.
    """
    name = type(model).__name__
    _check_model(model, name)
    size = text_config(model).vocab_size
    rows = [[0, 1 % size, 2 % size], [0, 1 % size, 3 % size]]
    cache = DynamicCache(config=model.config)
    ids = torch.tensor(rows, device=input_device(model))
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **cache_option(model, cache), **forward_options(model))
    for number, layer in enumerate(cache.layers):
        _check_layer(layer, f"{name}: layer {number} of its KV cache", name)
    if not cache.layers:
        raise ConfigError(f"{name} fills no KV cache; {_INSTEAD}")
    _check_causal(cache, name)
    _check_continues(model, cache, name)
    dtypes = {tensor.dtype for layer in cache.layers for tensor in (layer.keys, layer.values)}
    if len(dtypes) > 1:
        raise ConfigError(f"{name}: its KV cache mixes {sorted(map(str, dtypes))}; {_INSTEAD}")
    return KvShape.of(tuple(map(_layer, cache.layers)), dtypes.pop())


def _check_model(model: Model, name: str) -> None:
    if getattr(model, "config", None) is None or not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f"{name} is no model of transformers; pass one, for example from AutoModelForCausalLM")
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"{name} is an encoder-decoder model: its decoder's cache depends on the encoder's input, not on a "
            f"prefix of tokens. Only decoder models are supported; {_INSTEAD}"
        )
    if "mrope_section" in rope_text(text_config(model)):
        raise ConfigError(
            f"{name} has positions of several dimensions (mrope), and keeps a part of them outside its KV cache "
            f"between calls; {_INSTEAD}"
        )
    if text_config(model).model_type in _DEPENDS_ON_PIECES:
        raise ConfigError(
            f"{name} attends to all tokens of a forward pass, but its KV cache only keeps a window of them: KV depends "
            f"on the pieces in which a prompt is computed; {_INSTEAD}"
        )
    others = sorted(set(getattr(text_config(model), "layer_types", None) or ()) - set(_ATTENTION))
    if others or getattr(model, "_is_stateful", False):
        kinds = f"layers of type {', '.join(others)}" if others else "layers that keep a state"
        raise ConfigError(
            f"{name} has {kinds}, whose state is not K and V per token. Supported are {', '.join(_ATTENTION)}; "
            f"{_INSTEAD}"
        )
    check_evaluates(model)


def check_evaluates(model: Model) -> None:
    """Refuse a model in training mode.

    Raises:
        ConfigError: the model is in training mode.
    """
    if model.training:
        raise ConfigError(f"{type(model).__name__} is in training mode, where dropout makes KV random: model.eval()")


def _check_layer(layer: CacheLayer, what: str, name: str) -> None:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise ConfigError(
            f"{what} is a {type(layer).__name__}; supported are DynamicLayer and DynamicSlidingWindowLayer, which have "
            f"K and V of each token; {_INSTEAD}"
        )
    if layer.keys is None or layer.get_seq_length() != PROBE_TOKENS:
        raise ConfigError(f"{what} was not filled by a forward pass of {PROBE_TOKENS} tokens; {_INSTEAD}")
    if layer.keys.ndim != 4 or layer.values.ndim != 4:  # noqa: PLR2004 - batch, heads, tokens, head size
        raise ConfigError(f"{what} holds tensors of shape {tuple(layer.keys.shape)} and {name} is unknown; {_INSTEAD}")
    if getattr(layer, "sliding_window", 2) < 2:  # noqa: PLR2004 - transformers keeps one token less than the window
        raise ConfigError(f"{what} has a window of {layer.sliding_window} token; {_INSTEAD}")


def _check_continues(model: Model, cache: ModelCache, name: str) -> None:
    """Check that the model computes several tokens behind a filled cache, as pieces of a prompt are computed."""
    ids = torch.tensor([[0, 1 % text_config(model).vocab_size]] * 2, device=input_device(model))
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **cache_option(model, cache), **forward_options(model))
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} does not compute several tokens behind a filled KV cache ({error}), as a prompt behind its prefix "
            f"is computed; {_INSTEAD}"
        ) from error


def positions_skip_padding(model: Model) -> bool:
    """Whether ``generate`` numbers the tokens of a left-padded row as if there were no padding.

    It does so for models that take ``position_ids``. Others number them from the attention mask, or by their columns;
    then the KV of a padded row is not that of its tokens alone. Measured in two short forward passes.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    if "position_ids" in inspect.signature(base.forward).parameters:
        return True
    size, device = text_config(model).vocab_size, input_device(model)
    keys = []
    for pads in (0, 1):
        ids = torch.tensor([[0] * pads + [1 % size, 2 % size]], device=device)
        mask = torch.tensor([[0] * pads + [1, 1]], device=device)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, use_cache=True, **cache_option(model, cache))
        keys.append([layer.keys[:, :, -1:] for layer in cache.layers])
    return all(_are_equal(alone, padded) for alone, padded in zip(*keys, strict=True))


def _are_equal(keys: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether K of two passes is equal up to rounding."""
    rounding = max(1e-4, 4 * torch.finfo(keys.dtype).eps)
    return bool((keys.float() - others.float()).norm() <= rounding * keys.float().norm())


def _check_causal(cache: ModelCache, name: str) -> None:
    """Check that K of the first tokens does not depend on later tokens. Otherwise no prefix could be reused."""
    keys = cache.layers[-1].keys[:, :, :-1]
    if not _are_equal(keys[0], keys[1]):
        raise ConfigError(
            f"{name} attends to later tokens: K and V of a prefix depend on what follows it, so they cannot be reused "
            f"before another text; {_INSTEAD}"
        )


def _layer(layer: CacheLayer) -> KvLayer:
    keys, values = layer.keys, layer.values
    return KvLayer(
        window=getattr(layer, "sliding_window", None),
        key=(keys.shape[1], keys.shape[3]),
        value=(values.shape[1], values.shape[3]),
        device=keys.device,
    )
