"""A small stack over LMDB that is full: chunks leave, stores go on, and the directory keeps within its capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stack_bed import opened, prompts_of, serve, stack_config

pytestmark = pytest.mark.needs_torch

options = pytest.importorskip("tierkv_lmdb.options")

CAPACITY = 2 << 20
ROUNDS = 8


def config(place: Path) -> dict[str, Any]:
    """Host over LMDB; what is served below stores twice as many bytes as that holds."""
    tier = {"backend": "lmdb", "path": str(place / "lmdb"), "capacity": CAPACITY, "durability": "none"}
    return stack_config(place, tiers=[tier])


def used_bytes(place: Path) -> int:
    """Everything below a directory."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def fill(place: Path, expected: Callable[..., list[list[int]]]) -> tuple[list[int], int]:
    """Serve new prompts; chunks written in each round, and refused ones in all."""
    written = []
    with opened(config(place)) as stack:
        for seed in range(ROUNDS):
            before = stack.metrics.counters.cascades["lmdb"]
            assert serve(stack, prompts_of(seed, 4, shared=0)) == expected(prompts_of(seed, 4, shared=0))
            written.append(stack.metrics.counters.cascades["lmdb"] - before)
            assert used_bytes(place / "lmdb") <= CAPACITY
        assert not stack.metrics.counters.chunks_corrupt
        return written, stack.metrics.counters.writes_failed["lmdb"]


def test_full_tier_evicts_and_stores_go_on(tmp_path: Path, expected: Callable[..., list[list[int]]]) -> None:
    """The framework knows how much room the capacity has, and evicts in time: no write is refused.

    After a restart the newest chunks are there.
    """
    written, failed = fill(tmp_path, expected)
    assert min(written[-4:]) > 0
    assert failed == 0
    with opened(config(tmp_path)) as stack:
        last = prompts_of(ROUNDS - 1, 4, shared=0)
        assert serve(stack, last) == expected(last)
        assert stack.metrics.counters.tokens_loaded["lmdb"] == 4 * 112
        assert used_bytes(tmp_path / "lmdb") <= CAPACITY


def test_map_full_becomes_eviction(
    tmp_path: Path, expected: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the account is wrong, as with frames that break the free pages up, LMDB itself says that its map is full.

    That is a refusal, for which a chunk leaves; later stores find its room.
    """
    inner = options.Sizes.of

    def unaccounted(*args: Any, **kwargs: Any) -> Any:
        return replace(inner(*args, **kwargs), pages_bytes_max=1 << 40, room_bytes=1 << 40)

    monkeypatch.setattr(options.Sizes, "of", unaccounted)
    written, failed = fill(tmp_path, expected)
    assert failed > 0, "the map was never full"
    assert min(written[-4:]) > 0
