"""Meter of whole steps in an engine process: processor time of the engine's thread, or function calls on it.

A step begins with ``schedule`` and ends before the next. It has vLLM's own scheduling, the connector's part of it, and
the connector's calls on the worker's side, which is the same thread here. The model is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal

from benchmarks.call_meters import Calls, CallTimes
from benchmarks.side_by_side.meters import SCHEDULER_CALLS, WORKER_CALLS

What = Literal["calls", "cpu_us"]


@dataclass(slots=True)
class MeteredStep:
    """One step."""

    cost: float = 0.0
    """Calls, or microseconds of processor time."""
    tokens: int = 0
    """Tokens that it computes."""
    running: int = 0
    """Requests in it."""
    chunks: int = 0
    """Blocks that it completes."""
    prompts: int = 0
    """Requests that it schedules for the first time."""


@dataclass(slots=True)
class StepMeter:
    """Sums the cost of each step. Used on the engine's thread.

    Attributes:
        what: unit of the cost.
        steps: since the last :meth:`take`.
    """

    block_tokens: int
    what: What = "cpu_us"
    steps: list[MeteredStep] = field(default_factory=list)
    _step: MeteredStep = field(default_factory=MeteredStep)
    _is_inside: bool = False

    @property
    def worked(self) -> bool:
        """Whether the latest step computed something."""
        return self._step.tokens > 0

    def take(self) -> list[MeteredStep]:
        """End a phase, and return its steps."""
        steps, self.steps = self.steps, []
        return steps

    def watch(self, scheduler: Any, connectors: Iterable[Any]) -> None:  # noqa: ANN401 - objects of vLLM
        """Meter the scheduler, and every call of the connector's two sides."""
        for connector in connectors:
            for name in {*SCHEDULER_CALLS, *WORKER_CALLS}:
                call = getattr(connector, name, None)
                if call is not None:
                    setattr(connector, name, self._metered(call))
        schedule = self._metered(scheduler.schedule)

        def metered_schedule(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            self._step = MeteredStep()
            self.steps.append(self._step)
            output = schedule(*args, **kwargs)
            self._note(output)
            return output

        scheduler.schedule = metered_schedule
        scheduler.update_from_output = self._metered(scheduler.update_from_output)

    def _note(self, output: Any) -> None:  # noqa: ANN401 - vLLM's SchedulerOutput
        step, counts = self._step, output.num_scheduled_tokens
        step.tokens, step.running = output.total_num_scheduled_tokens, len(counts)
        step.prompts = len(output.scheduled_new_reqs)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, count in counts.items():
            before = computed[request_id]
            step.chunks += (before + count) // self.block_tokens - before // self.block_tokens

    def _metered(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Meter the outermost of nested calls; inner ones pass at the cost of nothing that is counted."""
        own = frozenset(code for code in StepMeter._metered.__code__.co_consts if isinstance(code, CodeType))

        def metered(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            if self._is_inside:
                return call(*args, **kwargs)
            self._is_inside = True
            meter = Calls(ignored=own) if self.what == "calls" else CallTimes()
            try:
                return meter.of(call, *args, **kwargs)
            finally:
                self._is_inside = False
                self._step.cost += meter.total

        return metered
