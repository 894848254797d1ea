"""Many requests wait, and the engine asks about each of them in every step: time per request, and the worst call.

Two cases. *Resident*: every chunk is in the host tier, so each question is answered, and answered again in every step
as the engine has no blocks for any of them. *Cold*: every chunk is in a local tier, and the host tier has room for an
eighth of them. The prompts are all different. Figures are processor time: of the first step, and of the median step
among the last ones, when no further request is answered. In the steps before these, requests are searched within the
budget of a step: it is not a cost per request, and the figures beside the rows have it. The limit of a row is the cost
per request of the same case with the fewest requests, in the same run. Each is run twice, with the same calls, and
shown is the run whose longest call is shorter: among millions of calls, some have the work of another process. Python's
garbage collector is off: see ``engine_calls``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.core.rig import GEOMETRY, BenchRequest, fill, keys_of, random_hashes
from benchmarks.measure import Settings, progress
from benchmarks.rows import Row, Target
from benchmarks.stress.clocked_core import LIMIT_MS, CallCosts, ClockedCore, without_collector
from benchmarks.stress.simulated_tiers import Pace, local_tiers
from tierkv.types.engine import StepOutput

STEP_S = 0.02
FLAT = 1.5
"""Cost per request beside that of the fewest requests: more of them fit less well into the processor's caches."""
QUEUES = ((100, 128), (1_000, 128), (2_000, 128), (8_000, 16), (10_000, 128))
"""Requests, and chunks of each."""
COLD_SHARE = 8
RUNS = 2
SETTLED_STEPS = 8
"""Steps without a further answer after which none is expected: chunks of a cold prompt are read in fewer."""
SEARCHING_STEPS_MAX = 500
"""Steps after which the costs are measured in any case. Where it takes longer, a step is mostly questions."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Seconds of processor time.

    first_s: of the first step. searching_s: of the longest step after it until no further request was answered.
    median_s, worst_s: of the steps after that. first_call_s, call_s: the worst call of the first step, and of the
    others. slowest: its name. searching_steps: number of the steps until no further request was answered.
    """

    requests: int
    first_s: float
    first_call_s: float
    searching_s: float
    searching_steps: int
    median_s: float
    worst_s: float
    call_s: float
    slowest: str
    answered: int

    @property
    def longest_call_s(self) -> float:
        """The worst call of all steps."""
        return max(self.call_s, self.first_call_s)

    @property
    def first_us(self) -> float:
        """Microseconds per request in the first step."""
        return 1e6 * self.first_s / self.requests

    @property
    def again_us(self) -> float:
        """Microseconds per request in a later step."""
        return 1e6 * self.median_s / self.requests


def run(settings: Settings) -> Iterator[Row]:
    """Measure three rows per case and number of requests: cost of the first question, of the next ones, worst call."""
    queues = settings.pick(QUEUES, ((4, 4), (16, 4)))
    for case in ("resident", "cold"):
        fewest: Asked | None = None
        for requests, chunks in queues:
            with without_collector():
                runs = [ask(requests, chunks, settings.pick(9, 2), is_cold=case == "cold") for _ in range(RUNS)]
            asked, other = sorted(runs, key=lambda run: run.longest_call_s)
            fewest = fewest or asked
            what = f"{requests:,} requests of {chunks} chunks, {case}"
            progress(f"waiting: {what}, {1e3 * asked.median_s:.1f} ms a step")
            yield _flat_row(
                f"{what}: asked for the first time",
                asked.first_us,
                fewest.first_us,
                queues[0][0],
                {
                    "the whole step, ms": 1e3 * asked.first_s,
                },
            )
            yield _flat_row(
                f"{what}: asked again",
                asked.again_us,
                fewest.again_us,
                queues[0][0],
                {
                    "the whole step, ms": 1e3 * asked.median_s,
                    "the longest step, ms": 1e3 * asked.worst_s,
                    "the longest step while requests were searched, ms": 1e3 * asked.searching_s,
                    "steps until no further request was answered": asked.searching_steps,
                    "requests with an answer": asked.answered,
                },
            )
            yield Row(
                f"{what}: worst call",
                "ms of processor time",
                1e3 * asked.longest_call_s,
                "target",
                LIMIT_MS,
                target=Target("measured", "<=", LIMIT_MS),
                extra={
                    "in the first step, ms": 1e3 * asked.first_call_s,
                    f"in later steps, {asked.slowest}, ms": 1e3 * asked.call_s,
                    "in the other run, ms": 1e3 * other.longest_call_s,
                },
            )


def _flat_row(what: str, each_us: float, fewest_us: float, fewest: int, extra: Mapping[str, float]) -> Row:
    limit = f"the same with {fewest} requests"
    return Row(what, "us a request", each_us, limit, fewest_us, target=Target("ratio", "<=", FLAT), extra=extra)


def ask(requests: int, chunks: int, steps: int, *, is_cold: bool) -> Asked:
    """Ask about each request in each of some steps, after the first."""
    hashes = [random_hashes(chunks, seed=1 + number) for number in range(requests)]
    keys = [key for prompt in hashes for key in keys_of(prompt)]
    total = len(keys)
    if is_cold:
        tiers = local_tiers(GEOMETRY.payload_bytes_max, [keys])
        clocked = ClockedCore(GEOMETRY, max(chunks, total // COLD_SHARE), tiers, [Pace()])
    else:
        clocked = ClockedCore(GEOMETRY, 2 * total)  # the default share for waiting requests takes all of them
        fill(clocked.core.host, keys)
    del keys
    prompts = [BenchRequest(f"request-{number}", prompt) for number, prompt in enumerate(hashes)]
    for prompt in prompts:
        clocked.on_new_request(prompt)
    clocked.end_step(StepOutput(), STEP_S)
    clocked.costs = CallCosts()
    _ask_all(clocked, prompts)
    first_s, first_call_s = clocked.costs.steps_s[0], clocked.costs.worst[1]
    clocked.costs = CallCosts()
    searching_steps = _settle(clocked, prompts)
    answered = 0
    for _ in range(steps):
        answered = _ask_all(clocked, prompts)
    steps_s = clocked.costs.steps_s[:-1]
    searching_s, settled_s = max(steps_s[:-steps]), steps_s[-steps:]
    slowest, call_s = clocked.costs.worst
    return Asked(
        requests,
        first_s,
        first_call_s,
        searching_s,
        searching_steps,
        statistics.median(settled_s),
        max(settled_s),
        call_s,
        slowest,
        answered,
    )


def _settle(clocked: ClockedCore, prompts: list[BenchRequest]) -> int:
    """Make steps until no further request is answered. Returns how many it took."""
    answered, unchanged, steps = 0, 0, 0
    while unchanged < SETTLED_STEPS and answered < len(prompts) and steps < SEARCHING_STEPS_MAX:
        before, answered, steps = answered, _ask_all(clocked, prompts), steps + 1
        unchanged = 0 if answered > before else unchanged + 1
    return max(1, steps - unchanged)


def _ask_all(clocked: ClockedCore, prompts: list[BenchRequest]) -> int:
    """Make a step that asks about every request. Returns how many were answered."""
    answered = sum(clocked.ask(prompt) is not None for prompt in prompts)
    clocked.end_step(StepOutput(), STEP_S)
    return answered
