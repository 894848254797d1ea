"""Worst single call on the engine's thread: a million chunks in the host tier, as many below, batches of 128.

Every step of the benchmark is one of an engine: take in completions, look up, load, store, submit instructions. I/O
threads copy meanwhile. The limit is a plain loop of Python that takes about as long as a usual call: its worst case
shows the machine's part of a maximum.

The figure is the larger of two. One is the longest processor time of a call, which other processes do not affect. The
other is the longest wall time, waits included, of the median round: a wait of tierkv's own occurs in every round.
"""

from __future__ import annotations

import gc
import itertools
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

from benchmarks.core.busy_tier import CAPABILITIES, COPY_BYTES, BusyTier
from benchmarks.core.rig import (
    GEOMETRY,
    batches_of,
    fill,
    keys_of,
    make_core,
    open_policy,
    plain_loop,
    policy_names,
    random_hashes,
)
from benchmarks.measure import Settings, timed
from benchmarks.rows import Row, Target
from tierkv.frames.frame import frame_bytes
from tierkv.manager.contract import RequestContext
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.scheduler.wiring import WiredCore
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import TierContent, TierOp

BATCH = 128
LIMIT_MS = 5.0
COMPLETIONS_PER_STEP_MAX = 1024
"""Default of ``step.keys_max``."""
QUEUE_CHUNKS = 4096
"""Chunks that may be written at a time: the default of 256 MiB in chunks of 64 KiB, smaller than most."""
_PLAIN = "plain loop"
_T = TypeVar("_T")


class CallTimes:
    """Seconds of each call, by its name: wall time, and processor time of this thread."""

    def __init__(self) -> None:
        self.wall_s: defaultdict[str, list[float]] = defaultdict(list)
        self.cpu_s: defaultdict[str, list[float]] = defaultdict(list)

    def call(self, name: str, function: Callable[[], _T]) -> _T:
        """Make a call, and note its time."""
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        result = function()
        self.wall_s[name].append(time.perf_counter() - wall_s)
        self.cpu_s[name].append(time.thread_time() - cpu_s)
        return result


class Steps:
    """Calls of one engine, step after step."""

    def __init__(self, resident: int, copy_bytes: int = COPY_BYTES, policy: str = "lru") -> None:
        # In tuples of a batch, which the garbage collector soon passes over: its time must be tierkv's.
        host_keys = [tuple(batch) for batch in batches_of(keys_of(random_hashes(resident, seed=1)), BATCH)]
        # Index of the lower tier at first, without frames: its reads are misses, its evictions are real.
        below = [tuple(batch) for batch in batches_of(keys_of(random_hashes(resident, seed=2)), BATCH)]
        size = frame_bytes(GEOMETRY.payload_bytes_max)
        queue = min(resident // 8, QUEUE_CHUNKS)
        limits = LowerTierLimits(capacity_bytes=resident * size, write=WritePolicy.THROUGH, queue_chunks_max=queue)
        lower = LowerTier(0, "copying", CAPABILITIES, limits, open_policy(policy, resident))
        self.core: WiredCore = make_core(resident, policy=policy, lower=[lower])
        fill(self.core.host, itertools.chain.from_iterable(host_keys))
        lower.load_index(TierContent([*itertools.chain.from_iterable(below)], array("Q", [size]) * resident))
        self.busy = BusyTier(resident, copy_bytes)
        self._readable = itertools.cycle(host_keys[len(host_keys) // 2 :])
        self._below = itertools.cycle(below[len(below) // 2 :])
        self._numbers = itertools.count()

    def step(self, times: CallTimes) -> None:
        """Make each call of a step once."""
        number = next(self._numbers)
        manager = self.core.manager
        ctx = RequestContext(f"request-{number}")
        times.call("begin_step and drain", self._take_in)
        keys = [key for key in next(self._readable) if manager.lookup(key, ctx) is LookupResult.HIT]
        times.call("lookup", partial(self._look_up, [*keys, *next(self._below)], ctx))
        times.call("reserve", partial(manager.passages.reserve, ctx.request_id, tuple(keys)))
        load = times.call("prepare_load", partial(manager.prepare_load, keys, ctx))
        times.call("complete_load", partial(manager.complete_load, load.slots))
        new = [(key, 0) for key in keys_of(random_hashes(BATCH, seed=10 + number))]
        grant = times.call("prepare_store", partial(manager.prepare_store, new, ctx))
        if grant is not None:
            for key, ref in zip(grant.keys, grant.slots, strict=True):
                self.busy.sealer.seal(self.busy.arena.slot(ref.slot), key, GEOMETRY.payload_bytes_max)
            times.call("complete_store", partial(manager.complete_store, grant.slots))
        ops = times.call("take_ops", manager.take_ops)
        times.call("submit", partial(self._submit, ops))
        times.call("take_events", manager.take_events)
        times.call(_PLAIN, plain_loop)

    def _take_in(self) -> None:
        self.core.manager.begin_step(time.monotonic())
        for completion in self.busy.dispatcher.drain(COMPLETIONS_PER_STEP_MAX):
            self.core.manager.on_completion(completion)

    def _submit(self, ops: Sequence[TierOp]) -> None:
        for op in ops:
            self.busy.dispatcher.submit(op)

    def _look_up(self, keys: list[Key], ctx: RequestContext) -> None:
        lookup = self.core.manager.lookup
        start = self.core.manager.resident_prefix(keys, 0, len(keys))
        for key in keys[start:]:
            lookup(key, ctx)


def run(settings: Settings) -> Iterator[Row]:
    """Yield a row per call, slowest first; a full garbage collection; and the worst calls of other policies."""
    resident = settings.pick(1_000_000, 4_096)
    gc.collect()
    gc.freeze()  # as engines do when they have started: what was there before tierkv is none of its business
    try:
        yield from _rows(resident, settings)
        for policy in policy_names():
            if policy != "lru":
                yield _worst_with(policy, resident, settings)
    finally:
        gc.unfreeze()


def _worst_with(policy: str, resident: int, settings: Settings) -> Row:
    """Slowest call with another policy in both tiers; the policy is a small part of a call."""
    steps = Steps(resident, policy=policy)
    try:
        _round(steps, settings.pick(200, 5))
        rounds = [_round(steps, settings.pick(500, 5)) for _ in range(settings.pick(2, 1))]
    finally:
        steps.busy.close()
    plain = [1e3 * max(times.wall_s[_PLAIN]) for times in rounds]
    names = [name for name in rounds[0].wall_s if name != _PLAIN]
    worst = max((_row(name, resident, rounds, plain) for name in names), key=lambda row: row.measured)
    return replace(worst, what=f"{policy}: {worst.what}")


def _rows(resident: int, settings: Settings) -> Iterator[Row]:
    collection_before = [timed(gc.collect).wall_s for _ in range(settings.rounds)]
    steps = Steps(resident)
    try:
        _round(steps, settings.pick(200, 5))  # fills the queues of the I/O threads
        rounds = [_round(steps, settings.pick(500, 5)) for _ in range(settings.rounds)]
        collection = [timed(gc.collect).wall_s for _ in range(settings.rounds)]
        reset = timed(steps.core.manager.reset_cache)
    finally:
        steps.busy.close()
    plain = [1e3 * max(times.wall_s[_PLAIN]) for times in rounds]
    names = [name for name in rounds[0].wall_s if name != _PLAIN]
    rows = [_row(name, resident, rounds, plain) for name in names]
    yield from sorted(rows, key=lambda row: -row.measured)
    yield Row(
        "full garbage collection, met by one call now and then",
        "ms",
        1e3 * median(collection),
        "the same before the chunks were there",
        1e3 * median(collection_before),
        target=Target("measured", "<=", LIMIT_MS),
    )
    yield Row(
        f"reset_cache, {resident:,} resident", "ms", 1e3 * reset.wall_s, target=Target("measured", "<=", LIMIT_MS)
    )


def _round(steps: Steps, count: int) -> CallTimes:
    times = CallTimes()
    for _ in range(count):
        steps.step(times)
    return times


def _row(name: str, resident: int, rounds: list[CallTimes], plain: list[float]) -> Row:
    worst = [1e3 * max(times.wall_s[name]) for times in rounds]
    worst_cpu = 1e3 * max(cpu for times in rounds for cpu in times.cpu_s[name])
    walls = sorted(wall for times in rounds for wall in times.wall_s[name])
    return Row(
        f"{name}, {resident:,} resident",
        "ms",
        max(worst_cpu, median(worst)),
        "worst of a plain loop in the same steps",
        median(plain),
        target=Target("measured", "<=", LIMIT_MS),
        extra={
            "worst in processor time, ms": worst_cpu,
            "worst on the wall in the median round, ms": median(worst),
            "99.9 % on the wall are faster than, ms": 1e3 * walls[int(len(walls) * 0.999)],
            "median on the wall, ms": 1e3 * median(walls),
        },
    )
