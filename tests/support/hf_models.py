"""Tiny models of transformers with random weights, large enough in spread that a wrong KV byte changes tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from tierkv.integrations.transformers.layers import cache_option

VOCAB = 400
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = 40


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_hidden_layers=2))


def _gemma3() -> Any:
    """Sliding and full attention by turns, as Gemma 3 has them."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        **_SIZES, num_hidden_layers=6, head_dim=8, sliding_window=WINDOW, layer_types=kinds
    )
    return transformers.Gemma3ForCausalLM(config)


def _mistral() -> Any:
    """Every layer slides."""
    config = transformers.MistralConfig(**_SIZES, num_hidden_layers=2, sliding_window=WINDOW)
    return transformers.MistralForCausalLM(config)


def _deepseek() -> Any:
    """K and V of different sizes."""
    sizes = {**_SIZES, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(
        **sizes, num_hidden_layers=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt2() -> Any:
    """Learned positions, and dimensions under other names."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)


def _bart() -> Any:
    """The decoder of BART alone: learned positions by column, so that padding shifts them."""
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
        max_position_embeddings=512, is_encoder_decoder=False, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.BartForCausalLM(config)


MAKERS: Mapping[str, Callable[[], Any]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "gpt2": _gpt2,
    "bart": _bart,
}


def make_model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model in evaluation mode; the same for the same arguments, in any process."""
    torch.manual_seed(seed)
    model = MAKERS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model.to(dtype)


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Tokens other than the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (num_tokens,), generator=generator).tolist()


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch and its mask."""
    columns = max(map(len, prompts))
    ids = torch.tensor([[0] * (columns - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (columns - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    """Output of ``generate`` without a cache of tierkv."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **{**GREEDY, **more})


GREEDY: Mapping[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def computed_in_pieces(model: Any, tokens: Sequence[int], ends: Sequence[int]) -> DynamicCache:
    """A plain cache of transformers, filled by forward passes that end there."""
    cache, start = DynamicCache(config=model.config), 0
    with torch.no_grad():
        for end in ends:
            model(input_ids=torch.tensor([tokens[start:end]]), **cache_option(model, cache), use_cache=True)
            start = end
    return cache


def logits_behind(model: Any, cache: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Of tokens that follow what a cache holds; the cache stays as it is."""
    with torch.no_grad():
        past = cache_option(model, copy.deepcopy(cache))
        return model(input_ids=torch.tensor([tokens]), **past, use_cache=True).logits[0]


def contents(cache: Any) -> list[torch.Tensor]:
    """K and V of all layers."""
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]
