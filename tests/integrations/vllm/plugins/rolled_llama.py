"""A plugin of vLLM whose model has the name of vLLM's Llama, and computes otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM


def register() -> None:
    """Put the class in the place of vLLM's."""
    ModelRegistry.register_model("LlamaForCausalLM", f"{__name__}:{RolledLlama.__name__}")


class RolledLlama(LlamaForCausalLM):
    """Llama in which each token has the embedding of another one."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load the weights, then give the embeddings to other tokens."""
        loaded = super().load_weights(weights)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(torch.roll(self.model.embed_tokens.weight, 1, 0))
        return loaded
