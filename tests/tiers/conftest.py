"""Benches over real files, closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tier_bench
from plain_files import AsyncPlainFiles
from tier_bench import Bench, make_bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Bench over blocking files."""
    bench = make_bench(tmp_path)
    yield bench
    bench.files.close()
    bench.arena.close()


@pytest.fixture
def async_bench(tmp_path: Path) -> Iterator[Bench]:
    """Bench over async files."""
    bench = make_bench(tmp_path, AsyncPlainFiles)
    yield bench
    bench.files.files.close()  # type: ignore[union-attr]  # it is the async kind
    bench.arena.close()


@pytest.fixture
def compressible() -> Callable[..., bytes]:
    """Function that returns payloads that zstd shortens, different for each number."""
    return tier_bench.compressible
