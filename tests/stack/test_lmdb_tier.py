"""A small stack over a full LMDB: chunks are evicted, stores continue, and the directory stays within its capacity."""

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
    """Host over LMDB; the prompts store twice as many bytes as it can hold."""
    tier = {"backend": "lmdb", "path": str(place / "lmdb"), "capacity": CAPACITY, "durability": "none"}
    return stack_config(place, tiers=[tier])


def used_bytes(place: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def fill(place: Path, expected: Callable[..., list[list[int]]]) -> tuple[list[int], int]:
    """Serve new prompts; return the chunks written in each round, and the refused ones in total."""
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
    """The stack knows the room within the capacity and evicts in time: no write is refused. After a restart the newest
    chunks are found.
    """
    written, failed = fill(tmp_path, expected)
    assert min(written[-4:]) > 0
    assert failed == 0
    with opened(config(tmp_path)) as stack:
        last = prompts_of(ROUNDS - 1, 4, shared=0)
        assert serve(stack, last) == expected(last)
        # Which chunk of the last round finds no room depends on the order in which writes are acknowledged.
        assert stack.metrics.counters.tokens_loaded["lmdb"] >= 3 * 112
        assert used_bytes(tmp_path / "lmdb") <= CAPACITY


def test_map_full_becomes_eviction(
    tmp_path: Path, expected: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the account is wrong, for example because frames fragment the free pages, LMDB reports a full map. The write
    is refused, a chunk is evicted for it, and later stores find room.
    """
    inner = options.Sizes.of

    def unaccounted(*args: Any, **kwargs: Any) -> Any:
        return replace(inner(*args, **kwargs), pages_bytes_max=1 << 40, room_bytes=1 << 40)

    monkeypatch.setattr(options.Sizes, "of", unaccounted)
    written, failed = fill(tmp_path, expected)
    assert failed > 0, "the map was never full"
    assert min(written[-4:]) > 0
