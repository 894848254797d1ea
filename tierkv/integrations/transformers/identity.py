"""What makes KV bytes a model's own, and a prompt's: the root and the chain of its block hashes.

Two processes share chunks if their roots agree: configuration, weights, adapters and attention kernels. Weights are
told apart by a sample of every tensor, so a copy under another name shares, and a step of training does not.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierkv.integrations.transformers.layers import Model, ModelConfig, rope_text, text_config

HASH_BYTES = 16
SAMPLES = 256
"""Values of each tensor that go into the fingerprint."""

_FORMAT = b"tierkv transformers 1"
_NOT_KV = {
    *("_name_or_path", "architectures", "dtype", "id2label", "label2id", "output_attentions", "output_hidden_states"),
    *("problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache"),
}
"""Keys of a configuration that say nothing about KV; the dtype stands in the namespace."""

_DERIVED = ("inv_freq", "original_inv_freq")
"""Buffers that follow from the configuration and, in some models, from the last prompt's length."""

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings that change for all positions once a prompt is longer than the model was trained for."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a caller says beside the tokens: whose they are, and hints for the stack."""

    cache_salt: str | None = None
    hints: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of tokens with its hashes: entry i names its first ``(i + 1) * block_tokens`` tokens."""

    tokens: tuple[int, ...]
    hashes: tuple[bytes, ...]
    adapter: str | None = None
    terms: Terms = field(default_factory=Terms)


@dataclass(slots=True)
class Identity:
    """Of one model, as it is now. Weights are looked at again only when they may have changed."""

    model: Model
    _versions: list[tuple[int, int]] = field(default_factory=list)
    _weights: bytes = b""

    def root(self) -> bytes:
        """The parent of every prompt's first block."""
        config = text_config(self.model)
        parts = [
            _FORMAT,
            _config_text(config),
            self._fingerprint(),
            repr(adapters(self.model)).encode(),
            str(getattr(config, "_attn_implementation", "")).encode(),
        ]
        return _digest(b"".join(struct.pack("<Q", len(part)) + part for part in parts))

    def _fingerprint(self) -> bytes:
        versions = [(tensor.data_ptr(), _version(tensor)) for _, tensor in _tensors(self.model)]
        if versions != self._versions:
            self._weights, self._versions = weights_fingerprint(self.model), versions
        return self._weights


def block_hashes(root: bytes, tokens: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """One per full block of tokens, chained. Collisions cannot be made on purpose: prompts come from strangers."""
    parent, hashes = root, []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        parent = _digest(parent + struct.pack(f"<{block_tokens}q", *tokens[start : start + block_tokens]))
        hashes.append(parent)
    return tuple(hashes)


def adapters(model: Model) -> list[tuple[str, str]]:
    """State of every adapter layer (PEFT's) that changes what the model computes: module, and what is active in it."""
    found = []
    for name, module in model.named_modules():
        if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters"):
            state = (
                list(module.active_adapters),
                bool(module.disable_adapters),
                list(module.merged_adapters),
                sorted(getattr(module, "scaling", {}).items()),
            )
            found.append((name, repr(state)))
    return found


def adapter_name(model: Model) -> str | None:
    """The active adapters, as a request names them; None: the plain model."""
    names = {
        adapter
        for module in model.modules()
        if hasattr(module, "merged_adapters") and not getattr(module, "disable_adapters", True)
        for adapter in module.active_adapters
    }
    return "+".join(sorted(names)) or None


def weights_fingerprint(model: Model) -> bytes:
    """A digest of names, shapes and a sample of values of all weights.

    Weights that are not in memory (offloaded to disk) count by name and shape alone.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64)
        values = flat[places.long().to(flat.device)].cpu().contiguous()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def prompt_tokens_max(model: Model) -> int | None:
    """Longest text whose KV does not depend on its length; None: that is so for any length.

    With "dynamic" and "longrope" rotary embeddings a longer text is encoded differently from its first token on.
    """
    config = text_config(model)
    ropes = rope_text(config)
    if not any(kind in ropes for kind in _LENGTH_DEPENDENT):
        return None
    lengths = list(_values(json.loads(ropes), "original_max_position_embeddings"))
    lengths += [getattr(config, "original_max_position_embeddings", None), config.max_position_embeddings]
    return min(int(length) for length in lengths if length)


def _values(item: object, key: str) -> Iterator[Any]:
    if isinstance(item, list):
        for part in item:
            yield from _values(part, key)
    if isinstance(item, Mapping):
        for name, value in item.items():
            if name == key:
                yield value
            yield from _values(value, key)


def _tensors(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if not name.endswith(_DERIVED):
            yield name, buffer


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch's own counter of writes in place


def _config_text(config: ModelConfig) -> bytes:
    known = {key: value for key, value in config.to_dict().items() if key not in _NOT_KV}
    return json.dumps(known, sort_keys=True, default=str).encode()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
