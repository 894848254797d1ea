"""Meters inside an engine process: seconds per call and per step, counts, bytes that were read."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Side = Literal["scheduler", "worker"]

SCHEDULER_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
    "has_pending_push_work",
    "has_pending_block_frees",
)
WORKER_CALLS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)
"""Calls of vLLM into a connector, on its two sides; both are the engine's thread here."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of durations in seconds."""

    count: int = 0
    total_s: float = 0.0
    median_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary:
        """Summarise durations; zeros if there are none."""
        if not seconds:
            return cls()
        ranked = sorted(seconds)
        p99 = ranked[math.ceil(0.99 * len(ranked)) - 1]
        return cls(len(ranked), sum(ranked), statistics.median(ranked), p99, ranked[-1])


@dataclass(slots=True)
class Step:
    """One step of the engine.

    tokens: that it computed. scheduling_s: of ``schedule`` and ``update_from_output``, the connector's part in them
    included; cpu_s: the same on the processor. scheduler_s, worker_s: in the connector, by its two sides.
    """

    tokens: int = 0
    scheduling_s: float = 0.0
    cpu_s: float = 0.0
    scheduler_s: float = 0.0
    worker_s: float = 0.0


@dataclass(slots=True)
class Phase:
    """Measurements between two readings."""

    steps: list[Step] = field(default_factory=list)
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: summaries in place of lists. ``working`` are steps with work."""
        working = [step for step in self.steps if step.tokens]
        every_call = [seconds for durations in self.calls.values() for seconds in durations]
        return {
            "steps": len(self.steps),
            "working_steps": len(working),
            "scheduling": asdict(Summary.of([step.scheduling_s for step in working])),
            "scheduling_cpu": asdict(Summary.of([step.cpu_s for step in working])),
            "idle_scheduling": asdict(Summary.of([step.scheduling_s for step in self.steps if not step.tokens])),
            "connector": asdict(Summary.of([step.scheduler_s + step.worker_s for step in working])),
            "every_call": asdict(Summary.of(every_call)),
            "calls": {name: asdict(Summary.of(durations)) for name, durations in sorted(self.calls.items())},
            "counts": dict(self.counts),
            "bytes_read": self.bytes_read,
        }


class Meters:
    """Meters around an engine's methods. Used on the engine's thread."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._phase = Phase()
        self._step = Step()
        self._bytes_before = os_bytes_read()

    @property
    def worked(self) -> bool:
        """Whether the latest step computed something."""
        return self._step.tokens > 0

    @property
    def steps(self) -> int:
        """Number of steps of this phase."""
        return len(self._phase.steps)

    def take(self) -> Phase:
        """End the phase, and begin another."""
        now = os_bytes_read()
        phase, self._phase = self._phase, Phase()
        phase.bytes_read, self._bytes_before = now - self._bytes_before, now
        return phase

    def count(self, what: str, number: int = 1) -> None:
        """Add to one of this phase's counts."""
        self._phase.counts[what] += number

    def watch_engine(self, scheduler: Any) -> None:  # noqa: ANN401 - an object of vLLM
        """A step begins with ``schedule`` and ends with ``update_from_output``."""
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            self._step = Step()
            self._phase.steps.append(self._step)
            output = self._timed(schedule, *args, **kwargs)
            self._step.tokens = output.total_num_scheduled_tokens
            return output

        def watched_update(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            return self._timed(update, *args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update

    def _timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
        began_s, cpu_s = self._clock(), self._cpu()
        try:
            return call(*args, **kwargs)
        finally:
            self._step.cpu_s += self._cpu() - cpu_s
            self._step.scheduling_s += self._clock() - began_s

    def watch_connector(self, connector: object, names: Iterable[str], side: Side) -> None:
        """Time every call of these methods, as far as the connector has them."""
        for name in names:
            call = getattr(connector, name, None)
            if call is not None:
                setattr(connector, name, self._watched(name, call, side))

    def _watched(self, name: str, call: Callable[..., Any], side: Side) -> Callable[..., Any]:
        clock = self._clock

        def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            began_s = clock()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = clock() - began_s
                self._phase.calls[name].append(seconds)
                if side == "scheduler":
                    self._step.scheduler_s += seconds
                else:
                    self._step.worker_s += seconds

        return watched

    def watch_answers(self, connector: Any) -> None:  # noqa: ANN401 - an object of vLLM
        """Count questions, answers "not known yet", and tokens to be loaded."""
        ask, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def asked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            answer = ask(*args, **kwargs)
            self.count("questions")
            self.count("deferrals", answer[0] is None)
            return answer

        def told(request: object, blocks: object, num_external_tokens: int) -> Any:  # noqa: ANN401 - passed on
            self.count("tokens_loaded", num_external_tokens)
            return allocated(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = asked, told

    def watch_count(self, target: object, name: str, what: str) -> None:
        """Count the calls of a method without timing them."""
        call = getattr(target, name)

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            self._phase.counts[what] += 1
            return call(*args, **kwargs)

        setattr(target, name, counted)


def os_bytes_read() -> int:
    """Bytes that system calls have read for this process so far, as the kernel counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(fields["rchar"])
