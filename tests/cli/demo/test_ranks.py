"""Workers in separate processes, driven by hand: whole pages are stored and loaded, and a death is reported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import EngineProtocolError

torch = pytest.importorskip("torch")

from tierkv.cli.demo.engines import engine_of  # noqa: E402
from tierkv.cli.demo.phases import PhaseFailedError  # noqa: E402
from tierkv.cli.demo.ranks import RankProcess, rank_processes  # noqa: E402
from tierkv.reference.kv_pool import kv_tensors  # noqa: E402
from tierkv.stack.opening import open_stack  # noqa: E402 - after the check for torch

pytestmark = pytest.mark.needs_torch


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[list[RankProcess], Any]]:
    """Two of them over a stack of a host tier."""
    config = engine_of("hybrid", 2)
    with (
        open_stack({"host": {"capacity": "2MiB"}}, config.engine_spec()) as stack,
        rank_processes(stack, 2) as (processes, allocate),
    ):
        yield processes, [[kv_tensors(config, allocate)] * 3 for _ in processes]


def test_pools_are_told_apart(ranks: tuple[list[RankProcess], Any]) -> None:
    """Two ranks that mapped one pool would store the same heads twice, and lose the others."""
    processes, caches = ranks
    places = {
        rank._memory.pages(tensor) for rank, groups in zip(processes, caches, strict=True) for tensor in groups[0]
    }
    assert len(places) == 4
    for rank, groups in zip(processes, caches, strict=True):
        rank.register_kv_caches(groups)
    assert [rank.copied_bytes() for rank in processes] == [(0, 0), (0, 0)]
    assert len({os.getpid(), *(rank.pid for rank in processes)}) == 3


def test_what_the_worker_refuses_is_raised_here(ranks: tuple[list[RankProcess], Any]) -> None:
    """An error in another process must not look like a death, or like nothing."""
    processes, caches = ranks
    with pytest.raises(EngineProtocolError, match="caches of 1 groups were registered, the spec has 3"):
        processes[0].register_kv_caches(caches[0][:1])
    processes[0].register_kv_caches(caches[0])


def test_a_dead_rank_is_told(ranks: tuple[list[RankProcess], Any]) -> None:
    """The engine waits for an answer, so it must get the death and its cause instead."""
    processes, _ = ranks
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(PhaseFailedError, match="died with exit code -9"):
        processes[1].get_finished()
    assert processes[0].get_finished().is_empty
