"""Lookups for an engine that schedules itself, asks chunk by chunk, and cannot hear of a load that failed.

Such an engine asks the same run of chunks in every step until no answer is "ask me again". A chunk is a HIT only when
it is readable in the host tier and held for the request, so that it cannot be evicted before it is loaded. Chunks in
lower tiers are gathered under the request's reservation (:mod:`tierkv.manager.reservations.reservations`): not while
the engine asks, but at the end of the step, when the wanted chunks are known and no tier's answer is missing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from tierkv.errors import require
from tierkv.manager.contract import RequestContext
from tierkv.manager.manager import OffloadManager
from tierkv.manager.reservations.reservation import Reservation
from tierkv.metrics.counters import CoreCounters
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_MISS, _RETRY = LookupResult.MISS, LookupResult.RETRY


class Run:
    """What was asked of one group since the engine last began there.

    An engine may go over a group several times in one answer, each time up to an earlier end: the last time counts.
    A group with a window, or with states, is asked from its end: what a gap cuts off there is not wanted.
    """

    __slots__ = ("_deferred", "_unknown", "asked", "backwards", "first_end", "last_end", "wanted")

    def __init__(self, end_token: int) -> None:
        self.asked: set[Key] = set()
        self.wanted: dict[Key, int] = {}
        self.first_end = self.last_end = end_token
        self.backwards = False
        self._deferred = False
        self._unknown = 0  # of those in ``wanted``

    def note_question(self, key: Key, end_token: int) -> None:
        """Note in which direction the engine goes."""
        self.asked.add(key)
        self.backwards = end_token < self.last_end
        self.last_end = end_token

    def is_full(self, chunks_max: int) -> bool:
        """Whether as many chunks are wanted as may be.

        Going backwards, one that a tier was only asked about does not count: a state can be far from the end, and
        tiers shall be asked about all places where it may be in one go, as the engine means it.
        """
        return len(self.wanted) - (self._unknown if self.backwards else 0) >= chunks_max

    def note_answer(self, key: Key, end_token: int, answer: LookupResult) -> None:
        """The answer about the last chunk that was asked about."""
        if answer is _RETRY:
            self._deferred = True
            self._unknown += 1
        if answer is not _MISS:
            self.wanted[key] = end_token
        elif self.backwards:
            self.wanted.clear()
            self._unknown = 0

    @property
    def awaits_tier(self) -> bool:
        """Whether the engine defers because of a chunk nearer to the end, though a gap has cut it off since."""
        return self._deferred and self.backwards


_HIT, _MISS = LookupResult.HIT, LookupResult.MISS


def group_budgets(geometry: Geometry, chunks_max: int) -> tuple[int, ...]:
    """How many chunks of each group one request may want at once, so that those of all groups fit together.

    Without it the first group that an engine asks about could take all there is, and the windows that complete a hit
    would never find room. A window gets what it needs (one chunk more, because a hit may end inside a chunk), but no
    more than an equal share; the groups that need everything share the rest.
    """
    share = max(1, chunks_max // len(geometry.groups))
    windows = [None if g.window_chunks is None else min(g.window_chunks + 1, share) for g in geometry.groups]
    whole = windows.count(None)
    rest = max(1, (chunks_max - sum(window or 0 for window in windows)) // max(1, whole))
    return tuple(rest if window is None else window for window in windows)


class _StagedRequest:
    """A request that is asked about.

    step: the last step in which it was. asked_at_s: when that was. since_s: since when its lookup is deferred.
    expired: its deadline has passed: until it runs it is not deferred again (S47). pins: single chunks held for it, and
    reservation: the others. held: those of both that are readable; answers: the rest of what it was told in this step.
    """

    __slots__ = (
        "answers", "asked_at_s", "ctx", "expired", "held", "pins", "reservation", "runs", "since_s", "step",
        "tokens_max",
    )  # fmt: skip

    def __init__(self, ctx: RequestContext) -> None:
        self.ctx = ctx
        self.tokens_max = ctx.hints.max_load_tokens
        self.step = -1
        self.asked_at_s = 0.0
        self.since_s: float | None = None
        self.expired = False
        self.pins: set[Key] = set()
        self.reservation: Reservation | None = None
        self.held: set[Key] = set()
        self.answers: dict[Key, LookupResult] = {}
        self.runs: dict[int, Run] = {}

    def wanted(self, chunk_tokens: Sequence[int]) -> tuple[Key, ...]:
        """What it wants at the end of a step, in prefix order.

        No hit reaches further than the last chunk that is wanted of each group, and there is none where a group has
        nothing; what other groups were asked about beyond that was asked for nothing.
        """
        runs = [(run, chunk_tokens[group]) for group, run in self.runs.items()]
        end_max = min((max(run.wanted.values(), default=0) for run, _ in runs), default=0)
        ends = {k: end for run, tokens in runs for k, end in run.wanted.items() if end - tokens < end_max}
        return tuple(sorted(ends, key=ends.__getitem__))

    @property
    def awaits_tier(self) -> bool:
        """Whether a tier has to answer before it is known what the engine wants of some group."""
        return any(run.awaits_tier for run in self.runs.values())

    def is_deferred(self) -> bool:
        """Whether the engine waits. Not for the chunks of one group, if another group has none."""
        if self.awaits_tier or not all(run.wanted for run in self.runs.values()):
            return self.awaits_tier
        return bool(self.open_answers(key for run in self.runs.values() for key in run.wanted))

    def open_answers(self, keys: Iterable[Key]) -> set[LookupResult]:
        """What it was told about these chunks, but for hits."""
        return {self.answers[key] for key in keys} - {_HIT}

    def forget(self, *, keeps_time: bool) -> None:
        """Nothing is held for it any more. keeps_time: its next question shares this one's deadline."""
        self.step = -1
        self.pins = set()
        self.held = set()
        self.reservation = None
        self.runs.clear()
        self.answers.clear()
        if not keeps_time:
            self.since_s, self.expired = None, False


class StagedLookups:
    """The book of what each request wants. Sans-IO; a question costs O(1), the same one again in a step a dict probe.

    Args:
        manager: answers existence, holds and gathers.
        geometry: sizes of groups and chunks.
        deadline_s: a lookup is answered with what is ready at the latest this long after it was first deferred.
        counters: what happened, for metrics.
    """

    def __init__(self, manager: OffloadManager, geometry: Geometry, deadline_s: float, counters: CoreCounters) -> None:
        self._manager = manager
        self._deadline_s = deadline_s
        self._counters = counters
        self._budgets = group_budgets(geometry, manager.reserved_chunks_max)
        self._chunk_tokens = tuple(group.chunk_tokens for group in geometry.groups)
        self._requests: dict[str, _StagedRequest] = {}
        self._asked_in_step: dict[str, _StagedRequest] = {}  # in this step, in the order of the engine's queue
        # Requests for which chunks may be held, longest unasked first.
        self._open: OrderedDict[str, _StagedRequest] = OrderedDict()
        self._now_s = 0.0
        self._step = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, ctx: RequestContext) -> None:
        """A request has arrived. One of its id that is still known has ended without notice."""
        self.finish_request(ctx.request_id)
        self._requests[ctx.request_id] = _StagedRequest(ctx)

    def request_context(self, request_id: str) -> RequestContext:
        """Who asks; somebody unknown has no hints."""
        request = self._requests.get(request_id)
        return RequestContext(request_id) if request is None else request.ctx

    def close_lookup(self, request_id: str) -> None:
        """The request runs, loads, or has lost its blocks: this lookup is over, the next one is a new question."""
        request = self._requests.get(request_id)
        if request is not None:
            self._release_chunks(request, keeps_time=False)

    def finish_request(self, request_id: str) -> None:
        """The request has ended, in whatever way."""
        self.close_lookup(request_id)
        self._requests.pop(request_id, None)

    def _release_chunks(self, request: _StagedRequest, *, keeps_time: bool) -> None:
        request_id = request.ctx.request_id
        self._manager.release(request.ctx)
        self._open.pop(request_id, None)
        self._asked_in_step.pop(request_id, None)
        if not keeps_time:
            self._count_wait(request)
        request.forget(keeps_time=keeps_time)

    def _count_wait(self, request: _StagedRequest) -> None:
        """A request waits no more for its answer. One whose deadline has passed was counted then."""
        if request.since_s is not None and not request.expired:
            self._counters.deferred_ms += round((self._now_s - request.since_s) * 1000)

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """The time, in seconds on the stack's clock, that holds until the next call.

        Whatever is held for a request that the engine has stopped asking about for longer than the deadline is
        released: engines do not tell when they drop a hit.
        """
        self._now_s = now_s
        while self._open:
            request = next(iter(self._open.values()))
            if now_s - request.asked_at_s < self._deadline_s:
                return
            waited = request.since_s is not None
            self._counters.deadlines_expired += waited and not request.expired
            self._release_chunks(request, keeps_time=waited)

    def end_step(self) -> None:
        """All questions of the step have been asked: gather what is wanted, let go of what is not."""
        wanted_by_request = {
            request: wanted for request in self._asked_in_step.values() if (wanted := self._keys_to_reserve(request))
        }
        for request in wanted_by_request:  # all of them first: what a younger one holds is not in an older one's way
            self._manager.unpin(request.ctx)
            request.pins.clear()
        for request, wanted in wanted_by_request.items():
            request.reservation = self._manager.reserve(wanted, request.ctx)
        self._asked_in_step.clear()
        self._step += 1

    def _keys_to_reserve(self, request: _StagedRequest) -> tuple[Key, ...]:
        """What is to be gathered for a request; nothing if it has its answer, or while a tier's answer is missing."""
        wanted = request.wanted(self._chunk_tokens)
        if not request.is_deferred():
            self._count_wait(request)
            if not request.expired:
                request.since_s = None  # an answer: what is asked from now on is a new question
            self._release_unwanted(request, wanted)
            return ()
        self._counters.deferrals += 1
        if request.since_s is None:
            request.since_s = self._now_s
        waits = request.open_answers(wanted)
        # The wanted chunks are known only when every tier has answered.
        if request.awaits_tier or not waits or LookupResult.RETRY in waits:
            self._release_unwanted(request, wanted)
            return ()
        return wanted

    def _release_unwanted(self, request: _StagedRequest, wanted: Collection[Key]) -> None:
        """Of what is held, only what is wanted."""
        kept = frozenset(wanted)
        if not request.pins <= kept:
            self._manager.unpin(request.ctx, kept)
            request.pins &= kept
        if request.reservation is not None and not kept.issuperset(request.reservation.keys):
            self._manager.trim(tuple(key for key in request.reservation.granted() if key in kept), request.ctx)

    # -- answering ---------------------------------------------------------------------------------------------------

    def lookup(self, request_id: str, key: Key, group: int, end_token: int) -> LookupResult:
        """Whether a chunk can be loaded.

        Args:
            request_id: who asks.
            key: the chunk.
            group: its group.
            end_token: how many tokens of the request there are up to the chunk's end.

        Returns:
            HIT: readable in the host tier, and held for this request. PENDING: in the stack; it will be gathered, or is
            being stored. RETRY: a tier was asked. MISS: nowhere, more than one request can have gathered, or not
            ready in time.
        """
        request = self._requests.get(request_id)
        if request is None:
            self.add_request(RequestContext(request_id))
            request = self._requests[request_id]
        if request.step != self._step:
            self._begin(request)
        run = request.runs.get(group)
        if run is None or key in run.asked:
            run = request.runs[group] = Run(end_token)
        run.note_question(key, end_token)
        if run.is_full(self._budgets[group]):
            return _MISS
        if request.tokens_max is not None and self._is_beyond(request.tokens_max, run, group, end_token):
            return _MISS
        answer = request.answers.get(key)
        if answer is None:
            answer = request.answers[key] = self._answer(request, key)
        run.note_answer(key, end_token, answer)
        return answer

    def _begin(self, request: _StagedRequest) -> None:
        """The first question about a request in this step."""
        request_id = request.ctx.request_id
        request.step = self._step
        request.asked_at_s = self._now_s
        request.runs.clear()
        request.answers.clear()
        self._asked_in_step[request_id] = request
        self._open[request_id] = request
        self._open.move_to_end(request_id)
        self._counters.lookups += 1
        if request.since_s is not None and not request.expired and self._now_s - request.since_s >= self._deadline_s:
            self._count_wait(request)
            request.expired = True
            self._counters.deadlines_expired += 1
        ready = set() if request.reservation is None else request.reservation.granted_ready()
        request.held = request.pins | ready

    def _is_beyond(self, tokens_max: int, run: Run, group: int, end_token: int) -> bool:
        """Whether the request's hints forbid to load so much. A window reaches no further than the prefix before it."""
        if run.backwards:
            return tokens_max == 0
        return end_token - run.first_end + self._chunk_tokens[group] > tokens_max

    def _answer(self, request: _StagedRequest, key: Key) -> LookupResult:
        if key in request.held:
            return _HIT
        manager, ctx = self._manager, request.ctx
        if request.expired:  # only what is ready counts, and nobody else is asked any more
            result = _HIT if manager.resident_prefix((key,), 0, 1, ctx) else _MISS
        else:
            result = manager.lookup(key, ctx)
        if result is not _HIT:
            return result
        if manager.pin(key, ctx):
            request.pins.add(key)
            request.held.add(key)
            return _HIT
        # It lies below, or all that may be held is held for others.
        return _MISS if request.expired else LookupResult.PENDING

    # -- whole cache -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The cache was emptied: every open lookup starts over, within its deadline."""
        for request in list(self._open.values()):
            self._release_chunks(request, keeps_time=request.since_s is not None)

    def validate(self) -> None:
        """Check that nothing is held for a request that nobody sweeps.

        Raises:
            InvariantError: there is.
        """
        for request_id, request in self._requests.items():
            holds = bool(request.pins) or request.reservation is not None
            require(not holds or request_id in self._open, f"request {request_id!r} holds chunks, and is not open")
