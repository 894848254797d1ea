"""Identity of a model and its prompts: the root hash of a model, and the chained block hashes of a prompt.

Two processes share chunks if their roots are equal: configuration, weights, adapters, attention kernels and autocast.
Weights are compared by a sample of every tensor. So a copy under another name shares chunks, and a step of training
does not.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierkv.integrations.transformers.layers import Model, ModelConfig, input_device, rope_text, text_config

HASH_BYTES = 16
SAMPLES = 256
"""Number of values of each tensor that enter the fingerprint."""

_FORMAT = b"tierkv transformers 1"
_NOT_KV = {
    *("_name_or_path", "architectures", "dtype", "id2label", "label2id", "output_attentions", "output_hidden_states"),
    *("problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache"),
}
"""Keys of a configuration that do not affect KV. The dtype is part of the namespace."""

_DERIVED = ("inv_freq", "original_inv_freq")
"""Buffers derived from the configuration and, in some models, from the length of the previous prompt."""

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings that change at all positions for prompts longer than the trained length."""


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of a prompt beside its tokens."""

    cache_salt: str | None = None
    """Salt that separates tenants."""
    hints: Mapping[str, Any] | None = None
    """Hints for the stack."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of tokens with its hashes."""

    tokens: tuple[int, ...]
    """Token ids."""
    hashes: tuple[bytes, ...]
    """Chained hashes. Entry i identifies the first ``(i + 1) * block_tokens`` tokens."""
    adapter: str | None = None
    """Names of the active adapters, or None."""
    options: PromptOptions = field(default_factory=PromptOptions)


@dataclass(slots=True)
class Identity:
    """Identity of one model in its present state. Weights are sampled again only when they may have changed."""

    model: Model
    _versions: list[tuple[int, int]] = field(default_factory=list)
    _weights: bytes = b""

    def root(self) -> bytes:
        """Root hash: the parent of every prompt's first block."""
        config = text_config(self.model)
        parts = [
            _FORMAT,
            _config_text(config),
            self._fingerprint(),
            repr(adapters(self.model)).encode(),
            str(getattr(config, "_attn_implementation", "")).encode(),
            *_autocast_parts(input_device(self.model).type),
        ]
        return _digest(b"".join(struct.pack("<Q", len(part)) + part for part in parts))

    def _fingerprint(self) -> bytes:
        versions = [(tensor.data_ptr(), _version(tensor)) for _, tensor in _tensors(self.model)]
        if versions != self._versions:
            self._weights, self._versions = weights_fingerprint(self.model), versions
        return self._weights


def block_hashes(root: bytes, tokens: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """Chained hashes, one per full block of tokens. Cryptographic, because prompts are untrusted input."""
    parent, hashes = root, []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        parent = _digest(parent + struct.pack(f"<{block_tokens}q", *tokens[start : start + block_tokens]))
        hashes.append(parent)
    return tuple(hashes)


def adapters(model: Model) -> list[tuple[str, str]]:
    """State of every adapter layer (PEFT): name of the module, and its active adapters."""
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
    """Names of the active adapters, joined; None for the plain model."""
    names = {
        adapter
        for module in model.modules()
        if hasattr(module, "merged_adapters") and not getattr(module, "disable_adapters", True)
        for adapter in module.active_adapters
    }
    return "+".join(sorted(names)) or None


def weights_fingerprint(model: Model) -> bytes:
    """Digest of names, shapes and a sample of values of all weights.

    Weights that are not in memory (offloaded to disk) enter with name and shape only.
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
    """Length of the longest text whose KV does not depend on its length; None: any length.

    With "dynamic" and "longrope" rotary embeddings, a longer text is encoded differently from its first token on.
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


def _autocast_parts(device_type: str) -> list[bytes]:
    """Number format of the present ``torch.autocast``, which computes with fewer bits than the weights have.

    Empty without autocast, so that the hashes of earlier versions stay as they are.
    """
    return [str(torch.get_autocast_dtype(device_type)).encode()] if torch.is_autocast_enabled(device_type) else []


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
