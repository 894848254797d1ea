"""Plan of several stacks for one trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tierkv.config.resolving import ResolvedStack
from tierkv.planning.assumptions import BUSY_MAX, BUSY_WINDOW_S, ENGINE, GIB, Assumptions
from tierkv.planning.growth import Growth, grown_stacks
from tierkv.planning.prompts import prompt_tokens
from tierkv.planning.results import SPAN_S_MIN, Fleet, Plan, StackPlan, TierPlan
from tierkv.planning.timing import Seconds, busiest_s, first_token_s, useful_hits
from tierkv.planning.traffic import Moved, moved_of
from tierkv.plugins.registry import PluginRegistry
from tierkv.replay.instant_tiers import TierTraffic
from tierkv.replay.lru_stack import is_inclusive_lru, play_lru, sizes_of
from tierkv.replay.stack_distances import NEVER, Ints, StackDistances, stack_distances
from tierkv.replay.stack_player import PlayedStack, play_stack
from tierkv.replay.tenants import tenant_hits, worst_tenant
from tierkv.replay.trace import Trace
from tierkv.types.cache_events import HOST

LEFT_OUT = (
    "The engine's own GPU cache. Hits there never reach the tiers, so the host tier will find less than stated.",
    "Attention and decoding. A prompt token takes the same time everywhere, and answers take none of an engine's time.",
    "The time of stores. A chunk can be found by the next request, and reads are not slowed down by writes.",
    "Compression, spare room and fragmentation. A chunk takes its raw size and one page in every tier.",
    "Failures, restarts, and engines that share a tier. One stack serves all requests, in the order of arrival.",
    "Answers. Their chunks count where a later prompt has them, and are computed there.",
)
"""Sentences about what a plan does not include."""

SPAN_MIN_S = 3600.0
"""Length of a trace in seconds below which its figures per day mislead."""


def left_out(span_s: float) -> tuple[str, ...]:
    """Return the sentences about what the plan of a trace of this length does not include."""
    if span_s >= SPAN_MIN_S:
        return LEFT_OUT
    short = f"The rest of the day. The trace has {span_s / 60:.1f} minutes, and figures per day repeat them."
    return (*LEFT_OUT, short)


Progress = Callable[[str, int], None]
"""Called with the name of a stack and the number of requests that were played."""


class Planner:
    """Plans of one trace. Holds what all stacks share.

    Args:
        trace: the requests.
        registry: the installed plugins.
        assumed: what the trace does not have.
        progress: see :data:`Progress`.
    """

    def __init__(
        self, trace: Trace, registry: PluginRegistry, assumed: Assumptions, progress: Progress = lambda _, __: None
    ) -> None:
        self._trace = trace
        self._registry = registry
        self._assumed = assumed
        self._progress = progress
        self.distances: StackDistances = stack_distances(trace)
        """Stack distances of the trace."""
        self._at_s = np.array(trace.at_s, np.float64)
        self._tokens = prompt_tokens(trace, assumed.chunk_tokens)
        self.span_s = max(SPAN_S_MIN, float(self._at_s[-1] - self._at_s[0])) if len(trace) else SPAN_S_MIN
        """Seconds of the trace."""
        self.engines = assumed.engines or self._engines_for(self._tokens / assumed.prefill_tokens_per_s)
        """Engines for the times to the first token."""
        self.without = self._fleet(np.zeros((1, len(trace)), np.int64), self._at_s)
        """Computation without a cache."""

    def play(self, name: str, stack: ResolvedStack) -> tuple[PlayedStack, bool]:
        """Play the trace through a stack. Returns the result, and whether stack distances gave it."""
        chunk_bytes = self._assumed.chunk_bytes
        if is_inclusive_lru(stack, self._trace, chunk_bytes):
            names = tuple(tier.config.name for tier in stack.tiers)
            return play_lru(self._trace, self.distances, names, sizes_of(stack, chunk_bytes)), True
        step = lambda done: self._progress(name, done)  # noqa: E731 - partial cannot put a name before the number
        return play_stack(self._trace, stack, self._registry, chunk_bytes, step), False

    def plan(self, name: str, stack: ResolvedStack) -> StackPlan:
        """Plan one stack."""
        assumed, trace = self._assumed, self._trace
        played, is_exact = self.play(name, stack)
        speeds = [assumed.speed_of(tier) for tier in (None, *stack.tiers)]
        useful = useful_hits(self._at_s, played.hits, speeds, assumed)
        fleet = self._fleet(useful.chunks, useful.ready_s)
        tiers = self._tiers(stack, played, useful.chunks)
        prices = [tier.price for tier in tiers if tier.price is not None]
        saved = max(0, self.without.engines - fleet.engines)
        engine_price = assumed.prices.get(ENGINE)
        by_tenant = tenant_hits(trace, played)
        return StackPlan(
            name=name,
            is_exact_lru=is_exact,
            tiers=tiers,
            chunks=len(trace.chunks),
            fleet=fleet,
            engines_saved=saved,
            prefill_saved_s=self.without.prefill_s - fleet.prefill_s,
            price=sum(prices) if prices else None,
            price_saved=None if engine_price is None else engine_price * saved,
            worst=worst_tenant(by_tenant),
            tenants=tuple(by_tenant),
            growths=tuple(self._growths(name, stack, played, fleet)),
        )

    def _growths(self, name: str, stack: ResolvedStack, played: PlayedStack, fleet: Fleet) -> list[Growth]:
        growths = []
        for tier, more_bytes, grown in grown_stacks(stack, self._assumed.more_bytes, self._registry):
            larger, _ = self.play(f"{name}, {tier} larger", grown)
            speeds = [self._assumed.speed_of(one) for one in (None, *grown.tiers)]
            useful = useful_hits(self._at_s, larger.hits, speeds, self._assumed)
            after = self._compute_s(useful.chunks).sum()
            found = int(larger.hits.sum()) - int(played.hits.sum())
            place = None if tier == HOST else next(one for one in grown.tiers if one.config.name == tier)
            per_gib = self._assumed.price_per_gib(place)
            growths.append(
                Growth(
                    tier,
                    more_bytes,
                    100 * found / max(1, len(self._trace.chunks)),
                    fleet.prefill_s - float(after),
                    None if per_gib is None else per_gib * more_bytes / GIB,
                )
            )
        return growths

    def _tiers(self, stack: ResolvedStack, played: PlayedStack, useful: Ints) -> tuple[TierPlan, ...]:
        plans = []
        capacities = [stack.config.host.capacity, *(tier.capacity for tier in stack.config.tiers)]
        for row, (tier, capacity, traffic) in enumerate(
            zip((None, *stack.tiers), capacities, played.traffic, strict=True)
        ):
            hits, loaded = int(played.hits[row].sum()), int(useful[row].sum())
            per_gib = self._assumed.price_per_gib(tier)
            held = traffic.written.total() * self._assumed.chunk_bytes if capacity is None else capacity
            read, written = self._moved(traffic)
            price = None if per_gib is None else per_gib * held / GIB
            plans.append(TierPlan(traffic.name, capacity, hits, hits - loaded, read, written, price))
        return tuple(plans)

    def _moved(self, traffic: TierTraffic) -> tuple[Moved, Moved]:
        chunk_bytes = self._assumed.chunk_bytes
        return moved_of(traffic.read, chunk_bytes, self.span_s), moved_of(traffic.written, chunk_bytes, self.span_s)

    def _compute_s(self, loaded: Ints) -> Seconds:
        """Seconds of computation of each request; its last token is computed in any case."""
        tokens = loaded.sum(axis=0) * self._assumed.chunk_tokens
        left: Ints = np.maximum(self._tokens - tokens, np.minimum(self._tokens, 1))
        return left / self._assumed.prefill_tokens_per_s

    def _fleet(self, loaded: Ints, ready_s: Seconds) -> Fleet:
        compute_s = self._compute_s(loaded)
        waits_s = first_token_s(self._at_s, ready_s, compute_s, self.engines)
        p50, p95 = (float(value) for value in np.percentile(waits_s, (50, 95))) if len(waits_s) else (0.0, 0.0)
        return Fleet(float(compute_s.sum()), self._engines_for(compute_s), p50, p95)

    def _engines_for(self, compute_s: Seconds) -> int:
        """Engines for the busiest hour: the average of a day with a quiet night would leave users waiting for hours."""
        window_s = min(BUSY_WINDOW_S, self.span_s)
        needed = math.ceil(busiest_s(self._at_s, compute_s, window_s) / (window_s * BUSY_MAX))
        return min(max(1, len(self._trace)), max(1, needed))


def make_plan(
    trace: Trace,
    stacks: Mapping[str, ResolvedStack],
    registry: PluginRegistry,
    assumed: Assumptions,
    progress: Progress = lambda _, __: None,
) -> Plan:
    """Plan stacks for a trace.

    Args:
        trace: the requests.
        stacks: by name.
        registry: the installed plugins.
        assumed: what the trace does not have.
        progress: called with the name of a stack and the number of requests played so far.

    Raises:
        ConfigError: a host tier is smaller than a chunk, or a price is missing.
    """
    assumed.check_names(stacks)
    planner = Planner(trace, registry, assumed, progress)
    return Plan(
        requests=len(trace),
        chunks=len(trace.chunks),
        distinct_chunks=trace.num_chunks,
        span_s=planner.span_s,
        is_cut=trace.is_cut,
        assumed=assumed,
        engines=planner.engines,
        without=planner.without,
        stacks=tuple(planner.plan(name, stack) for name, stack in stacks.items()),
        curve=_curve(planner.distances, len(trace.chunks), assumed.chunk_bytes),
    )


CURVE_POINTS_MAX = 200


def _curve(distances: StackDistances, chunks: int, chunk_bytes: int) -> tuple[tuple[int, float], ...]:
    """Some points of the curve of hits by size, evenly over the sizes' logarithm."""
    sizes, hits = distances.curve()
    if not len(sizes) or sizes[-1] == NEVER:
        return ()
    wanted = np.unique(np.geomspace(int(sizes[0]), int(sizes[-1]), CURVE_POINTS_MAX).astype(np.int64))
    index = np.searchsorted(sizes, wanted, side="right") - 1
    return tuple(
        (int(size) * chunk_bytes, 100 * int(hits[i]) / chunks) for size, i in zip(wanted, index, strict=True) if i >= 0
    )


EQUAL_SHARE = 0.001
"""Share of all computation by which stacks must differ. Below it, the smaller one is as good."""


def chosen(plans: Sequence[StackPlan]) -> StackPlan | None:
    """Stack that saves most for its price; without prices, the smallest of those that save most computation."""
    if not plans:
        return None
    if all(plan.price is not None and plan.price_saved is not None for plan in plans):
        return max(plans, key=lambda plan: (plan.price_saved or 0) - (plan.price or 0))
    return min(equals(plans), key=lambda plan: plan.room_bytes)


def equals(plans: Sequence[StackPlan]) -> list[StackPlan]:
    """Stacks that save most computation, as good as equally much."""
    most = max(plan.prefill_saved_s for plan in plans)
    return [
        plan
        for plan in plans
        if most - plan.prefill_saved_s <= EQUAL_SHARE * (plan.fleet.prefill_s + plan.prefill_saved_s)
    ]
