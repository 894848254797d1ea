"""Order of eviction through restarts: an old prompt gives up its tail for a new one, and still loads its head.

An index lists frames in the order of their writes. Before ranks were stored with them, the head of an old prompt was
evicted first after a restart, and the prompt loaded nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierkv_disk
import tierkv_lmdb
from tierkv.abc import BackendPlugin, WriteRequest
from tierkv.policies.builtin import POLICY_PLUGINS
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandRequest, Prompt
from tierkv.testing.engines.small_stack import SmallStack
from tierkv.types.engine import ScheduledRequest, StepOutput

ROOM = 26
OLD, NEW = Prompt(1, 20), Prompt(2, 12)
LEFT = 20 - (12 - (ROOM - 20))
"""Chunks of the old prompt that the new one leaves room for."""
HEADROOM = 8
"""Chunks that a full tier may evict in advance."""
POLICIES = sorted(plugin.name for plugin in POLICY_PLUGINS)
PLUGINS: dict[str, tuple[BackendPlugin, Callable[[Path], object]]] = {
    "disk": (tierkv_disk.PLUGIN, lambda path: tierkv_disk.DiskOptions(path=str(path), min_free_bytes=0)),
    "lmdb": (tierkv_lmdb.PLUGIN, lambda path: tierkv_lmdb.LmdbOptions(path=str(path))),
}
CAPACITY_BYTES = {"disk": ROOM * SLOT_BYTES, "lmdb": 1_404_000}
"""Capacities with that room: LMDB itself uses a part of its own."""


def opened(place: Path, backend: str, policy: str, **options: Any) -> SmallStack:
    """Stack over one tier for :data:`ROOM` chunks."""
    plugin, make_options = PLUGINS[backend]
    return SmallStack(
        plugin,
        make_options,
        place / backend,
        capacity_bytes=CAPACITY_BYTES[backend],
        host_slots=64,
        tier={"policy": policy},
        **options,
    )


def store_in_steps(stack: SmallStack, prompt: Prompt, steps: int) -> None:
    """Compute a prompt in ``steps`` engine steps, so that its head is written first, and end its request."""
    request: HandRequest = stack.arrive(prompt)
    stack.lookup(request)
    stack.allocate(request, 0)
    size = -(-request.num_tokens // steps)
    for done in range(0, request.num_tokens, size):
        ids = ((),) if done else (tuple(block.block_id for block in request.blocks),)
        tokens = min(size, request.num_tokens - done)
        entry = ScheduledRequest(request.request_id, done, tokens, ids, replaces_table=not done)
        stack.step(StepOutput((entry,)), lambda: stack.compute(request, 0))
        stack.settle()
    stack.end(request)
    stack.step_until(lambda: not stack.stack.has_pending_work(), "the end of a request")
    stack.settle()


def left_of_old(place: Path, backend: str, policy: str) -> int:
    """Store the new prompt in one process, and load both in another. Returns the chunks of the old prompt."""
    with opened(place, backend, policy) as stack:
        assert stack.stack._core.wiring.manager.tiers[0].limits.capacity_bytes == ROOM * SLOT_BYTES
        store_in_steps(stack, NEW, steps=4)
    with opened(place, backend, policy) as stack:
        assert stack.load(NEW) == NEW.chunks
        return stack.load(OLD)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", PLUGINS)
def test_an_old_prompt_gives_up_its_tail(tmp_path: Path, backend: str, policy: str) -> None:
    """After a restart, chunks of a new prompt take the place of the old prompt's last chunks, whatever the policy."""
    with opened(tmp_path, backend, policy) as stack:
        store_in_steps(stack, OLD, steps=4)
    assert left_of_old(tmp_path, backend, policy) >= LEFT - HEADROOM


@pytest.mark.parametrize("backend", PLUGINS)
def test_the_oldest_prompt_goes_first(tmp_path: Path, backend: str) -> None:
    """Request ids begin anew with each process. The oldest prompt gives way, and not both of one id in turn."""
    first, second = Prompt(3, 10), Prompt(4, 12)
    for prompt in (first, second):
        with opened(tmp_path, backend, "lru") as stack:
            store_in_steps(stack, prompt, steps=4)
    with opened(tmp_path, backend, "lru") as stack:
        store_in_steps(stack, Prompt(5, 8), steps=4)
    with opened(tmp_path, backend, "lru") as stack:
        assert stack.load(second) == second.chunks
        assert stack.load(first) < first.chunks


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", PLUGINS)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_chat_that_goes_on_keeps_its_first_turn(tmp_path: Path, backend: str, policy: str, *, restarts: bool) -> None:
    """A later turn writes its own chunks only. The first one was written before another prompt, and must stay longer
    than that one after a restart, because without it the later turns serve no request."""
    turns, other = [Prompt(1, chunks) for chunks in (6, 10, 14)], Prompt(2, 8)
    batches = [[turns[0], other], *([turn] for turn in turns[1:])] if restarts else [[turns[0], other, *turns[1:]]]
    for prompts in [*batches, [Prompt(3, 10)]]:
        with opened(tmp_path, backend, policy) as stack:
            for prompt in prompts:
                store_in_steps(stack, prompt, steps=2)
    with opened(tmp_path, backend, policy) as stack:
        assert stack.load(other) < other.chunks
        assert stack.load(turns[-1]) >= turns[-1].chunks - HEADROOM


STORE_AND_HANG = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_heads_after_restart import OLD, opened, store_in_steps

with opened(Path(sys.argv[2]), sys.argv[3], sys.argv[4]) as stack:
    store_in_steps(stack, OLD, steps=4)
    print("stored", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("backend", "policy"), [("disk", "lru"), ("disk", "adaptive"), ("lmdb", "lfu")])
def test_after_kill_minus_nine(tmp_path: Path, backend: str, policy: str) -> None:
    """Ranks are as durable as the frames: a process that was killed leaves them behind."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", STORE_AND_HANG, str(Path(__file__).parent), str(tmp_path), backend, policy],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "stored\n"
        process.send_signal(signal.SIGKILL)
    assert left_of_old(tmp_path, backend, policy) >= LEFT - HEADROOM


@pytest.mark.parametrize("first", PLUGINS)
def test_a_promoted_prompt_keeps_its_order(tmp_path: Path, first: str) -> None:
    """A chunk that is read from one tier and written to another has its rank there, too."""
    with opened(tmp_path, first, "lru", second=True) as stack:
        stack.store_all(OLD)
        assert stack.load_cold(OLD) == OLD.chunks
        host = stack.stack._core.wiring.manager._host
        ranks = dict(zip(OLD.keys, (host.slots.ranks[host.slots.find(key)] for key in OLD.keys), strict=True))
        assert all(ranks.values())
        assert list(ranks.values()) == sorted(set(ranks.values()))


def test_ranks_of_two_processes_differ(tmp_path: Path) -> None:
    """A backend must not take requests of one id, of different processes, for one request."""
    owners = []
    for number in range(2):
        seen: list[int] = []

        def note(batch: list[WriteRequest], inner: Callable[..., object], seen: list[int] = seen) -> object:
            seen += [request.rank for request in batch]
            return inner(batch)

        with opened(tmp_path / str(number), "disk", "lru", faults={"write": note}) as stack:
            stack.store_all(OLD)
        assert sorted(rank & 0xFFFF_FFFF for rank in seen) == [16 * chunk for chunk in range(1, OLD.chunks + 1)]
        assert len({rank >> 32 for rank in seen}) == 1
        owners.append(seen[0] >> 32)
    assert owners[0] != owners[1]
