"""Engine that runs a few requests at a time and lets the others wait, on simulated time. It computes nothing.

It asks for waiting requests in the order of their arrival while fewer than ``running_max`` run or load, as vLLM does,
and asks about none of them while it is full. Each request generates some tokens before the next one takes its place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from benchmarks.core.rig import BLOCK_TOKENS, BenchRequest
from benchmarks.stress.clocked_core import ClockedCore
from tierkv.reference.block_pool import Block, BlockPool
from tierkv.types.engine import ScheduledRequest, StepOutput
from tierkv.types.geometry import cdiv

STEP_S = 0.02
"""Duration of a decode step."""
IDLE_S = 0.001
"""Duration of a step that computes nothing."""
PREFILL_TOKENS_PER_S = 4_000.0
BATCH_TOKENS = 2_048
STEPS_MAX = 1_000_000


@dataclass(eq=False, slots=True)
class Served:
    """One request in the engine."""

    request: BenchRequest
    output_tokens: int
    tables: list[list[Block]] = field(default_factory=list)
    """Blocks by group, for the whole prompt; the null block where a loaded window has passed."""
    computed: int = 0
    """Tokens computed or loaded."""
    loaded: int = 0
    waited_s: float = 0.0
    """Time from the begin of serving until it ran."""
    is_known: bool = False
    """Whether the core has been given its table."""

    def give_up(self, invalid: AbstractSet[int]) -> None:
        """Compute what follows the first of these blocks, which was not loaded."""
        numbers = (i for table in self.tables for i, block in enumerate(table) if block.block_id in invalid)
        self.computed = self.loaded = min(self.loaded, BLOCK_TOKENS * min(numbers, default=len(self.tables[0])))

    @property
    def end(self) -> int:
        """Tokens after which it is complete."""
        return self.request.num_prompt_tokens + self.output_tokens


def prompt_of(request_id: str, hashes: list[bytes], odd_tokens: int) -> BenchRequest:
    """Prompt of whole chunks, and some tokens that no chunk covers."""
    request = BenchRequest(request_id, hashes)
    request.num_tokens += odd_tokens
    request.num_prompt_tokens += odd_tokens
    return request


class QueueEngine:
    """Engine over a core.

    Args:
        clocked: the core.
        prompts: arrive at once, in this order.
        running_max: requests that run or load at a time.
        output_tokens: tokens that each request generates.

    Attributes:
        computed_tokens: prompt tokens that were computed.
        done: ended requests.
    """

    def __init__(
        self, clocked: ClockedCore, prompts: Sequence[BenchRequest], running_max: int, output_tokens: int
    ) -> None:
        self.clocked = clocked
        self.computed_tokens = 0
        self.done: list[Served] = []
        self._running_max = running_max
        self._waiting = [Served(prompt, output_tokens) for prompt in prompts]
        self._began_s = clocked.now_s
        self._loading: dict[str, Served] = {}
        self._running: list[Served] = []
        blocks = max(cdiv(served.end, BLOCK_TOKENS) for served in self._waiting)
        self._windows = [group.window_chunks for group in clocked.core.geometry.groups]
        self._pool = BlockPool(1 + running_max * blocks * len(self._windows))
        for prompt in prompts:
            clocked.on_new_request(prompt)

    def serve(self) -> float:
        """Serve all requests. Returns the simulated seconds.

        Raises:
            RuntimeError: there is no end.
        """
        began_s = self.clocked.now_s
        while self._waiting or self._loading or self._running or self.clocked.core.scheduler.has_pending_work:
            self.step()
            if self.clocked.num_steps > STEPS_MAX:
                raise RuntimeError(f"no end after {STEPS_MAX:,} steps: {len(self._waiting)} requests wait")
        return self.clocked.now_s - began_s

    def step(self) -> None:
        """Make one step."""
        entries: list[tuple[Served, ScheduledRequest]] = []
        budget = BATCH_TOKENS
        self._admit()
        for served in self._running:
            tokens = min(budget, max(1, served.request.num_prompt_tokens - served.computed))
            budget -= tokens
            if tokens:
                entries.append((served, self._entry(served, tokens)))
        report = self.clocked.end_step(StepOutput(tuple(entry for _, entry in entries)), self._advance(entries))
        for request_id in report.finished & self._loading.keys():
            served = self._loading.pop(request_id)
            served.give_up(report.invalid_block_ids)
            self._fill(served)
            self._run(served)
        for served in [served for served in self._running if served.computed >= served.end]:
            self._running.remove(served)
            self.clocked.finish(served.request)
            self._release(served)
            self.done.append(served)

    def _admit(self) -> None:
        for served in list(self._waiting):
            if len(self._running) + len(self._loading) >= self._running_max:
                return
            tokens = self.clocked.ask(served.request)
            if tokens is None:
                continue
            self._waiting.remove(served)
            served.tables = [[self._pool.null_block] * cdiv(served.end, BLOCK_TOKENS) for _ in self._windows]
            served.computed = served.loaded = tokens
            self._fill(served)
            self.clocked.allocate(served.request, served.tables, tokens)
            if tokens:
                self._loading[served.request.request_id] = served
            else:
                self._run(served)

    def give_up(self, request_ids: Collection[str]) -> None:
        """Take requests back that wait."""
        for served in [served for served in self._waiting if served.request.request_id in request_ids]:
            self._waiting.remove(served)
            self.clocked.finish(served.request)

    def _fill(self, served: Served) -> None:
        """Give a request the blocks that it lacks; none where a window has passed with what it loads."""
        for table, window in zip(served.tables, self._windows, strict=True):
            passed = 0 if window is None else served.loaded // BLOCK_TOKENS - window
            for number in range(max(0, passed), len(table)):
                if table[number].is_null:
                    (table[number],) = self._pool.allocate(1)

    def _release(self, served: Served) -> None:
        self._pool.release([block for table in served.tables for block in reversed(table)])

    def _run(self, served: Served) -> None:
        served.waited_s = self.clocked.now_s - self._began_s
        self._running.append(served)

    @staticmethod
    def _entry(served: Served, tokens: int) -> ScheduledRequest:
        first = not served.is_known
        ids = tuple([tuple(block.block_id for block in table) if first else () for table in served.tables])
        served.is_known = True
        return ScheduledRequest(served.request.request_id, served.computed, tokens, ids, replaces_table=first)

    def _advance(self, entries: Sequence[tuple[Served, ScheduledRequest]]) -> float:
        """Count what the step computes. Returns its duration."""
        prefilled = 0
        for served, entry in entries:
            prompt = max(0, min(entry.num_scheduled_tokens, served.request.num_prompt_tokens - served.computed))
            prefilled += prompt
            served.computed += entry.num_scheduled_tokens
            served.request.num_tokens = max(served.request.num_tokens, served.computed)
        self.computed_tokens += prefilled
        return STEP_S + prefilled / PREFILL_TOKENS_PER_S if entries else IDLE_S
