"""``get_num_new_matched_tokens`` for a fully resident prompt, beside a plain loop over a dict of its keys.

A new request brings its hashes in new objects, so both sides have to hash and compare every key; and two prompts take
turns, so nothing is remembered of the question before. Ours also makes the keys, and holds every chunk for the request:
what was answered may not be evicted before it is loaded.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator

from benchmarks.core.rig import BLOCK_TOKENS, BenchRequest, copies_of, fill, keys_of, make_core, random_hashes
from benchmarks.measure import Cost, Settings, cpu_ratios, medians, take_turns, timed
from benchmarks.rows import Row, Target
from tierkv.scheduler.scheduler import OffloadScheduler

STEPS_MAX = 64
"""Steps after which a question should have been answered: each looks at a part of the chunks."""


def run(settings: Settings) -> Iterator[Row]:
    """Measure the first question of a request, and the repeated question."""
    chunks = settings.pick(8192, 256)
    prompts = [random_hashes(chunks, seed=1), random_hashes(chunks, seed=2)]
    core = make_core(4 * chunks)
    for hashes in prompts:
        fill(core.host, keys_of(hashes))
    scheduler, numbers = core.scheduler, itertools.count()
    turns, plain_turns = itertools.cycle(prompts), itertools.cycle(prompts)
    resident = {key: object() for hashes in prompts for key in keys_of(hashes)}
    arrivals: list[Cost] = []
    repeats: list[Cost] = []
    releases: list[Cost] = []
    longest: list[Cost] = []
    steps: list[int] = []

    def begin_step() -> None:
        core.manager.begin_step(0.0)  # what ends is let go of in steps
        scheduler.begin_step(0.0)

    def ask() -> Cost:
        begin_step()
        request = BenchRequest(f"request-{next(numbers)}", copies_of(next(turns)))
        arrivals.append(timed(lambda: scheduler.on_new_request(request)))
        calls = _ask_in_steps(scheduler, request, begin_step)
        steps.append(len(calls))
        longest.append(max(calls, key=lambda call: call.cpu_s))
        cost = Cost(sum(call.wall_s for call in calls), sum(call.cpu_s for call in calls))
        repeats.append(timed(lambda: scheduler.get_num_new_matched_tokens(request, 0)))
        releases.append(timed(lambda: scheduler.request_finished(request, [[]])))
        return cost

    def walk_dict() -> Cost:
        keys = keys_of(copies_of(next(plain_turns)))

        def walk() -> None:
            for key in keys:
                if resident.get(key) is None:
                    break

        return timed(walk)

    ours, plain = take_turns([ask, walk_dict], 3 * settings.rounds)
    yield Row(
        f"first question, {chunks} chunks resident",
        "ns/key",
        1e9 * medians(ours).cpu_s / chunks,
        "loop over a dict of the same keys",
        1e9 * medians(plain).cpu_s / chunks,
        cpu_ratios(ours, plain),
        Target("ratio", "<=", 3.0),
        {
            "all of its calls, ms": 1e3 * medians(ours).cpu_s,
            "the longest of them, ms": 1e3 * medians(longest).cpu_s,
            "steps until the answer": statistics.median(steps),
            "on_new_request before it, ns/key": 1e9 * medians(arrivals).cpu_s / chunks,
            "request_finished after it, ns/key": 1e9 * medians(releases).cpu_s / chunks,
            "asked again while nothing changed, us/call": 1e6 * medians(repeats).cpu_s,
        },
    )


def _ask_in_steps(scheduler: OffloadScheduler, request: BenchRequest, begin_step: Callable[[], None]) -> list[Cost]:
    """Ask for a request in step after step, until it is answered. Returns the cost of each call.

    Raises:
        RuntimeError: the answer is not the whole prompt.
    """
    answers: list[int | None] = []
    calls: list[Cost] = []
    while len(answers) < STEPS_MAX:
        calls.append(timed(lambda: answers.append(scheduler.get_num_new_matched_tokens(request, 0)[0])))
        if answers[-1] is not None:
            break
        begin_step()
    chunks = len(request.block_hashes)
    if answers[-1] != chunks * BLOCK_TOKENS:
        raise RuntimeError(f"{chunks} chunks are resident, and the answer was {answers[-1]} tokens")
    return calls
