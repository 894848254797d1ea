"""Fixtures of benches over real files, closed after each test. A conftest imports them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
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
