"""Common fixtures of the prefix cache for transformers: one model of each kind, and a stack over a real disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may look for a model elsewhere

import torch
from hf_models import make_model

from tierkv.integrations.transformers import TieredPrefixCache

BLOCK_TOKENS, PIECE_TOKENS = 16, 64

Open = Callable[..., TieredPrefixCache]


@pytest.fixture(autouse=True)
def _quiet_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's generation settings are worth no warning."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(scope="session")
def model() -> Callable[..., Any]:
    """Models by kind and dtype, made once."""
    return functools.cache(make_model)


@pytest.fixture
def stack(tmp_path: Path) -> dict[str, Any]:
    """A description: host tier over a disk."""
    return {
        "host": {"capacity": "8MiB"},
        "tiers": [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB", "segment_bytes": "1MiB"}],
    }


@pytest.fixture
def open_cache(stack: dict[str, Any]) -> Iterator[Open]:
    """Opens caches over one disk, and closes those that a test leaves open."""
    opened: list[TieredPrefixCache] = []

    def open_one(model: Any, config: Any = None, **options: Any) -> TieredPrefixCache:
        sizes = {"block_tokens": BLOCK_TOKENS, "piece_tokens": PIECE_TOKENS}
        cache = TieredPrefixCache(model, stack if config is None else config, **{**sizes, **options})
        opened.append(cache)
        return cache

    yield open_one
    for cache in opened:
        cache.close()


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtypes that models are served in."""
    return request.param
