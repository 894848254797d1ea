"""Write policies seen from an engine: with real disks, restarts, and a disk that hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stack_bed import CHUNK_TOKENS, Faults, opened, prompts_of, serve, stack_config

from tierkv.stack.stack import Stack
from tierkv.testing.faults import hang_until

pytestmark = pytest.mark.needs_torch

LONG_CHUNKS = 120 // CHUNK_TOKENS


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A gate for hanging calls; opened at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def config_with(place: Path, write: str, *, host_slots: int = 24, **tier: Any) -> dict[str, Any]:
    """A host tier over one disk."""
    disk = {"name": "disk", "backend": "disk", "path": str(place / "disk"), "capacity": "8MiB", "write": write}
    return stack_config(place, host_slots=host_slots, tiers=[{**disk, "min_free_bytes": 0, **tier}])


def loaded(stack: Stack) -> dict[str, int]:
    """Tokens by the tier that served them."""
    return dict(stack.metrics.counters.tokens_loaded)


def test_prompts_that_come_once_leave_nothing_on_the_disk(tmp_path: Path) -> None:
    """Landscape G9: with `on_reuse` only the shared beginning is written, and only that is found after a restart."""
    prompts = prompts_of(1, 8, shared=2 * CHUNK_TOKENS)
    config = config_with(tmp_path, "on_reuse")
    with opened(config) as stack:
        for prompt in prompts:
            serve(stack, [prompt])
        assert stack.flush()
        assert stack.metrics.counters.cascades == {"disk": 2}
        assert stack.metrics.counters.chunks_stored > 30
    with opened(config) as stack:
        serve(stack, prompts[:1])
        assert loaded(stack) == {"disk": 2 * CHUNK_TOKENS}


@pytest.mark.parametrize("host_slots", [64, 16])
def test_a_restart_finds_what_was_written_back(tmp_path: Path, host_slots: int) -> None:
    """`close` writes the chunks that only memory holds; those evicted from the host tier were written before."""
    prompts = prompts_of(2, 4)
    config = config_with(tmp_path, "back", host_slots=host_slots)
    with opened(config) as stack:
        answers = [serve(stack, [prompt])[0] for prompt in prompts]
        if host_slots == 64:
            assert not stack.metrics.counters.demotions, "there was room: nothing needed to be written"
        assert stack.close()
        demoted = stack.metrics.counters.demotions["disk"] + stack.metrics.counters.demotions_dropped["disk"]
        assert demoted == stack.metrics.counters.chunks_stored
    with opened(config) as stack:
        assert [serve(stack, [prompt])[0] for prompt in reversed(prompts)] == answers[::-1]
        if host_slots == 64:
            assert loaded(stack)["disk"] >= len(prompts) * (LONG_CHUNKS - 3) * CHUNK_TOKENS
        else:
            assert loaded(stack)["disk"]


def test_a_disk_that_hangs_is_never_in_the_way_of_a_write_back(tmp_path: Path, gate: threading.Event) -> None:
    """Promises 2 to 4: the disk accepts its first write and hangs. The engine answers as without a stack, nothing is
    refused for long, and close keeps to its timeout.
    """
    prompts = prompts_of(3, 6)
    faults = Faults()
    config = config_with(tmp_path, "back", host_slots=16, backend="faulty", write_deadline_s=0.2)
    with opened(config, plugins=faults.registry()) as stack:
        faults.last.add("write", hang_until(gate))
        for prompt in prompts:
            assert serve(stack, [prompt]) == serve(None, [prompt])
        assert stack.metrics.counters.demotions_dropped["disk"] > 10
        assert not stack.metrics.counters.demotions
        gate.set()


def test_a_flush_reports_that_it_did_not_finish(tmp_path: Path, gate: threading.Event) -> None:
    """A slow disk and no time: the rest is written in later steps."""
    faults = Faults()
    config = config_with(tmp_path, "back", host_slots=64, backend="faulty")
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, prompts_of(4, 2))
        faults.last.add("write", hang_until(gate))
        assert not stack.flush(timeout_s=0.05)
        gate.set()
        assert stack.flush()
        assert stack.metrics.counters.demotions["disk"] == stack.metrics.counters.chunks_stored


def test_a_fast_tier_is_filled_from_a_slow_one(tmp_path: Path) -> None:
    """Fill-in: chunks of an earlier engine in the object store are on this engine's disk after first use."""
    prompts = prompts_of(5, 1)
    objects = {"name": "objects", "backend": "fsspec", "url": f"file://{tmp_path}/objects"}
    with opened(stack_config(tmp_path, tiers=[objects])) as stack:
        serve(stack, prompts)
    both = config_with(tmp_path, "on_reuse")
    both["tiers"].append(objects)
    for source in ("objects", "disk"):
        with opened(both) as stack:
            serve(stack, prompts)
            assert set(loaded(stack)) == {source}
            assert stack.flush()
