"""Prompts as users give them (a tensor of ids with a mask, or lists), and checks of the arguments of ``generate``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from tierkv.integrations.transformers.layers import Model, input_device

Inputs = torch.Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[torch.Tensor]
"""Token ids: [batch, columns] or [columns], or lists of prompts of any length."""

_HARMLESS = {
    *(
        "attention_mask",
        "cache",
        "cache_position",
        "input_ids",
        "kwargs",
        "labels",
        "logits_to_keep",
        "num_logits_to_keep",
    ),
    *("output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "return_dict"),
    *("use_cache",),
}
"""Arguments of a forward pass that do not change KV, or that are set here."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Left-padded prompts."""

    input_ids: torch.Tensor
    """Token ids, [batch, columns], on the model's input device."""
    attention_mask: torch.Tensor
    """Attention mask, [batch, columns], on the model's input device."""
    rows: tuple[tuple[int, ...], ...]
    """Tokens of each row without padding."""
    pads: tuple[int, ...]
    """Columns of padding at the left of each row."""

    @property
    def columns(self) -> int:
        """Length of the longest prompt."""
        return int(self.input_ids.shape[1])


def batch_of(model: Model, inputs: Inputs, attention_mask: torch.Tensor | None) -> Batch:
    """Convert prompts to a batch.

    Without a mask, leading padding tokens of the model count as padding, as in ``generate``.

    Raises:
        ValueError: a row has no token or one that the model does not know, padding is not at the left, or shapes
            differ.
    """
    device = input_device(model)
    pad_token = _pad_token(model)
    if not isinstance(inputs, torch.Tensor):
        if not hasattr(inputs, "__iter__"):
            raise ValueError(f"input_ids = {inputs!r:.80}: give lists of ids, or a tensor")
        if isinstance(inputs, str | Mapping) or any(isinstance(prompt, str) for prompt in inputs):
            raise ValueError("input_ids is text, or a tokenizer's whole result: give ids, as tokenizer(text).input_ids")
        inputs, mask = _padded(inputs, 0 if pad_token is None else pad_token)
        if attention_mask is not None:
            raise ValueError("attention_mask goes with a tensor of ids; prompts in lists are padded here")
    else:
        inputs = inputs.unsqueeze(0) if inputs.ndim == 1 else inputs
        has_ids = not (inputs.is_floating_point() or inputs.is_complex() or inputs.dtype == torch.bool)
        if inputs.ndim != 2 or not has_ids or not len(inputs):  # noqa: PLR2004 - batch and columns
            raise ValueError(f"input_ids of shape {tuple(inputs.shape)} {inputs.dtype}: give ids [batch, columns]")
        mask = _mask(inputs, attention_mask, pad_token)
    real = mask.to("cpu", torch.long)
    pads = tuple((real.shape[1] - real.sum(1)).tolist())
    for row, pad in enumerate(pads):
        if pad == real.shape[1]:
            raise ValueError(f"prompt {row} has no token")
        if real[row, :pad].any():
            raise ValueError(
                f"prompt {row} is not padded at the left, or has holes in its attention mask: use "
                'padding_side="left", as generate wants it'
            )
    _check_ids(model, inputs[real.to(inputs.device) != 0])
    rows = tuple(tuple(ids[pad:]) for ids, pad in zip(inputs.tolist(), pads, strict=True))
    return Batch(inputs.to(device), real.to(device), rows, pads)


def _check_ids(model: Model, ids: torch.Tensor) -> None:
    """Refuse ids without an embedding: on a GPU, looking one up ends all further work of the process."""
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    low, high = (int(bound) for bound in ids.aminmax())
    if isinstance(known, int) and (low < 0 or high >= known):
        raise ValueError(f"id {low if low < 0 else high}: the model knows ids from 0 to {known - 1}")


def _padded(prompts: Sequence[Any], pad_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    lists = [prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt for prompt in prompts]
    if not lists or not hasattr(lists[0], "__len__"):
        lists = [lists]
    for row, prompt in enumerate(lists):
        if not hasattr(prompt, "__len__") or not all(isinstance(token, Integral) for token in prompt):
            raise ValueError(
                f"prompt {row} has other values than ids: give lists of integers, or tensors of one dimension"
            )
    columns = max(map(len, lists))
    ids = [[pad_token] * (columns - len(one)) + list(one) for one in lists]
    mask = [[0] * (columns - len(one)) + [1] * len(one) for one in lists]
    return torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)


def _mask(inputs: torch.Tensor, given: torch.Tensor | None, pad_token: int | None) -> torch.Tensor:
    if given is not None:
        mask = given.unsqueeze(0) if given.ndim == 1 else given
        if mask.shape != inputs.shape:
            raise ValueError(f"attention_mask is {tuple(mask.shape)} and input_ids {tuple(inputs.shape)}: give equals")
        return mask != 0
    if pad_token is None:
        return torch.ones_like(inputs)
    return (inputs != pad_token).cummax(dim=1).values.long() if inputs.numel() else inputs


def _pad_token(model: Model) -> int | None:
    """Padding token of the model, unless it has another meaning."""
    settings = getattr(model, "generation_config", None)
    pad, eos = (getattr(settings, name, None) for name in ("pad_token_id", "eos_token_id"))
    ends = eos if isinstance(eos, list) else [eos]
    return pad if isinstance(pad, int) and pad not in ends else None


_NOT_WITH_A_PREFIX = {
    "assistant_model": "assisted decoding of transformers starts from an empty cache only",
    "prompt_lookup_num_tokens": "assisted decoding of transformers starts from an empty cache only",
    "assistant_early_exit": "assisted decoding of transformers starts from an empty cache only",
    "cache": "TieredPrefixCache.generate creates its own; call model.generate with yours",
    "cache_implementation": "the prefix is a DynamicCache",
    "custom_generate": "its use of a cache is unknown",
    "inputs": "pass token ids as input_ids",
    "past_key_values": "TieredPrefixCache.generate creates its own; call model.generate with yours",
    "prefill_chunk_size": "prompts are already computed in pieces: pass piece_tokens to TieredPrefixCache",
    "token_healing": "it changes the end of the prompt after the lookup",
}
"""Unsupported arguments of ``generate``, or settings of a generation config, with the reason."""


def check_arguments(model: Model, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that change KV without changing token ids, or that do not work with a filled cache.

    Raises:
        ValueError: an argument is not supported. The message names it and the fix.
    """
    if not hasattr(model, "generate"):
        raise ValueError(f"{type(model).__name__} has no language head to generate with; use load and prefill")
    for name, reason in _NOT_WITH_A_PREFIX.items():
        if value := _setting(model, arguments, name):
            shown = type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)[:80]
            raise ValueError(f"{name} = {shown} is not supported: {reason}. Remove it, or call model.generate")
    if _setting(model, arguments, "use_cache") is False:
        fix = "pass use_cache=True, or set it in model.generation_config; or call model.generate"
        raise ValueError(f"use_cache = False, and a prefix is a cache: {fix}")
    base = getattr(model, "get_base_model", lambda: model)()
    known = inspect.signature(base.forward).parameters.keys() - _HARMLESS
    for name in sorted(known & arguments.keys()):
        if arguments[name] is not None:
            raise ValueError(
                f"{name}: chunks are found by their token ids alone, and this argument changes KV without changing "
                "them. Remove it, or call model.generate"
            )


def expansion(model: Model, arguments: Mapping[str, Any]) -> int:
    """Number of rows that ``generate`` creates per prompt: beams, or sequences to return."""
    return max(_setting(model, arguments, name) or 1 for name in ("num_beams", "num_return_sequences"))


def rows_with_answers(model: Model, batch: Batch, out: Any, arguments: Mapping[str, Any]) -> list[tuple[int, ...]]:  # noqa: ANN401 - result of generate
    """Prompt and answer of each row, without padding behind shorter answers."""
    whole = (out if isinstance(out, torch.Tensor) else out.sequences).tolist()
    pad_token = _setting(model, arguments, "pad_token_id")
    rows = []
    for ids, pad in zip(whole, batch.pads, strict=True):
        end = len(ids)
        while end > batch.columns and ids[end - 1] == pad_token:
            end -= 1
        rows.append(tuple(ids[pad:end]))
    return rows


def _setting(model: Model, arguments: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - any value
    """Value of an argument of ``generate``: given, or from the given configuration, or from the model's."""
    settings = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = (arguments.get(name), *(getattr(setting, name, None) for setting in settings))
    return next((value for value in values if value is not None), None)
