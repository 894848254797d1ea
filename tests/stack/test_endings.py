"""Flush between steps, and close: pending reports are delivered, and lost chunks are reported."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stack_bed import Faults

import tierkv
import tierkv_disk
from tierkv.errors import EngineProtocolError
from tierkv.stack.stack import Stack
from tierkv.testing.engines import hand_engine
from tierkv.testing.engines.small_stack import TESTED, SmallStack
from tierkv.testing.faults import raise_error
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupSpec, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.transfers import WorkerOutput

SPEC = EngineSpec("m", "float32", (GroupSpec(16, (64,)),), 16)
IDS = (1, 2, 3, 4)


@dataclass
class Prompt:
    """64 tokens, four blocks, always equal."""

    request_id: str
    num_tokens: int = 64
    num_prompt_tokens: int = 64
    kv_transfer_params: None = None
    block_hashes: list[bytes] = field(
        default_factory=lambda: [hashlib.blake2b(bytes([i]), digest_size=32).digest() for i in range(4)]
    )


@dataclass
class Block:
    """A block that is not computed yet."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


def config_of(place: Path, **store: Any) -> dict[str, Any]:
    """Description of a host tier and a disk."""
    disk = {"backend": "disk", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
    return {"host": {"capacity": "1MiB"}, "store": store, "tiers": [disk]}


def opened(config: dict[str, Any]) -> Stack:
    """A stack whose one worker has registered pages."""
    stack = tierkv.open_stack(config, SPEC)
    stack.worker.register_kv_caches([[np.ones((20, 64), np.uint8)]])
    return stack


def step(stack: Stack, *scheduled: ScheduledRequest) -> LoadReport:
    """Run one whole step."""
    meta = stack.build_connector_meta(StepOutput(scheduled))
    for worker in stack.workers:
        worker.start_step(meta)
        worker.queue_stores(meta)
    return stack.update_connector_output(stack.worker.get_finished()) if stack.workers else LoadReport()


def ask(stack: Stack, request: Prompt) -> int:
    """Return the final answer of a lookup."""
    while (tokens := stack.get_num_new_matched_tokens(request, 0)[0]) is None:
        step(stack)
    return tokens


def compute(stack: Stack, request_id: str) -> None:
    """Compute the prompt of a request in one step, and end it."""
    request = Prompt(request_id)
    assert ask(stack, request) == 0
    stack.update_state_after_alloc(request, [[Block(i) for i in IDS]], 0)
    step(stack, ScheduledRequest(request_id, 0, 64, (IDS,), replaces_table=True))
    stack.request_finished(request, [IDS])


def test_a_load_that_ends_in_a_flush_is_reported_by_the_next_step(tmp_path: Path) -> None:
    """A flush between steps, such as before a checkpoint, drains the worker. A request whose load ends in it waits for
    a report: without one it would wait for ever.
    """
    with opened(config_of(tmp_path)) as stack:
        compute(stack, "a")
        while stack.has_pending_work():
            step(stack)
        request = Prompt("b")
        assert ask(stack, request) == 64
        stack.update_state_after_alloc(request, [[Block(i) for i in (5, 6, 7, 8)]], 64)
        meta = stack.build_connector_meta(StepOutput())
        stack.worker.start_step(meta)
        stack.worker.queue_stores(meta)
        assert stack.flush()
        assert stack.flush(), "also where two flushes follow each other"
        assert stack.has_pending_work(), "the engine goes on stepping, or it would not come for the report"
        assert step(stack) == LoadReport(frozenset({"b"}))
        assert not stack.has_pending_work()
        assert step(stack) == LoadReport(), "reported once"


@pytest.mark.parametrize("plan", ["immediate", "eager"])
def test_close_makes_the_stores_that_the_next_step_would_have_made(tmp_path: Path, plan: str) -> None:
    """A request ends, and the server stops before another step. The stores of its last forward pass must reach the
    disk, or close must return False.
    """
    stack = opened(config_of(tmp_path, plan=plan))
    compute(stack, "a")
    assert stack.has_pending_work()
    assert stack.close()
    with opened(config_of(tmp_path)) as stack:
        assert ask(stack, Prompt("b")) == 64


def test_close_reports_lost_stores_on_every_call(tmp_path: Path) -> None:
    """Close cannot reach workers in other processes: stores that they were never given are lost. Neither the first nor
    a second call may hide it.
    """
    capabilities = EngineCapabilities(worker_processes=True)
    spec = EngineSpec("m", "float32", (GroupSpec(16, (64,)),), 16, capabilities=capabilities)
    stack = tierkv.open_stack(config_of(tmp_path), spec)
    compute(stack, "a")
    assert not stack.close()
    assert not stack.close()


def test_close_without_registered_pages_ends_all_the_same(tmp_path: Path) -> None:
    """An engine that fails between instructions and execution still gets files and memory released. Its error is not
    replaced by one of tierkv.
    """
    stack = tierkv.open_stack(config_of(tmp_path), SPEC)
    request = Prompt("a")
    assert ask(stack, request) == 0
    stack.update_state_after_alloc(request, [[Block(i) for i in IDS]], 0)
    stack.build_connector_meta(StepOutput((ScheduledRequest("a", 0, 64, (IDS,), replaces_table=True),)))
    assert not stack.close()
    opened(config_of(tmp_path)).close()


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_flush_reports_failed_writes(tmp_path: Path, write: str) -> None:
    """A restart decided by the answer of flush must not assume that chunks are on disk which the disk refused."""
    faults = Faults()
    config = config_of(tmp_path)
    config["tiers"][0] |= {"backend": "faulty", "name": "disk", "write": write, "retries": 0}
    stack = tierkv.open_stack(config, SPEC, plugins=faults.registry())
    stack.worker.register_kv_caches([[np.ones((20, 64), np.uint8)]])
    rule = faults.last.add("write", raise_error(lambda: OSError("read-only file system")))
    request = Prompt("r")
    ask(stack, request)
    stack.update_state_after_alloc(request, [[Block(i) for i in IDS]], 0)
    step(stack, ScheduledRequest("r", 0, 64, (IDS,), replaces_table=True))
    assert stack.flush() is False
    faults.last.rules.remove(rule)
    assert stack.flush() is True
    assert stack.close()


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_chunk_that_was_evicted_before_is_no_loss_of_the_end(tmp_path: Path, end: str) -> None:
    """A tier was slower than the stores for a while, and chunks were evicted before their turn. They are counted as
    dropped. But all that is left reaches the tier, so the answer is True."""
    options = tierkv_disk.DiskOptions(path=str(tmp_path), min_free_bytes=0)
    one_write = {"queue_bytes_max": hand_engine.SLOT_BYTES}
    with SmallStack(
        tierkv_disk.PLUGIN, lambda _: options, tmp_path, capacity_bytes=1 << 20, host_slots=16, tier=one_write
    ) as small:
        small.wedge("write")
        for number in range(8):
            small.store(hand_engine.Prompt(number))
        small.release()
        assert getattr(small.stack, end)()
        counters = small.stack.metrics.counters
        assert counters.cascades_dropped[TESTED] > 0
        assert counters.cascades_dropped[TESTED] + counters.cascades[TESTED] == 32


def test_a_closed_stack_refuses_further_steps(tmp_path: Path) -> None:
    """Calls went on as if nothing had happened: chunks were offered that nothing could load, and none was stored."""
    stack = opened(config_of(tmp_path))
    compute(stack, "a")
    assert stack.close()
    calls: list[Callable[[], object]] = [
        lambda: stack.on_new_request(Prompt("b")),
        lambda: stack.get_num_new_matched_tokens(Prompt("b"), 0),
        lambda: stack.build_connector_meta(StepOutput()),
        stack.flush,
    ]
    for call in calls:
        with pytest.raises(EngineProtocolError, match="this stack is closed"):
            call()
    stack.request_finished(Prompt("a"), [IDS])
    stack.update_connector_output(WorkerOutput())
    assert stack.close(), "late reports and a second close are no mistakes"


def test_a_closed_staged_stack_refuses_further_steps(tmp_path: Path) -> None:
    """As above, for the other kind of stack."""
    stack = tierkv.open_staged_stack(config_of(tmp_path), SPEC)
    stack.close()
    with pytest.raises(EngineProtocolError, match="this stack is closed"):
        stack.flush()


def test_a_close_without_kv_tensors_reports_the_loss(tmp_path: Path) -> None:
    """A worker that was given a store, and never its tensors. Close raised, in place of the error that the ``with``
    block ended with, and the second call knew of nothing.
    """
    stack = tierkv.open_stack(config_of(tmp_path), SPEC)

    compute(stack, "a")
    with pytest.raises(EngineProtocolError, match="register_kv_caches must be called"):
        step(stack)
    assert not stack.close()


def collect(stacks: list[Stack]) -> None:
    """Drop the only references to stacks."""
    stacks.clear()
    gc.collect()


def test_a_dropped_stack_warns_and_lets_its_tiers_go(tmp_path: Path) -> None:
    """A dropped stack, which no call can close, kept its threads and its lock until the process ended."""
    before, config = set(threading.enumerate()), config_of(tmp_path)
    stacks = [opened(config)]
    assert set(threading.enumerate()) - before
    with pytest.warns(ResourceWarning, match=r"dropped without close\(\).*`with` block"):
        collect(stacks)
    patience_s = time.monotonic() + 30.0
    while set(threading.enumerate()) - before:  # one of them may be starting, and cannot be joined yet
        assert time.monotonic() < patience_s
        time.sleep(0.01)
    config["tiers"][0]["required"] = True
    opened(config).close()


def test_a_forked_process_leaves_the_stack_alone(tmp_path: Path) -> None:
    """It would wait for threads that it does not have, and tell its user of chunks that are not its own."""
    config = config_of(tmp_path)
    config["tiers"][0]["required"] = True
    script = f"""
import gc, os, sys, threading, warnings
import tierkv
from tierkv.types.engine import EngineSpec, GroupSpec
stack = tierkv.open_stack({config!r}, EngineSpec("m", "float32", (GroupSpec(16, (64,)),), 16))
if not os.fork():
    del stack
    gc.collect()
    os._exit(threading.active_count() != 1)
status = os.wait()[1]
stack.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    command = [sys.executable, "-W", "ignore", "-W", "error::ResourceWarning", "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
