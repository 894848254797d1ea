"""Write the model of the benchmark into a folder: ``python -m benchmarks.side_by_side.model FOLDER LAYERS ...``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import has_gpu
from benchmarks.side_by_side.jobs import ModelShape

_STD = 0.2
"""Hidden size; so large that a wrong byte in the KV cache changes the generated tokens."""


def write_model(folder: Path, shape: ModelShape, context_tokens: int) -> None:
    """Random weights, equal at every call; without a tokenizer, since prompts are given as tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context_tokens,
        initializer_range=_STD,
        tie_word_embeddings=False,
    )
    with torch.device("cuda" if has_gpu() else "cpu"):  # billions of random numbers take a CPU minutes
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    path, context, *numbers = sys.argv[1:]
    write_model(Path(path), ModelShape(*map(int, numbers)), int(context))
