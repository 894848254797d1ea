"""Process: an engine and a stack over the storages, from its start to an orderly close or a kill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from random import Random

from simulation.checks.checks import Checks
from simulation.checks.exception_guard import guarded
from simulation.checks.failure import demand
from simulation.checks.monitor import PROGRESS, Monitor
from simulation.checks.probe import Probe
from simulation.checks.trace import Trace
from simulation.drawing.features import key_at_hand
from simulation.drawing.run_spec import RunSpec
from simulation.engine.approximations import LossyCodec
from simulation.engine.engine import BatchingEngine
from simulation.engine.expected_bytes import Truth
from simulation.engine.kv_memory import KvMemory
from simulation.world.backends import plugin_of, registry_of
from simulation.world.executor import Executor
from simulation.world.storage import Storage
from tierkv.abc import WriteRequest
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.stack.opening import open_stack
from tierkv.testing.manual_clock import ManualClock
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Verb

ABANDONED = "are abandoned with their memory"
"""Error that a close may log: many copies that wait for one thread can take longer than it waits."""

CLOSE_S = 0.2
"""Seconds that a stack may take to write waiting chunks when it is closed."""

CLOSE_AT_REST_S = 60.0
"""Seconds for that without faults: enough to write a whole host tier, chunk by chunk."""

CLOSE_GRACE_S = 8.0
"""Seconds beyond that: one each for threads, backends and the event loop, and those of copies."""


@dataclass(frozen=True, slots=True)
class Era:
    """number: number of the process in the run. epoch: number of the weights."""

    number: int = 0
    epoch: int = 0


class Process:
    """One process of a run.

    Args:
        setup: spec of the run.
        storages: storage of each tier, by name.
        clock: simulated time.
        trace: gets a note of every event.
        duration: seconds of the work of a thread, by its name.
        era: number of the process in the run, and of its weights.
    """

    def __init__(
        self,
        setup: RunSpec,
        storages: Mapping[str, Storage],
        clock: ManualClock,
        trace: Trace,
        duration: Callable[[str], float],
        era: Era,
    ) -> None:
        self._storages = storages
        self._clock = clock
        self.trace = trace
        self.executor = Executor(clock, duration)
        plugins = [
            plugin_of(f"sim-{tier.name}", tier.capabilities, storages[tier.name], asynchronous=tier.asynchronous)
            for tier in setup.tiers
        ]
        runtime = Runtime(
            clock=clock,
            engine_sleep=self.executor.engine_sleep,
            io_sleep=self.executor.io_sleep,
            wait=self.executor.wait,
            spawn=self.executor.spawn,
            rng=Random(f"jitter {setup.seed} {era.number}"),
        )
        trace.note("open", f"process {era.number}, epoch {era.epoch}")
        for storage in storages.values():
            storage.was_indexed()
            storage.index_lost = True  # until it is scanned
        with guarded("open_stack"), key_at_hand():
            self.stack = open_stack(
                setup.config(str(era.epoch)), setup.engine, plugins=registry_of(plugins), runtime=runtime
            )
        lossy = LossyCodec(setup.lossy, self.stack.namespace) if setup.lossy else None
        self.truth = Truth(self.stack.geometry, str(era.epoch), lossy)
        self.probe = Probe(self.stack)
        self.monitor = Monitor(setup, self.probe, self.truth, trace, storages)
        for tier in setup.tiers:
            storage = storages[tier.name]
            storage.frame_check = partial(self.monitor.check_frame, tier)
        memory = KvMemory(setup.engine, self.truth, setup.gpu_blocks)
        for rank, worker in enumerate(self.stack.workers):
            worker.register_kv_caches(memory.caches(rank))
        self.engine = BatchingEngine(setup, self.stack, self.stack.workers, memory, self.monitor, self.pass_time)
        if setup.engine.capabilities.shows_free_blocks:
            self.stack.register_free_queue(self.engine.tables.pool.free_queue, setup.token_budget)
        self.checks = Checks(setup, self.probe, self.monitor, self.engine, storages)
        self.checks.opened()

    def pass_time(self, seconds: float) -> None:
        """Move the clock; I/O and copies go on."""
        with guarded("I/O"):
            self.executor.run_until(self._clock() + seconds)

    def kill(self) -> None:
        """Kill the process: operations in flight may have happened, in part or not at all."""
        self.trace.note("killed")
        for storage in self._storages.values():
            requests: list[WriteRequest] = list(chain.from_iterable(storage.under_way.values()))
            deletes: list[Key] = list(chain.from_iterable(storage.deletes_under_way.values()))
            for op in self.executor.ops_under_way(f"tierkv-{storage.name}-"):
                if op.verb is Verb.DELETE:
                    deletes += op.keys
                elif op.verb is Verb.WRITE:
                    slots = [self.probe.arena.slot(ref.slot) for ref in op.slots]
                    requests += [WriteRequest(key, slot) for key, slot in zip(op.keys, slots, strict=True)]
            storage.power_cut(requests, deletes)
        self.vanish()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Close the process in order, whatever the state of its tiers. Returns whether all chunks were written.

        Raises:
            Violation: it raised, or took longer than its bound.
        """
        self.trace.note("closing")
        started_s = self._clock()
        with guarded("close", allowed=ABANDONED) as abandoned:
            flushed = self.stack.close(timeout_s)
        demand(not (flushed and abandoned), PROGRESS, f"a close has written all, although {abandoned}")
        took_s = self._clock() - started_s
        demand(
            took_s <= timeout_s + CLOSE_GRACE_S, PROGRESS, f"closing took {took_s:g} s, it was given {timeout_s:g} s"
        )
        self.vanish()
        return flushed

    def vanish(self) -> None:
        """Stop everything that still runs, and free the memory."""
        self.executor.halt()
        self.probe.arena.close()
        for storage in self._storages.values():
            storage.under_way.clear()
            storage.deletes_under_way.clear()
            storage.opening = None
