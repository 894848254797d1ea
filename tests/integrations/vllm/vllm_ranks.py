"""Scenarios that look into the workers of an engine."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm_served import ServedEngine


def kv_digests(served: ServedEngine) -> list[str]:
    """Digest of the whole KV memory of each worker, by rank."""
    digests: list[str] = served.engine.collective_rpc(kv_digest)
    return digests


def kv_digest(worker: Any) -> str:
    """Digest of a worker's KV memory."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in worker.model_runner.kv_caches:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def copies(served: ServedEngine) -> int:
    """Number of workers that hold equal pages, as vLLM counts them."""
    return int(served.core.scheduler.kv_cache_config.kv_tp_replicas)
