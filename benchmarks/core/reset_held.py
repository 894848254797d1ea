"""Reset of the cache: its call and every step after it, until all slots are free and nothing remembers the old chunks.

Three states before the reset: a host tier whose slots are nearly all held for offers, many waiting requests, and many
chunks with a description for events. In each run the cache is filled anew. A figure is the longest processor time of
the engine's thread over all runs; the median of the runs' longest is beside it, because other processes on the machine
also cost processor time. The limit is a plain loop of Python that takes about as long as a usual step.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from benchmarks.core.rig import (
    BLOCK_TOKENS,
    ENGINE,
    BenchRequest,
    batches_of,
    fill,
    keys_of,
    make_core,
    plain_loop,
    random_hashes,
)
from benchmarks.measure import Settings
from benchmarks.rows import Row, Target
from tierkv.manager.step_budget import StepBudget
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.events.event_queue import EventQueue
from tierkv.scheduler.store.candidates import Candidate
from tierkv.scheduler.wiring import WiredCore
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.engine import StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key

LIMIT_MS = 5.0
OFFERS = 97
STEPS_MAX = 1_000_000
"""A reset that is not over by then is a fault."""


@dataclass
class LongestCalls:
    """Longest processor time of one thread: of a call, of a step, and of a plain loop in the same steps."""

    call_s: float = 0.0
    call_name: str = ""
    step_s: float = 0.0
    plain_s: float = 0.0
    steps: int = 0
    _step_s: float = field(default=0.0, repr=False)

    def call(self, name: str, function: Callable[[], object]) -> None:
        """Make one call of a step, and note its time."""
        before_s = time.thread_time()
        function()
        took_s = time.thread_time() - before_s
        self._step_s += took_s
        if took_s > self.call_s:
            self.call_s, self.call_name = took_s, name

    def end_step(self) -> None:
        """End a step."""
        self.step_s, self._step_s = max(self.step_s, self._step_s), 0.0
        self.steps += 1
        before_s = time.thread_time()
        plain_loop()
        self.plain_s = max(self.plain_s, time.thread_time() - before_s)


def run(settings: Settings) -> Iterator[Row]:
    """Two rows for each state before the reset: the longest call, and the longest step."""
    slots = settings.pick(1_000_000, 4_096)
    waiting = settings.pick(10_000, 200)
    snapshots = settings.pick(100_000, 500)
    runs = settings.pick(5, 1)
    yield from _rows(f"{slots:,} slots and {OFFERS} offers held", OffersHeld(slots, OFFERS), runs)
    yield from _rows(f"{waiting:,} requests with an offer", OffersHeld(4 * waiting, waiting), runs)
    yield from _rows(f"{snapshots:,} chunks described for events", ChunksDescribed(snapshots), runs)


class OffersHeld:
    """Scheduler over a full host tier, in which each of some requests was offered an equal part of it."""

    def __init__(self, slots: int, offers: int) -> None:
        self._core: WiredCore = make_core(slots)
        chunks = slots // offers
        self._prompts = batches_of(random_hashes(chunks * offers, seed=1), chunks)
        self._numbers = itertools.count()
        self._seconds = itertools.count(1)

    def prepare(self) -> None:
        """Fill the host tier, and ask until every request has its offer."""
        scheduler, manager = self._core.scheduler, self._core.manager
        fill(self._core.host, itertools.chain.from_iterable(map(keys_of, self._prompts)))
        asking = [BenchRequest(f"request-{next(self._numbers)}", list(hashes)) for hashes in self._prompts]
        for request in asking:
            scheduler.on_new_request(request)
        self._offered = list(asking)
        for _ in range(STEPS_MAX):
            if not asking:
                return
            self._begin_step()
            answers = [(request, scheduler.get_num_new_matched_tokens(request, 0)[0]) for request in asking]
            asking = [request for request, tokens in answers if tokens is None]
            wrong = [tokens for request, tokens in answers if tokens not in {None, request.num_tokens}]
            if wrong:
                raise RuntimeError(f"every chunk is resident, and an answer was {wrong[0]} tokens")
            manager.take_ops()
            manager.take_events()
        raise RuntimeError("the lookups are not answered")

    def reset(self, longest: LongestCalls) -> None:
        """Reset the cache, and make steps until every slot is free."""
        core = self._core
        longest.call("reset_cache", core.scheduler.reset_cache)
        for _ in range(STEPS_MAX):
            longest.call("begin_step", self._begin_step)
            longest.call("build_connector_meta", lambda: core.scheduler.build_connector_meta(StepOutput()))
            longest.call("take_ops", core.manager.take_ops)
            longest.call("take_events", core.manager.take_events)
            longest.end_step()
            if core.host.free == core.host.num_slots:
                break
        core.scheduler.validate()
        for request in self._offered:
            core.scheduler.request_finished(request, [[]])

    def _begin_step(self) -> None:
        now_s = 0.001 * next(self._seconds)
        self._core.manager.begin_step(now_s)
        self._core.scheduler.begin_step(now_s)


class ChunksDescribed:
    """Queue of described events, and the chunks of one long prompt in the host tier, four hashes each."""

    def __init__(self, chunks: int) -> None:
        geometry = Geometry.of(ENGINE, blocks=4)
        counters = CoreCounters()
        self._events = BlockEvents(geometry, counters, lambda _: None, active=True)
        self._budget = StepBudget()
        self._queue = EventQueue(self._events, counters, self._budget.share())
        size = geometry.groups[0].chunk_tokens
        self._request = _Tokens("described", random_hashes(4 * chunks, seed=2))
        keys = [make_key(self._request.block_hashes[4 * i + 3], 0) for i in range(chunks)]
        self._chunks = [Candidate(key, 0, i, (i + 1) * size) for i, key in enumerate(keys)]

    def prepare(self) -> None:
        """Store every chunk."""
        for batch in batches_of(self._chunks, 1024):
            keys = tuple([chunk.key for chunk in batch])
            self._events.on_store_granted(self._request, batch)
            self._events.on_store_ended(keys)
            self._queue.put_events([CacheEvent(CacheEventKind.STORED, "host", keys)])
            self._queue.take_described_events()

    def reset(self, longest: LongestCalls) -> None:
        """Describe the reset, and make steps until no chunk is remembered."""
        events: Sequence[CacheEvent] = [CacheEvent(CacheEventKind.CLEARED, "host", ())]
        for _ in range(STEPS_MAX):
            self._budget.begin_step()
            longest.call("put_events", partial(self._queue.put_events, events))
            longest.call("take_described_events", self._queue.take_described_events)
            longest.end_step()
            events = ()
            if not len(self._events):
                break


class _Tokens(BenchRequest):
    """Prompt with its tokens."""

    @property
    def all_token_ids(self) -> range:
        """Tokens of the prompt; events describe chunks by them."""
        return range(len(self.block_hashes) * BLOCK_TOKENS)


def _rows(what: str, state: OffersHeld | ChunksDescribed, count: int) -> Iterator[Row]:
    runs = [_run(state) for _ in range(count)]
    plain = 1e3 * median(run.plain_s for run in runs)
    for name, figures in [("call", [run.call_s for run in runs]), ("step", [run.step_s for run in runs])]:
        worst = max(range(count), key=figures.__getitem__)
        where = f" ({runs[worst].call_name})" if name == "call" else ""
        yield Row(
            f"worst {name}{where}, {what}",
            "ms",
            1e3 * figures[worst],
            "worst of a plain loop in the same steps",
            plain,
            target=Target("measured", "<=", LIMIT_MS),
            extra={
                "worst of the median run, ms": 1e3 * median(figures),
                "steps until the reset is over": median(run.steps for run in runs),
            },
        )


def _run(state: OffersHeld | ChunksDescribed) -> LongestCalls:
    state.prepare()
    longest = LongestCalls()
    gc.collect()
    gc.freeze()  # as engines do when they have started: what was there before is not tierkv's
    try:
        state.reset(longest)
    finally:
        gc.unfreeze()
    return longest
