"""Lookups for an engine that schedules itself, asks chunk by chunk, and does not report failed loads.

Such an engine repeats its questions in every step until no answer is RETRY or PENDING. A chunk is a HIT only when it is
readable in the host tier and held for the request, so that it cannot be evicted before it is loaded. Chunks in lower
tiers are gathered in the request's passage (:mod:`tierkv.manager.passages.passages`). That happens at
the end of the step, when the wanted chunks are known and every tier has answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace
from itertools import count

from tierkv.errors import require
from tierkv.manager.contract import RequestContext
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.lookup.load_or_recompute import LoadOrRecompute
from tierkv.scheduler.lookup.prefill_rate import PrefillRate
from tierkv.scheduler.staged.runs import Run
from tierkv.scheduler.staged.staged_request import StagedRequest
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_BELOW = frozenset({LookupResult.HIT, LookupResult.PENDING})  # answers about chunks that a tier may be read for


def group_budgets(geometry: Geometry, chunks_max: int) -> tuple[int, ...]:
    """Number of chunks of each group that one request may want at once, so that those of all groups fit together.

    Otherwise the first group that an engine asks about could take all slots, and the windows that complete a hit would
    find no room. A window gets the chunks that it needs (one more, because a hit may end inside a chunk), but no more
    than an equal share. The groups with full attention share the rest.
    """
    share = max(1, chunks_max // len(geometry.groups))
    windows = [None if g.window_chunks is None else min(g.window_chunks + 1, share) for g in geometry.groups]
    whole = windows.count(None)
    rest = max(1, (chunks_max - sum(window or 0 for window in windows)) // max(1, whole))
    return tuple(rest if window is None else window for window in windows)


class StagedLookups:
    """Open lookups of all requests. Sans-IO; O(1) per question, a dict probe if it was asked in this step.

    An engine that *waits whole* stops at the first MISS, and uses no HIT before it while an answer is PENDING. If it
    goes forwards through its only group, two answers are enough while the request's chunks are read: PENDING, then
    MISS. So a long prompt is not asked about chunk by chunk in each step of its waiting.

    Args:
        manager: answers existence, holds and gathers.
        geometry: sizes of groups and chunks.
        limits: from the configuration and the engine's capabilities. A lookup without progress for its deadline is
            late, and answered with the readable chunks.
        counters: for metrics.
        waits_whole: whether the engine waits whole.
    """

    def __init__(
        self,
        manager: OffloadManager,
        geometry: Geometry,
        limits: SchedulerLimits,
        counters: CoreCounters,
        *,
        waits_whole: bool = False,
    ) -> None:
        self._manager = manager
        self._deadline_s = limits.lookup_deadline_s
        self._counters = counters
        self._prefill = PrefillRate(limits.prefill_tokens_per_s)
        self._choice = LoadOrRecompute(manager, geometry, limits, counters, self._prefill)
        self._slow = frozenset[int]()  # tiers slower than computing, by number: no chunk is loaded from them
        self._budgets = group_budgets(geometry, manager.passages.hold_chunks_max)
        self._chunk_tokens = tuple(group.chunk_tokens for group in geometry.groups)
        is_one_prefix = len(geometry.groups) == 1 and geometry.groups[0].window_chunks is None
        self._num_groups = len(geometry.groups)
        self._is_whole = tuple(group.window_chunks is None for group in geometry.groups)
        self._answers_shortly = waits_whole and is_one_prefix
        self._requests: dict[str, StagedRequest] = {}
        self._numbers = count(1)  # of the requests, since the stack opened
        self._asked_in_step: dict[str, StagedRequest] = {}  # in the order of the engine's queue
        # Requests for which chunks may be held, longest unasked first.
        self._open: OrderedDict[str, StagedRequest] = OrderedDict()
        self._share = manager.budget.share()
        self._now_s = self._previous_s = self._asked_s = 0.0
        self._step = 0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens that the engine computes per second; None while unknown."""
        return self._prefill.tokens_per_s

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, ctx: RequestContext) -> None:
        """Register a request. A known one with the same id is finished first: the engine did not report its end."""
        self.finish_request(ctx.request_id)
        self._requests[ctx.request_id] = StagedRequest(replace(ctx, number=next(self._numbers)))

    def request_context(self, request_id: str) -> RequestContext:
        """Context of a request; an unknown one has no hints."""
        request = self._requests.get(request_id)
        return RequestContext(request_id) if request is None else request.ctx

    def close_lookup(self, request_id: str) -> None:
        """End the lookup of a request that runs, loads, or has lost its blocks; its next lookup is a new one."""
        request = self._requests.get(request_id)
        if request is not None:
            self._release_chunks(request)

    def finish_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.close_lookup(request_id)
        self._requests.pop(request_id, None)

    def _release_chunks(self, request: StagedRequest) -> None:
        request_id = request.ctx.request_id
        self._count_wait(request)
        self._manager.passages.release(request_id)
        self._open.pop(request_id, None)
        self._asked_in_step.pop(request_id, None)
        request.forget()

    def _count_wait(self, request: StagedRequest) -> None:
        """Count the time of a deferral that ends."""
        self._note_tier_answered(request)
        tier_s = request.tier_s + self._manager.passages.take_reading_s(request.ctx.request_id)
        request.tier_s = 0.0
        if request.deferred_since_s is not None:
            waited_s = self._now_s - request.deferred_since_s
            tier_s = min(tier_s, waited_s)
            self._counters.deferred_tier_ms += round(tier_s * 1000)
            self._counters.deferred_queue_ms += round((waited_s - tier_s) * 1000)
            request.deferred_since_s = None

    def _note_tier_answered(self, request: StagedRequest) -> None:
        """Count the time for which a tier was asked: until its latest answer, or until now if there was none."""
        if request.asked_tier_s is not None:
            answered_s = self._manager.step.probed_s
            request.tier_s += (answered_s if answered_s >= request.asked_tier_s else self._now_s) - request.asked_tier_s
            request.asked_tier_s = None

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """Set the time of this step, in seconds on the stack's clock; it holds until the next call.

        While slots are short, a lookup that the engine has not repeated gives up the chunks that it holds, once the
        engine has asked about others for the deadline: engines do not report dropped hits.
        """
        self._now_s = now_s
        while self._open and self._manager.passages.is_short and self._share.take(1):
            request = next(iter(self._open.values()))
            if self._asked_s - request.last_asked_s < self._deadline_s:
                return
            self._release_chunks(request)

    def may_rest(self) -> bool:
        """Whether there are requests, and no chunk may be held for any of them."""
        return bool(self._requests) and not (self._open or self._asked_in_step or self._prefill.is_measuring)

    def end_step(self, prompt_tokens: int = 0) -> None:
        """Gather the wanted chunks of all requests of the step, and release the others.

        prompt_tokens: that the engine has computed since the previous call.
        """
        self._step += 1
        if prompt_tokens or self._prefill.is_measuring:  # no call in a decode step
            self._prefill.measured(prompt_tokens, self._now_s - self._previous_s)
        self._previous_s = self._now_s
        if not self._asked_in_step:
            return
        wanted_by_request = {
            request: wanted for request in self._asked_in_step.values() if (wanted := self._keys_to_reserve(request))
        }
        for request in wanted_by_request:  # unpin all first, so that younger requests do not block older ones
            self._manager.passages.pins.remove(request.ctx.request_id)
            request.pins.clear()
        for request, wanted in wanted_by_request.items():
            request.passage = self._manager.passages.reserve(request.ctx.request_id, wanted, request.ctx.hints)
            request.reserved = wanted
        self._asked_in_step.clear()

    def _keys_to_reserve(self, request: StagedRequest) -> tuple[Key, ...]:
        """Chunks to gather for a request; none if it has its answer, or while the answer of a tier is missing."""
        if request.waits:
            self._counters.deferrals += 1
            return request.reserved
        request.reserved = ()
        wanted = request.wanted(self._chunk_tokens)
        if not request.is_deferred():
            self._count_wait(request)  # answered: the next question is a new one
            self._manager.passages.promise(request.ctx.request_id)
            self._release_unwanted(request, wanted)
            return ()
        self._counters.deferrals += 1
        if request.deferred_since_s is None:
            request.deferred_since_s = self._now_s
        open_answers = request.open_answers(wanted)
        # The wanted chunks are known only when every tier has answered.
        if request.awaits_tier or not open_answers or LookupResult.RETRY in open_answers:
            if request.asked_tier_s is None:
                request.asked_tier_s = self._now_s
            self._release_unwanted(request, wanted)
            return ()
        return request.to_gather(self._chunk_tokens, self._budgets)

    def _release_unwanted(self, request: StagedRequest, wanted: Collection[Key]) -> None:
        """Release all held chunks except the wanted ones."""
        kept = frozenset(wanted)
        if not request.pins <= kept:
            self._manager.passages.pins.remove(request.ctx.request_id, kept)
            request.pins &= kept
        if request.passage is not None and not kept.issuperset(request.passage.keys):
            kept_keys = tuple(key for key in request.passage.granted() if key in kept)
            self._manager.passages.shrink(request.ctx.request_id, kept_keys)

    # -- answering ---------------------------------------------------------------------------------------------------

    def lookup(self, request_id: str, key: Key, group: int, end_token: int) -> LookupResult:
        """Whether a chunk can be loaded.

        Args:
            request_id: the request.
            key: the chunk.
            group: its group.
            end_token: number of tokens of the request up to the end of the chunk.

        Returns:
            HIT: readable in the host tier, and held for this request. PENDING: in the stack; it will be gathered, or is
                being stored. RETRY: a tier was asked. MISS: in no tier, beyond what one request can have gathered, not
                ready in time, or behind a chunk that the engine waits for anyway.
        """
        if request_id not in self._requests:
            self.add_request(RequestContext(request_id))
        request = self._requests[request_id]
        if request.last_step != self._step:
            self._begin_questions(request, key)
        if request.waits:
            return LookupResult.PENDING if key == request.reserved[0] else _MISS
        runs, answers = request.runs, request.answers
        if group not in runs or key in runs[group].asked:
            runs[group] = Run(end_token)
        run = runs[group]
        if not run.note_question(key, end_token, self._budgets[group]):
            return _MISS
        if request.load_tokens_max is not None and self._is_beyond(request.load_tokens_max, run, group, end_token):
            return _MISS
        if key not in answers:
            answers[key] = self._answer(request, key, group)
        run.note_answer(key, end_token, answers[key])
        return answers[key]

    def _begin_questions(self, request: StagedRequest, first: Key) -> None:
        """Begin the questions about a request in this step. first: the chunk that is asked about first."""
        request_id = request.ctx.request_id
        request.last_step = self._step
        request.last_asked_s = self._asked_s = self._now_s
        request.runs.clear()
        request.answers.clear()
        if not self._asked_in_step and (slow := self._choice.slow_tiers()) != self._slow:
            self._slow = slow
        self._asked_in_step[request_id] = request
        self._open[request_id] = request
        self._open.move_to_end(request_id)
        self._counters.lookups += 1
        if request.late_s is not None and self._manager.step.answered_s > request.late_s and not request.alternates:
            request.late_s = None
        if request.late_s is None and (request.alternates or self._is_late(request)):
            self._count_wait(request)
            request.late_s = self._now_s
            self._counters.deadlines_expired += 1
        if request.asked_tier_s is not None and self._manager.step.probed_s >= request.asked_tier_s:
            self._note_tier_answered(request)
        request.waits = self._answers_shortly and request.slow is self._slow and request.still_waits(first)
        if request.waits:
            return
        request.slow = self._slow
        request.allows_all = request.late_s is None and self._manager.allows_all(request.ctx)
        ready = set() if request.passage is None else request.passage.granted_ready()
        request.held = request.pins | ready
        request.has_hit = request.holds_all_groups(self._num_groups)

    def _is_late(self, request: StagedRequest) -> bool:
        """Whether an operation that the request waits for has made no progress for the deadline."""
        manager = self._manager
        if request.deferred_since_s is None:
            return False
        if request.asked_tier_s is not None:
            is_silent = not manager.step.is_behind and manager.step.probed_s < request.asked_tier_s
            return is_silent and self._now_s - request.asked_tier_s >= self._deadline_s
        return manager.passages.is_late(request.ctx.request_id, self._deadline_s)

    def _is_beyond(self, tokens_max: int, run: Run, group: int, end_token: int) -> bool:
        """Whether the hints forbid to load this far. A window reaches no further than the prefix before it."""
        if run.backwards:
            return tokens_max == 0
        return end_token - run.first_end + self._chunk_tokens[group] > tokens_max

    def _answer(self, request: StagedRequest, key: Key, group: int) -> LookupResult:
        if key in request.held:
            return _HIT
        manager, ctx = self._manager, request.ctx
        pins = manager.passages.pins
        if request.allows_all and pins.add(ctx.request_id, key):  # usual
            request.pins.add(key)
            return _HIT
        if request.late_s is not None:  # only readable chunks count, and no tier is asked
            result = _HIT if manager.resident_prefix((key,), 0, 1, ctx) else _MISS
        else:
            result = manager.lookup(key, ctx)
        if self._slow and result in _BELOW and self._is_slow(key, ctx):
            result = _MISS
        if result is not _HIT:
            return result
        if pins.add(ctx.request_id, key):
            request.pins.add(key)
            return _HIT
        manager.passages.note_shortage()
        # The chunk is in a lower tier, or all slots that may be held are held for other requests.
        if request.late_s is not None:
            return _MISS
        # What a request holds of every group is a hit, or becomes one. It does not wait for a slot behind that.
        is_behind = request.has_hit and self._is_whole[group] and not manager.passages.account.hold_room()
        return _MISS if is_behind else LookupResult.PENDING

    def _is_slow(self, key: Key, ctx: RequestContext) -> bool:
        """Whether a chunk would be, or is being, read from a slow tier, which is then measured again at times."""
        tier = self._manager.read_costs.source_of(key, ctx)
        if tier is None or tier not in self._slow:
            return False
        self._manager.read_costs.remeasure(tier, key, ctx)
        return True

    # -- whole cache -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Reopen every lookup after a reset of the cache."""
        for request in list(self._open.values()):
            self._release_chunks(request)

    def validate(self) -> None:
        """Check that every request with held chunks has an open lookup, which ``begin_step`` releases in time.

        Raises:
            InvariantError: one has not.
        """
        for request_id, request in self._requests.items():
            holds = bool(request.pins) or request.passage is not None
            require(
                not holds or request_id in self._open, f"request {request_id!r} holds chunks without an open lookup"
            )
