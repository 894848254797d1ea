"""Small models with random weights, as folders that vLLM serves: ``python vllm_models.py FOLDER``.

``llama`` has one KV cache group. ``gemma`` mixes sliding windows with full attention, which makes three groups of it.
``granite`` and ``lfm`` have layers that keep a state beside such with attention: Mamba 2, and short convolutions.
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
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
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


def granite() -> PreTrainedModel:
    """Six layers, every third one with full attention, the others with Mamba 2.

    Their states are of heads that forget slowly, so what a state holds of the distant past still counts; and a state
    is smaller than a page of attention, so pages are padded.
    """
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    model = GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            num_hidden_layers=6, layer_types=kinds, num_local_experts=0, shared_intermediate_size=256,
            position_embedding_type="rope", attention_multiplier=32**-0.5,
            mamba_expand=1, mamba_n_heads=4, mamba_d_state=16, mamba_chunk_size=32, **COMMON,
        )
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(0.01, 0.1).log_()
    return model


def lfm() -> PreTrainedModel:
    """Six layers, every third one with full attention, the others with short convolutions.

    Ask it one prompt at a time: rounding that differs with the batch is enough to change its tokens.
    """
    kinds = ["conv", "conv", "full_attention"] * 2
    return Lfm2ForCausalLM(
        Lfm2Config(
            num_hidden_layers=6, layer_types=kinds, conv_dim=128, block_dim=128, conv_L_cache=4,
            block_auto_adjust_ff_dim=False, **COMMON,
        )
    )  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; the words are w0 to w999."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="w0", eos_token="w1", unk_token="w2")


def save_models(folder: Path) -> None:
    """Write a folder for each model."""
    for make in (llama, gemma, granite, lfm):
        torch.manual_seed(SEED)
        place = folder / make.__name__
        make().save_pretrained(place)
        tokenizer().save_pretrained(place)


if __name__ == "__main__":
    save_models(Path(sys.argv[1]))
