"""Benches over real files, and payloads that can be compressed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tier_bench
from bench_fixtures import async_bench, bench

__all__ = ["async_bench", "bench"]


@pytest.fixture
def compressible() -> Callable[..., bytes]:
    """Function that returns payloads that zstd shortens, different for each number."""
    return tier_bench.compressible
