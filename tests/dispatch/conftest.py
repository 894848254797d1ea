"""Benches over real files, closed after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

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
    bench.arena.close()


@pytest.fixture
def gate() -> Iterator[Event]:
    """Event that hanging calls wait for. It is set at the end of the test, so that no thread outlives it."""
    gate = Event()
    yield gate
    gate.set()
