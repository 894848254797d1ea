"""Benches over real files, and a gate for calls that hang."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
from bench_fixtures import async_bench, bench

__all__ = ["async_bench", "bench"]


@pytest.fixture
def gate() -> Iterator[Event]:
    """Event that hanging calls wait for. It is set at the end of the test, so that no thread outlives it."""
    gate = Event()
    yield gate
    gate.set()
