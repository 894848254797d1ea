"""Traces made of lists of chunks, and the textbook's LRU cache over them."""

from __future__ import annotations

import random
from collections import OrderedDict

from tierkv.replay.trace import Trace
from tierkv.types.hints import NO_HINTS

Prompts = list[list[int]]


def trace_of(prompts: Prompts) -> Trace:
    """A trace of these chunks, one prompt a second."""
    trace = Trace()
    numbers: dict[int, int] = {}
    for second, prompt in enumerate(prompts):
        trace.chunks.extend(numbers.setdefault(chunk, len(numbers)) for chunk in prompt)
        trace.starts.append(len(trace.chunks))
        trace.at_s.append(second)
        for column in (trace.input_tokens, trace.output_tokens):
            column.append(-1)
        trace.tenants.append(0)
        trace.hints.append(0)
    trace.tenant_names, trace.hints_known, trace.num_chunks = [None], [NO_HINTS], len(numbers)
    return trace


def naive_lru(prompts: Prompts, size: int) -> tuple[list[int], int]:
    """An LRU cache, written down as the textbook has it: hits by prompt, and writes."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits, writes = [], 0
    for prompt in prompts:
        found = 0
        while found < len(prompt) and prompt[found] in cache:
            found += 1
        hits.append(found)
        for chunk in reversed(prompt):
            writes += chunk not in cache
            cache[chunk] = None
            cache.move_to_end(chunk)
            if len(cache) > size:
                cache.popitem(last=False)
    return hits, writes


def conversations(seed: int, count: int) -> list[list[int]]:
    """Prompts of conversations that go on, under some common beginnings."""
    rng, fresh, sessions = random.Random(seed), iter(range(1000, 10**9)), []
    prompts = []
    for _ in range(count):
        if sessions and rng.random() < 0.6:
            session = sessions[rng.randrange(len(sessions))]
        else:
            session = [rng.randrange(3), next(fresh)]
            sessions.append(session)
        session.extend(next(fresh) for _ in range(rng.randrange(1, 4)))
        prompts.append(list(session))
    return prompts
