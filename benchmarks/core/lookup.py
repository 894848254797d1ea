"""``get_num_new_matched_tokens`` for a fully resident prompt, beside a plain loop over a dict of its keys.

A new request brings its hashes in new objects, so both sides have to hash and compare every key; and two prompts take
turns, so nothing is remembered of the question before. Ours also makes the keys, and holds every chunk for the request:
what was answered may not be evicted before it is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.core.rig import BLOCK_TOKENS, BenchRequest, copies_of, fill, keys_of, make_core, random_hashes
from benchmarks.measure import Cost, Settings, cpu_ratios, medians, take_turns, timed
from benchmarks.rows import Row, Target


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

    def ask() -> Cost:
        core.manager.begin_step(0.0)  # what ends is let go of in steps
        request = BenchRequest(f"request-{next(numbers)}", copies_of(next(turns)))
        arrivals.append(timed(lambda: scheduler.on_new_request(request)))
        answers: list[int | None] = []
        cost = timed(lambda: answers.append(scheduler.get_num_new_matched_tokens(request, 0)[0]))
        if answers != [chunks * BLOCK_TOKENS]:
            raise RuntimeError(f"{chunks} chunks are resident, and the answer was {answers[0]} tokens")
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
            "the whole call, ms": 1e3 * medians(ours).cpu_s,
            "on_new_request before it, ns/key": 1e9 * medians(arrivals).cpu_s / chunks,
            "request_finished after it, ns/key": 1e9 * medians(releases).cpu_s / chunks,
            "asked again while nothing changed, us/call": 1e6 * medians(repeats).cpu_s,
        },
    )
