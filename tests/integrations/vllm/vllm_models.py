"""Two small models with random weights, as folders that vLLM serves: ``python vllm_models.py FOLDER``.

``llama`` has one KV cache group. ``gemma`` mixes sliding windows with full attention, which makes three groups of it.
Their weights are so wide that a wrong byte in the KV cache changes the greedy tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 1000
WEIGHT_STD = 0.2
SEED = 5

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": WEIGHT_STD,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def llama() -> PreTrainedModel:
    """Two layers of full attention."""
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **COMMON))


def gemma() -> PreTrainedModel:
    """Six layers, every third one with full attention, the others with a window of two blocks."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(num_hidden_layers=6, layer_types=kinds, sliding_window=64, query_pre_attn_scalar=32, **COMMON)
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; the words are w0 to w999."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="w0", eos_token="w1", unk_token="w2")


def save_models(folder: Path) -> None:
    """Write a folder for each model."""
    for make in (llama, gemma):
        torch.manual_seed(SEED)
        place = folder / make.__name__
        make().save_pretrained(place)
        tokenizer().save_pretrained(place)


if __name__ == "__main__":
    save_models(Path(sys.argv[1]))
