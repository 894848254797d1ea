"""Hits and writes of every installed policy, over a trace and over made workloads, by capacity.

Beside each stands what a policy that knows the future would hit (Belady's choice with bypass), and what one that knows
nothing does (first in, first out). Made workloads: several seeds each, the median counts. A trace: ``--trace FILE``;
``--slow-down 100`` makes its pauses a hundred times as long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.core.rig import make_core, open_policy, policy_names
from benchmarks.measure import Settings
from benchmarks.rows import Row
from benchmarks.workloads.made import WORKLOADS
from tierkv.manager.contract import RequestContext
from tierkv.manager.manager import OffloadManager
from tierkv.replay.bounds import FifoPolicy, clairvoyant
from tierkv.replay.replaying import Replayed, observation_of, replay
from tierkv.replay.trace import TraceRequest, read_trace
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.observation import RequestPhase

_BOUND = "Belady with bypass: knows what will be asked"
_Trace = Sequence[TraceRequest]


def run(settings: Settings) -> Iterator[Row]:
    """Replay the trace if there is one, then made workloads; finally the whole manager beside the policy alone."""
    if settings.trace is None:
        sys.stderr.write("replay: no trace was given (--trace FILE), so only made workloads are replayed\n")
    else:
        slow_down = settings.slow_down
        trace = [replace(request, at_s=request.at_s * slow_down) for request in read_trace(settings.trace)]
        name = settings.trace.name.split(".")[0] + (f" slowed down {slow_down:g} times" if slow_down != 1 else "")
        for capacity in settings.pick((1_000, 3_000, 10_000, 30_000, 50_000, 100_000), (1_000,)):
            yield from _rows(name, [trace], capacity)
    requests, seeds = settings.pick((4_000, 3), (60, 1))
    for name, make in WORKLOADS.items():
        traces = [make(seed, requests) for seed in range(seeds)]
        for capacity in settings.pick((300, 1_000, 3_000, 10_000), (30,)):
            yield from _rows(name, traces, capacity)
    made = WORKLOADS["agents"](0, settings.pick(500, 60))
    for policy in policy_names():
        yield _through_the_manager(policy, made, settings.pick(500, 30))


def _rows(name: str, traces: Sequence[_Trace], capacity: int) -> Iterator[Row]:
    """Yield one row per policy."""
    bounds = [clairvoyant(trace, capacity) for trace in traces]
    floors = [replay(trace, FifoPolicy(capacity), capacity) for trace in traces]
    for policy in policy_names():
        begun_s = time.process_time()
        played = [replay(trace, open_policy(policy, capacity), capacity) for trace in traces]
        spent_s = time.process_time() - begun_s
        yield Row(
            f"{name}, {capacity:,} chunks, {policy}",
            "% hit",
            _hits(played),
            _BOUND,
            _hits(bounds),
            [ours.hits / best.hits for ours, best in zip(played, bounds, strict=True)],
            extra={
                "first in, first out, % hit": _hits(floors),
                "chunks written": _writes(played),
                "chunks written by first in, first out": _writes(floors),
                "chunks written by Belady": _writes(bounds),
                "chunks asked for": median(one.asked for one in played),
                "processor time, us per chunk asked for": 1e6 * spent_s / sum(one.asked for one in played),
            },
        )


def _hits(played: Sequence[Replayed]) -> float:
    return median(one.hit_percent for one in played)


def _writes(played: Sequence[Replayed]) -> float:
    return median(one.writes for one in played)


def _through_the_manager(policy: str, trace: _Trace, capacity: int) -> Row:
    """Play the same requests through scheduler-side calls of the real manager: both must agree."""
    alone = replay(trace, open_policy(policy, capacity), capacity)
    core = make_core(capacity, policy=policy)
    whole = _managed(core.manager, trace)
    return Row(
        f"agents through the manager, {capacity:,} chunks, {policy}",
        "% hit",
        whole.hit_percent,
        "the policy alone",
        alone.hit_percent,
        extra={"chunks written": whole.writes, "chunks written by the policy alone": alone.writes},
    )


def _managed(manager: OffloadManager, trace: _Trace) -> Replayed:
    """Replay with the manager's verbs, as :func:`tierkv.replay.replaying.replay` does with a policy's."""
    asked = hits = writes = 0
    for number, request in enumerate(trace):
        ctx = RequestContext(f"request-{number}")
        found = manager.resident_prefix(request.keys, 0, len(request.keys))
        asked += len(request.keys)
        hits += found
        manager.observe_request(observation_of(number, request, found, RequestPhase.ARRIVED))
        used: list[Key] = []
        for key in reversed(request.keys):
            if manager.lookup(key, ctx) is LookupResult.MISS:
                manager.touch(used[::-1])
                used = []
                grant = manager.prepare_store([(key, 0)], ctx)
                if grant is not None and grant.slots:
                    manager.complete_store(grant.slots)
                    writes += 1
            used.append(key)
        manager.touch(used[::-1])
        manager.observe_request(observation_of(number, request, found, RequestPhase.FINISHED))
        manager.take_events()
    return Replayed(asked, hits, writes)
