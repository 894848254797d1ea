"""Scheduler and manager on simulated time, with simulated tiers: the calls of an engine, each timed by itself.

Only the time of tiers, copies and forward passes is simulated. What a call costs is measured: seconds of processor time
of this thread, which other processes hardly affect. A step begins, as in a stack, with its completions.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from benchmarks.core.rig import BenchRequest, open_policy
from benchmarks.stress.simulated_tiers import Pace, SimulatedTiers
from tierkv.config.schema import HostConfig, LookupConfig, StepConfig
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.wiring import WiredCore, wire_core
from tierkv.stack.tier_factory import share_host_slots
from tierkv.types.engine import BlockTables, LoadReport, StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.transfers import WorkerOutput

LIMIT_MS = 5.0
"""Target of a call on the engine's thread, in milliseconds of processor time."""
COPY_S = 0.00005
"""Seconds in which a worker copies a chunk."""
BEGIN = "begin_step and completions"
PLAIN = "a plain loop"

_T = TypeVar("_T")


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's garbage collector off: ``engine_calls`` has its part, and here it would fall on any call."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class CallCosts:
    """Processor time of calls, in seconds.

    Attributes:
        worst_s: name of a call -> its longest.
        total_s: name of a call -> all of them together.
        steps_s: sum of the calls of each step.
    """

    def __init__(self) -> None:
        self.worst_s: defaultdict[str, float] = defaultdict(float)
        self.total_s: defaultdict[str, float] = defaultdict(float)
        self.steps_s: list[float] = [0.0]

    def call(self, name: str, function: Callable[[], _T]) -> _T:
        """Make a call and note its time."""
        began_s = time.thread_time()
        result = function()
        took_s = time.thread_time() - began_s
        self.worst_s[name] = max(self.worst_s[name], took_s)
        self.total_s[name] += took_s
        if name != PLAIN:
            self.steps_s[-1] += took_s
        return result

    def end_step(self) -> None:
        """Run the plain loop beside which figures are shown, and begin the next step."""
        self.call(PLAIN, _plain_loop)
        self.steps_s.append(0.0)

    @property
    def worst(self) -> tuple[str, float]:
        """The slowest call and its seconds."""
        return max(((name, took) for name, took in self.worst_s.items() if name != PLAIN), key=lambda call: call[1])


def _plain_loop() -> int:
    total = 0
    for number in range(8_000):
        total += number
    return total


class ClockedCore:
    """Core at the default configuration, but for what is given, and its clock.

    Args:
        geometry: sizes of chunks.
        slots: chunks of the host tier.
        lower: lower tiers; the pace of each is in ``paces``.
        paces: durations of the tiers' calls.
        deadline_s: of lookups; None: the default.
        prefill_tokens_per_s: rate that the engine states; None: measured.
    """

    def __init__(  # noqa: PLR0913 - a configuration, of which each part can be left out
        self,
        geometry: Geometry,
        slots: int,
        lower: Sequence[LowerTier] = (),
        paces: Sequence[Pace] = (),
        *,
        deadline_s: float | None = None,
        prefill_tokens_per_s: float | None = None,
    ) -> None:
        share_host_slots(lower, slots)
        limits = SchedulerLimits(
            lookup_deadline_s=LookupConfig().deadline_s if deadline_s is None else deadline_s,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        self.core: WiredCore = wire_core(
            geometry,
            HostTier(slots, open_policy("lru", slots)),
            lower,
            limits=limits,
            reserved_chunks_max=max(1, int(slots * HostConfig(capacity=1).reserved_share)),
            step_keys_max=StepConfig().keys_max,
        )
        self.tiers = SimulatedTiers(paces, geometry.payload_bytes_max)
        self._completions = self.core.manager.budget.share()  # as in a stack
        self.costs = CallCosts()
        self.now_s = 1000.0
        self.num_steps = 0
        self._in_step = False
        self._copying: dict[int, float] = {}  # job -> end of its copy
        self._queued: list[tuple[int, int]] = []  # stores, begun with the next step: job, chunks

    # -- the calls of an engine ----------------------------------------------------------------------------------------

    def on_new_request(self, request: BenchRequest) -> None:
        """Announce a request."""
        self.begin_step()
        self.costs.call("on_new_request", partial(self.core.scheduler.on_new_request, request))

    def ask(self, request: BenchRequest) -> int | None:
        """Ask for the tokens that can be loaded."""
        self.begin_step()
        ask = partial(self.core.scheduler.get_num_new_matched_tokens, request, 0)
        return self.costs.call("get_num_new_matched_tokens", ask)[0]

    def allocate(self, request: BenchRequest, tables: BlockTables, tokens: int) -> None:
        """Give a request its blocks, and accept the load of ``tokens``."""
        self.begin_step()
        allocate = partial(self.core.scheduler.update_state_after_alloc, request, tables, tokens)
        self.costs.call("update_state_after_alloc", allocate)

    def finish(self, request: BenchRequest) -> None:
        """End a request."""
        self.costs.call("request_finished", partial(self.core.scheduler.request_finished, request, [[]]))

    def begin_step(self) -> None:
        """Begin a step with its completions, once."""
        if not self._in_step:
            self._in_step = True
            self.tiers.advance(self.now_s)
            self.costs.call(BEGIN, self._take_in)

    def _take_in(self) -> None:
        manager = self.core.manager
        manager.begin_step(self.now_s)
        for completion in self.tiers.drain(self.now_s, self._completions.left):
            self._completions.take(completion.num_keys)
            manager.on_completion(completion)
        self.core.scheduler.begin_step(self.now_s)

    def end_step(self, step: StepOutput, step_s: float) -> LoadReport:
        """Hand out the step's jobs, let ``step_s`` pass, and report the jobs that have ended meanwhile."""
        self.begin_step()
        scheduler = self.core.scheduler
        meta = self.costs.call("build_connector_meta", partial(scheduler.build_connector_meta, step))
        self._submit()
        for job_id, chunks in self._queued:
            self._copying[job_id] = self.now_s + chunks * COPY_S
        self._queued = [(job.job_id, len(job.keys)) for job in meta.stores]
        for job in meta.loads:
            self._copying[job.job_id] = self.now_s + len(job.keys) * COPY_S
        self.now_s += step_s
        ended = [job for job, end_s in self._copying.items() if end_s <= self.now_s or job in meta.jobs_to_flush]
        for job_id in ended:
            del self._copying[job_id]
        output = WorkerOutput(dict.fromkeys(ended, 1))
        report = self.costs.call("update_connector_output", partial(scheduler.update_connector_output, output))
        if ended:
            self._submit()
        self.costs.call("take_events", self.core.manager.take_events)
        self.costs.end_step()
        self._in_step = False
        self.num_steps += 1
        return report

    def _submit(self) -> None:
        for op in self.costs.call("take_ops", self.core.manager.take_ops):
            self.tiers.submit(op, self.now_s)
