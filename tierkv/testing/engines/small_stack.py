"""Small stack: the backend under test inside a real stack, with everything of a deployment but engine and GPU.

The stack's clock is constant until a test moves it, so a deadline never passes because the machine is busy. Threads,
event loops, frames, queues, breakers and accounts are the real ones.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from tierkv.abc import AsyncBackend, Backend, BackendContext, BackendPlugin
from tierkv.dispatch.lanes.async_lane import LoopRunner
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.dispatch.threads.spawn import Handle, Runner, start_thread
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry
from tierkv.stack.opening import open_stack
from tierkv.testing.engines.hand_engine import (
    PATIENCE_S,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    HandEngine,
    HandRequest,
    Prompt,
    engine_spec,
)
from tierkv.testing.faults import AsyncFaultyBackend, Fault, FaultyBackend, Inner, VerbName
from tierkv.testing.manual_clock import ManualClock
from tierkv.testing.raw import VerbAccess, wrap

TESTED, SECOND = "tested", "second"
"""Names of the tiers: the backend under test with faults, and optionally once more without."""

LOOKUP_DEADLINE_S = 5.0
READ_DEADLINE_S = 2.0
PROBE_DEADLINE_S = 1.0
WRITE_DEADLINE_S = 3.0
COOLDOWN_S = 4.0
ASKS_MAX = 40
STILL_POLLS = 10


@dataclass(frozen=True, slots=True)
class NoOptions:
    """No options: the registry makes the suite's own options."""


class MakeOptions(Protocol):
    """Factory of options, from the suite."""

    def __call__(self, place: Path) -> object:
        """Make options for data at ``place``."""


class SmallStack(HandEngine):
    """Open stack over the backend under test, driven as a hand engine. A context manager; closes within its bound.

    Args:
        plugin: under test.
        make_options: its options.
        place: path of its data; the second tier's are beside it.
        capacity_bytes: of each lower tier, None where it may have none.
        model: another one is another namespace.
        payload_bytes: of a chunk; another length is another namespace.
        host_slots: chunks of the host tier.
        second: whether there is a second lower tier; ``second_first``: whether it is searched first.
        tier: further keys of the tested tier's table.
        faults: rules that apply from the open on.
        pace: speed of the clock relative to real time while open, flush and close wait.

    Attributes:
        clock: the stack's clock; move it to let deadlines pass.
        faulty: the backend under test, with rules.
        context: what it was opened with.
    """

    def __init__(  # noqa: PLR0913 - all that a test may choose; each has a default
        self,
        plugin: BackendPlugin,
        make_options: MakeOptions,
        place: Path,
        *,
        capacity_bytes: int | None,
        model: str = "conformance",
        payload_bytes: int = PAYLOAD_BYTES,
        host_slots: int = 32,
        second: bool = False,
        second_first: bool = False,
        tier: Mapping[str, Any] | None = None,
        pace: float = 1.0,
        faults: Mapping[VerbName, Fault] | None = None,
    ) -> None:
        self.clock = ManualClock()
        self._released = threading.Event()
        self._hanging: list[None] = []
        self._loops: list[asyncio.AbstractEventLoop] = []
        self.opened: list[FaultyBackend | AsyncFaultyBackend] = []
        self.contexts: list[BackendContext] = []
        self._pace = pace
        self._faults = faults or {}
        writes = "read_only" if plugin.capabilities.read_only else "through"
        common: dict[str, Any] = {
            "retries": 0,
            "breaker_failures": 1000,
            "breaker_cooldown_s": COOLDOWN_S,
            "probe_deadline_s": PROBE_DEADLINE_S,
            "read_deadline_s": READ_DEADLINE_S,
            "write_deadline_s": WRITE_DEADLINE_S,
            "write": writes,
        }
        if capacity_bytes is not None:
            common["capacity"] = capacity_bytes
        tiers: list[dict[str, Any]] = [{"name": TESTED, "backend": TESTED, **common, **(tier or {})}]
        if second:
            tiers.insert(0 if second_first else 1, {"name": SECOND, "backend": SECOND, **common})
        config = {
            "host": {"capacity": host_slots * SLOT_BYTES},
            "lookup": {"deadline_s": LOOKUP_DEADLINE_S, "recompute": "off"},
            "tiers": tiers,
        }
        registry = self._registry(plugin, make_options, place)
        runtime = Runtime(clock=self.clock, engine_sleep=self._engine_sleep, io_sleep=lambda _: None, spawn=self._spawn)
        stack = open_stack(config, engine_spec(model, payload_bytes), plugins=registry, runtime=runtime)
        super().__init__(stack, payload_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> bool:
        """Remove all faults and close the stack. Returns whether all stored chunks reached the tiers."""
        self.release()
        return self.stack.close(timeout_s=PATIENCE_S / 2)

    def close_inner(self) -> None:
        """Close the backend itself, after a stack that abandoned it."""
        ended = self.faulty.inner.close()
        if inspect.iscoroutine(ended):
            asyncio.run(ended)

    def wedge(self, *verbs: VerbName) -> None:
        """Let all calls of these verbs hang from now on."""
        for verb in verbs:
            self.faulty.add(verb, partial(self._hang, self._released))

    def _hang(self, released: threading.Event, batch: Sequence[Any], inner: Inner) -> object:
        self._hanging.append(None)
        try:
            released.wait()
        finally:
            self._hanging.pop()
        return inner(batch)

    def _is_moving(self) -> bool:
        """Whether I/O is in flight that can end by itself; wedged calls cannot."""
        tiers = self.stack.introspection.tiers()
        others = sum(tier.pending_ops for name, tier in tiers.items() if name != TESTED)
        if others or not self._hanging:
            return others > 0 or self.pending > 0
        return self.faulty.running > len(self._hanging)

    def release(self) -> None:
        """End all hanging calls, and every other fault."""
        self.faulty.rules.clear()
        self._released.set()
        self._released = threading.Event()

    @property
    def faulty(self) -> FaultyBackend | AsyncFaultyBackend:
        """The backend under test."""
        return self.opened[0]

    @property
    def context(self) -> BackendContext:
        """Context with which the backend under test was opened."""
        return self.contexts[0]

    @property
    def verbs(self) -> VerbAccess:
        """The backend under test, past the framework."""
        if isinstance(self.faulty, AsyncFaultyBackend) and self.faulty.loop is None:  # it had no call yet
            self.faulty.loop = self._loops[0]
        return VerbAccess(self.faulty, self.context.frame_bytes_max)

    # -- shorthands --------------------------------------------------------------------------------------------------

    def store_all(self, *prompts: Prompt) -> None:
        """Store prompts, and wait until they are written to the lower tiers."""
        for prompt in prompts:
            self.store(prompt)
        self.settle()

    def settle(self) -> None:
        """Step until no write or deletion of the lower tiers is pending."""

        def is_quiet() -> bool:
            self.stack.flush(0.0)  # takes in completions and submits; its answer does not matter here
            return not (self.stack.introspection.stack().has_pending_changes or self.pending)

        self.step_until(is_quiet, "the writes to end")

    def host_is_idle(self) -> bool:
        """Whether every slot of the host tier is free or may be evicted."""
        return self.stack.introspection.stack().host_is_idle

    @property
    def pending(self) -> int:
        """Number of I/O operations that have not ended."""
        return self.stack.introspection.stack().pending_ops

    def forget_host(self) -> None:
        """Empty the host tier, so that later loads read the lower tiers."""
        self.stack.reset_cache()
        self.step()

    def load_cold(self, prompt: Prompt) -> int:
        """Load a prompt from the lower tiers."""
        self.forget_host()
        return self.load(prompt)

    def pass_time(self, seconds: float) -> None:
        """Move the clock, and run one step."""
        self.clock.advance(seconds)
        self.step()

    def until_usable(self) -> None:
        """Move the clock until the tested tier is usable.

        Raises:
            AssertionError: its breaker stays open.
        """
        for _ in range(ASKS_MAX):
            if self.stack.introspection.tiers()[TESTED].usable:
                return
            self.pass_time(2 * COOLDOWN_S)
            self.step_until(lambda: not self.stack.introspection.stack().pending_trials, "a trial of the tier to end")
        raise AssertionError(f"the tier is still out of service after {ASKS_MAX * 2 * COOLDOWN_S:g} s")

    def resolve(self, request: HandRequest) -> int:
        """Ask until the answer is known, moving the clock between two questions.

        Raises:
            AssertionError: there is no answer long after the lookup's deadline.
        """
        for _ in range(ASKS_MAX):
            still, give_up_s = 0, time.monotonic() + PATIENCE_S
            while still < STILL_POLLS:  # a busy machine must not look like a hung tier
                answer = self.ask(request)
                if answer is not None:
                    return answer
                self.step()
                time.sleep(0.001)
                still = 0 if self._is_moving() else still + 1
                assert time.monotonic() < give_up_s, "a tier that is not wedged does not answer"
            self.pass_time(0.5)
        raise AssertionError(f"no answer {ASKS_MAX * 0.5:g} s after the question; deadline {LOOKUP_DEADLINE_S:g} s")

    def lookup(self, request: HandRequest) -> int:
        """Ask until the answer is known. With faults the clock must move: a hanging lookup ends at its deadline."""
        return self.resolve(request) if self.faulty.rules else super().lookup(request)

    def load_within_deadline(self, prompt: Prompt) -> int:
        """Load a prompt while the clock moves."""
        request = self.arrive(prompt)
        try:
            return self.load_for(request, self.resolve(request))
        finally:
            self.end(request)

    # -- opening -----------------------------------------------------------------------------------------------------

    def _registry(self, plugin: BackendPlugin, make_options: MakeOptions, place: Path) -> PluginRegistry:
        def open_tested(context: BackendContext, _options: object) -> Backend | AsyncBackend:
            faulty = wrap(plugin.open(context, make_options(place)))
            for verb, fault in self._faults.items():
                faulty.add(verb, fault)
            self.opened.append(faulty)
            self.contexts.append(context)
            return faulty

        def open_second(context: BackendContext, _options: object) -> Backend | AsyncBackend:
            return plugin.open(context, make_options(place.with_name(f"{place.name}-{SECOND}")))

        named = {TESTED: open_tested, SECOND: open_second}
        plugins = [
            replace(plugin, name=name, options=NoOptions, open=opening, check=None) for name, opening in named.items()
        ]

        class Kit:
            TIERKV_SPI = 1

            @hookimpl
            def tierkv_backends(self) -> list[BackendPlugin]:
                return plugins

        return load_plugins([Kit()], entry_points=lambda **_: ())

    def _spawn(self, name: str, runner: Runner) -> Handle:
        """Start a thread, and remember the event loop that it runs, if any."""
        if isinstance(runner, LoopRunner):
            self._loops.append(runner.loop)
        return start_thread(name, runner)

    def _engine_sleep(self, seconds: float) -> None:
        self.clock.advance(seconds * self._pace)
        time.sleep(seconds)
