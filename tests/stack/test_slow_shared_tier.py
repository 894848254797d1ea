"""A shared tier that needs 2.5 ms per key to say what it has, asked for many chunks at once, in simulated time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from plain_files import PlainOptions, SharedPlainFiles
from simulation.world.executor import Executor

from tierkv.abc import BackendPlugin, Capabilities
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import load_plugins
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack
from tierkv.testing.engines.hand_engine import HandEngine, HandRequest, Prompt, engine_spec
from tierkv.testing.manual_clock import ManualClock
from tierkv.types.engine import LoadReport, StepOutput
from tierkv.types.tier_ops import Verb

PAYLOAD_BYTES, SLOT_BYTES = 1024, 8192
STEP_S = 0.02
SLOW = Capabilities(durable=True, shared=True, bounded=False, preferred_concurrency=8)
S_PER_KEY = {Verb.PROBE: 0.0025, Verb.READ: 0.001, Verb.WRITE: 0.0001, Verb.DELETE: 0.0001}


class SlowPlugin:
    """Plain files, declared as shared."""

    TIERKV_SPI = 1

    @hookimpl
    def tierkv_backends(self) -> list[BackendPlugin]:
        """The one backend."""
        return [BackendPlugin("slow", "one file per chunk", PlainOptions, SLOW, SharedPlainFiles)]


class SlowTier(HandEngine):
    """Engine with steps of 20 ms over a real stack, whose threads work in simulated time.

    Args:
        place: path of the files.
        concurrency: calls that the backend takes at once.
        tier: further keys of the tier's table.
    """

    def __init__(self, place: Path, concurrency: int = 8, **tier: Any) -> None:
        self.executor = Executor(ManualClock(), self._duration)
        self.hanging: set[str] = set()
        config = {
            "host": {"capacity": 1200 * SLOT_BYTES},
            "lookup": {"recompute": "off"},
            "tiers": [{"name": "slow", "backend": "slow", "path": str(place), "io_threads": concurrency, **tier}],
        }
        runtime = Runtime(
            clock=self.executor.clock,
            engine_sleep=self.executor.engine_sleep,
            io_sleep=self.executor.io_sleep,
            wait=self.executor.wait,
            spawn=self.executor.spawn,
        )
        registry = load_plugins([SlowPlugin()], entry_points=lambda **_: ())
        stack: Stack = open_stack(config, engine_spec("slow", PAYLOAD_BYTES), plugins=registry, runtime=runtime)
        super().__init__(stack, PAYLOAD_BYTES, num_blocks=1100)

    def _duration(self, name: str) -> float:
        if name in self.hanging:
            return math.inf
        return sum(S_PER_KEY[op.verb] * len(op.keys) for op in self.executor.ops_under_way(name))

    def step(self, output: StepOutput | None = None, forward: Any = lambda: None) -> LoadReport:
        """One engine step, and the time that it takes."""
        self.executor.run_until(self.executor.clock.now_s + STEP_S)
        return super().step(output, forward)

    def fill(self, *prompts: Prompt) -> None:
        """Have the tier, and nothing else, contain these prompts, as if other processes had written them."""
        for prompt in prompts:
            self.store(prompt)
        self.step_until(lambda: not self.stack.introspection.stack().has_pending_changes, "the writes")
        self.stack.reset_cache()
        self.executor.run_until(self.executor.clock.now_s + 60.0)  # answers about own writes have expired

    def load_together(self, prompts: list[Prompt]) -> list[int]:
        """Let all requests wait at once, and load what is offered to each. Returns the chunks loaded of each."""
        waiting: list[tuple[int, HandRequest]] = list(enumerate(map(self.arrive, prompts)))
        loaded = [0] * len(prompts)
        while waiting:
            self.step()
            for number, request in list(waiting):
                chunks = self.ask(request)
                if chunks is not None:
                    waiting.remove((number, request))
                    loaded[number] = self.load_for(request, chunks)
                    self.end(request)
        return loaded


@pytest.mark.parametrize("requests", [3, 5])
def test_requests_together_get_all_their_chunks(tmp_path: Path, requests: int) -> None:
    """Five requests of 200 chunks ask for 2.5 s of answers, more than the deadline of a probe. Asked one after the
    other in one probe, all of them would be misses. The tier takes eight calls at once, and each answer counts."""
    prompts = [Prompt(number, 200) for number in range(requests)]
    slow = SlowTier(tmp_path)
    slow.fill(*prompts)
    began_s = slow.executor.clock.now_s
    assert slow.load_together(prompts) == [200] * requests
    assert slow.executor.clock.now_s - began_s < 5.0
    assert slow.stack.close(timeout_s=30.0)


def test_one_call_at_a_time_still_answers_in_time(tmp_path: Path) -> None:
    """A backend that takes a single call at once answers for 2.5 s. No deadline of a probe passes, since
    what waits is not part of one yet; so nothing is lost."""
    prompts = [Prompt(number, 200) for number in range(5)]
    slow = SlowTier(tmp_path, concurrency=1)
    slow.fill(*prompts)
    assert slow.load_together(prompts) == [200] * 5
    assert slow.stack.close(timeout_s=30.0)


def test_a_hanging_thread_costs_no_chunk(tmp_path: Path) -> None:
    """One of eight threads hangs before it asks. The other requests are served meanwhile. After its deadline its keys
    are asked for again by another thread, since nothing is known of them."""
    prompts = [Prompt(number, 200) for number in range(5)]
    slow = SlowTier(tmp_path)
    slow.fill(*prompts)
    slow.hanging.add("tierkv-slow-7")
    assert slow.load_together(prompts) == [200] * 5
    slow.hanging.clear()
    slow.executor.release("tierkv-slow-7")
    assert slow.stack.close(timeout_s=30.0)


def test_a_long_forward_pass_makes_no_probe_late(tmp_path: Path) -> None:
    """A prompt that the tier has is computed again. Its store ends in a step that is longer than the deadline of a
    probe. The tier is asked for its chunks then: the deadline counts from there, and no chunk is written twice."""
    prompt = Prompt(1, 20)
    slow = SlowTier(tmp_path, probe_deadline_s=1.0, presence_ttl_s=1.0)
    slow.store(prompt)
    slow.step_until(lambda: not slow.stack.introspection.stack().has_pending_changes, "the writes")
    slow.stack.reset_cache()
    slow.executor.run_until(slow.executor.clock.now_s + 5.0)
    request = slow.arrive(prompt)
    slow.allocate(request, 0)
    slow.step(StepOutput((slow.schedule(request, 0),)), lambda: slow.compute(request, 0))
    slow.step(forward=lambda: slow.executor.run_until(slow.executor.clock.now_s + 3.0))
    slow.end(request)
    for _ in range(50):
        slow.step()
    counters = slow.stack.metrics.counters
    assert (counters.cascades["slow"], counters.writes_skipped["slow"]) == (20, 20)
    assert slow.stack.close(timeout_s=30.0)
