"""Lookups for an engine that schedules itself, asks chunk by chunk, and does not report failed loads.

Such an engine repeats its questions in every step until no answer is RETRY or PENDING. A chunk is a HIT only when it is
readable in the host tier and held for the request, so that it cannot be evicted before it is loaded. Chunks in lower
tiers are gathered under the request's reservation (:mod:`tierkv.manager.reservations.reservations`). That happens at
the end of the step, when the wanted chunks are known and every tier has answered.
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

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class Run:
    """Questions about one group, since the engine last began there.

    An engine may go over a group several times for one answer, each time up to an earlier end: the last pass counts. A
    group with a window, or with states, is asked from its end: chunks in front of a gap are not wanted there.
    """

    __slots__ = ("_deferred", "_unknown", "asked", "backwards", "first_end", "last_end", "wanted")

    def __init__(self, end_token: int) -> None:
        self.asked: set[Key] = set()
        self.wanted: dict[Key, int] = {}
        self.first_end = self.last_end = end_token
        self.backwards = False
        self._deferred = False
        self._unknown = 0  # number of wanted chunks whose presence is unknown

    def note_question(self, key: Key, end_token: int) -> None:
        """Note the question, and the direction in which the engine goes."""
        self.asked.add(key)
        self.backwards = end_token < self.last_end
        self.last_end = end_token

    def is_full(self, chunks_max: int) -> bool:
        """Whether no further chunk may be wanted.

        Backwards, a chunk whose presence is unknown does not count. A state can be far from the end, and tiers must be
        asked about all of its possible places at once.
        """
        return len(self.wanted) - (self._unknown if self.backwards else 0) >= chunks_max

    def note_answer(self, key: Key, end_token: int, answer: LookupResult) -> None:
        """Note the answer to the latest question."""
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
        """Whether the engine defers because of an unknown chunk nearer to the end, though a later gap cut it off."""
        return self._deferred and self.backwards


class _StagedRequest:
    """Open lookup of one request.

    Attributes:
        last_step: latest step with a question about it.
        last_asked_s: time of that step.
        deferred_since_s: time since when its lookup is deferred; None: not deferred.
        expired: its deadline has passed: until it runs it is not deferred again (S47).
        pins: single chunks held for it.
        reservation: holds further chunks for it.
        held: readable chunks of both.
        answers: answers of this step, except for ``held`` chunks.
        runs: by group.
    """

    __slots__ = (
        "answers", "ctx", "deferred_since_s", "expired", "held", "last_asked_s", "last_step", "load_tokens_max", "pins",
        "reservation", "runs",
    )  # fmt: skip

    def __init__(self, ctx: RequestContext) -> None:
        self.ctx = ctx
        self.load_tokens_max = ctx.hints.max_load_tokens
        self.last_step = -1
        self.last_asked_s = 0.0
        self.deferred_since_s: float | None = None
        self.expired = False
        self.pins: set[Key] = set()
        self.reservation: Reservation | None = None
        self.held: set[Key] = set()
        self.answers: dict[Key, LookupResult] = {}
        self.runs: dict[int, Run] = {}

    def wanted(self, chunk_tokens: Sequence[int]) -> tuple[Key, ...]:
        """Chunks that the request wants at the end of a step, in prefix order.

        No hit reaches further than the last wanted chunk of each group, and there is none if a group has no chunk.
        Chunks of other groups beyond that end are not wanted.
        """
        runs = [(run, chunk_tokens[group]) for group, run in self.runs.items()]
        end_max = min((max(run.wanted.values(), default=0) for run, _ in runs), default=0)
        ends = {k: end for run, tokens in runs for k, end in run.wanted.items() if end - tokens < end_max}
        return tuple(sorted(ends, key=ends.__getitem__))

    @property
    def awaits_tier(self) -> bool:
        """Whether a tier must answer before the wanted chunks of some group are known."""
        return any(run.awaits_tier for run in self.runs.values())

    def is_deferred(self) -> bool:
        """Whether the engine waits. It does not wait for chunks of one group if another group has none."""
        if self.awaits_tier or not all(run.wanted for run in self.runs.values()):
            return self.awaits_tier
        return bool(self.open_answers(key for run in self.runs.values() for key in run.wanted))

    def open_answers(self, keys: Iterable[Key]) -> set[LookupResult]:
        """Answers other than HIT that were given for these chunks in this step."""
        return {self.answers[key] for key in keys} - {_HIT}

    def forget(self, *, keeps_time: bool) -> None:
        """Forget the lookup, whose chunks were released.

        keeps_time: the next question shares the deadline of this one.
        """
        self.last_step = -1
        self.pins = set()
        self.held = set()
        self.reservation = None
        self.runs.clear()
        self.answers.clear()
        if not keeps_time:
            self.deferred_since_s, self.expired = None, False


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

    Args:
        manager: answers existence, holds and gathers.
        geometry: sizes of groups and chunks.
        deadline_s: a lookup is answered with the readable chunks at the latest this long after it was first deferred.
        counters: for metrics.
    """

    def __init__(self, manager: OffloadManager, geometry: Geometry, deadline_s: float, counters: CoreCounters) -> None:
        self._manager = manager
        self._deadline_s = deadline_s
        self._counters = counters
        self._budgets = group_budgets(geometry, manager.reserved_chunks_max)
        self._chunk_tokens = tuple(group.chunk_tokens for group in geometry.groups)
        self._requests: dict[str, _StagedRequest] = {}
        self._asked_in_step: dict[str, _StagedRequest] = {}  # in the order of the engine's queue
        # Requests for which chunks may be held, longest unasked first.
        self._open: OrderedDict[str, _StagedRequest] = OrderedDict()
        self._now_s = 0.0
        self._step = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, ctx: RequestContext) -> None:
        """Register a request. A known one with the same id is finished first: the engine did not report its end."""
        self.finish_request(ctx.request_id)
        self._requests[ctx.request_id] = _StagedRequest(ctx)

    def request_context(self, request_id: str) -> RequestContext:
        """Context of a request; an unknown one has no hints."""
        request = self._requests.get(request_id)
        return RequestContext(request_id) if request is None else request.ctx

    def close_lookup(self, request_id: str) -> None:
        """End the lookup of a request that runs, loads, or has lost its blocks; its next lookup is a new one."""
        request = self._requests.get(request_id)
        if request is not None:
            self._release_chunks(request, keeps_time=False)

    def finish_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.close_lookup(request_id)
        self._requests.pop(request_id, None)

    def _release_chunks(self, request: _StagedRequest, *, keeps_time: bool) -> None:
        request_id = request.ctx.request_id
        self._manager.reservations.release(request.ctx.request_id)
        self._open.pop(request_id, None)
        self._asked_in_step.pop(request_id, None)
        if not keeps_time:
            self._count_wait(request)
        request.forget(keeps_time=keeps_time)

    def _count_wait(self, request: _StagedRequest) -> None:
        """Count the time of deferral, unless the deadline has passed: then it was counted already."""
        if request.deferred_since_s is not None and not request.expired:
            self._counters.deferred_ms += round((self._now_s - request.deferred_since_s) * 1000)

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """Set the time of this step, in seconds on the stack's clock; it holds until the next call.

        Releases lookups that the engine has not repeated within the deadline, since engines do not report dropped hits.
        """
        self._now_s = now_s
        while self._open:
            request = next(iter(self._open.values()))
            if now_s - request.last_asked_s < self._deadline_s:
                return
            waited = request.deferred_since_s is not None
            self._counters.deadlines_expired += waited and not request.expired
            self._release_chunks(request, keeps_time=waited)

    def end_step(self) -> None:
        """Gather the wanted chunks of all requests of the step, and release the others."""
        wanted_by_request = {
            request: wanted for request in self._asked_in_step.values() if (wanted := self._keys_to_reserve(request))
        }
        for request in wanted_by_request:  # unpin all first, so that younger requests do not block older ones
            self._manager.reservations.unpin(request.ctx.request_id)
            request.pins.clear()
        for request, wanted in wanted_by_request.items():
            request.reservation = self._manager.reservations.reserve(request.ctx.request_id, wanted, request.ctx.hints)
        self._asked_in_step.clear()
        self._step += 1

    def _keys_to_reserve(self, request: _StagedRequest) -> tuple[Key, ...]:
        """Chunks to gather for a request; none if it has its answer, or while the answer of a tier is missing."""
        wanted = request.wanted(self._chunk_tokens)
        if not request.is_deferred():
            self._count_wait(request)
            if not request.expired:
                request.deferred_since_s = None  # answered: the next question is a new one
            self._release_unwanted(request, wanted)
            return ()
        self._counters.deferrals += 1
        if request.deferred_since_s is None:
            request.deferred_since_s = self._now_s
        open_answers = request.open_answers(wanted)
        # The wanted chunks are known only when every tier has answered.
        if request.awaits_tier or not open_answers or LookupResult.RETRY in open_answers:
            self._release_unwanted(request, wanted)
            return ()
        return wanted

    def _release_unwanted(self, request: _StagedRequest, wanted: Collection[Key]) -> None:
        """Release all held chunks except the wanted ones."""
        kept = frozenset(wanted)
        if not request.pins <= kept:
            self._manager.reservations.unpin(request.ctx.request_id, kept)
            request.pins &= kept
        if request.reservation is not None and not kept.issuperset(request.reservation.keys):
            kept_keys = tuple(key for key in request.reservation.granted() if key in kept)
            self._manager.reservations.shrink(request.ctx.request_id, kept_keys)

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
                being stored. RETRY: a tier was asked. MISS: in no tier, beyond what one request can have gathered, or
                not ready in time.
        """
        request = self._requests.get(request_id)
        if request is None:
            self.add_request(RequestContext(request_id))
            request = self._requests[request_id]
        if request.last_step != self._step:
            self._begin_questions(request)
        run = request.runs.get(group)
        if run is None or key in run.asked:
            run = request.runs[group] = Run(end_token)
        run.note_question(key, end_token)
        if run.is_full(self._budgets[group]):
            return _MISS
        if request.load_tokens_max is not None and self._is_beyond(request.load_tokens_max, run, group, end_token):
            return _MISS
        answer = request.answers.get(key)
        if answer is None:
            answer = request.answers[key] = self._answer(request, key)
        run.note_answer(key, end_token, answer)
        return answer

    def _begin_questions(self, request: _StagedRequest) -> None:
        """Begin the questions about a request in this step."""
        request_id = request.ctx.request_id
        request.last_step = self._step
        request.last_asked_s = self._now_s
        request.runs.clear()
        request.answers.clear()
        self._asked_in_step[request_id] = request
        self._open[request_id] = request
        self._open.move_to_end(request_id)
        self._counters.lookups += 1
        since_s = request.deferred_since_s
        if since_s is not None and not request.expired and self._now_s - since_s >= self._deadline_s:
            self._count_wait(request)
            request.expired = True
            self._counters.deadlines_expired += 1
        ready = set() if request.reservation is None else request.reservation.granted_ready()
        request.held = request.pins | ready

    def _is_beyond(self, tokens_max: int, run: Run, group: int, end_token: int) -> bool:
        """Whether the hints forbid to load this far. A window reaches no further than the prefix before it."""
        if run.backwards:
            return tokens_max == 0
        return end_token - run.first_end + self._chunk_tokens[group] > tokens_max

    def _answer(self, request: _StagedRequest, key: Key) -> LookupResult:
        if key in request.held:
            return _HIT
        manager, ctx = self._manager, request.ctx
        if request.expired:  # only readable chunks count, and no tier is asked
            result = _HIT if manager.resident_prefix((key,), 0, 1, ctx) else _MISS
        else:
            result = manager.lookup(key, ctx)
        if result is not _HIT:
            return result
        if manager.reservations.pin(ctx.request_id, key):
            request.pins.add(key)
            request.held.add(key)
            return _HIT
        # The chunk is in a lower tier, or all slots that may be held are held for other requests.
        return _MISS if request.expired else LookupResult.PENDING

    # -- whole cache -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Reopen every lookup after a reset of the cache. Deferred ones keep their deadline."""
        for request in list(self._open.values()):
            self._release_chunks(request, keeps_time=request.deferred_since_s is not None)

    def validate(self) -> None:
        """Check that every request with held chunks has an open lookup, which ``begin_step`` releases in time.

        Raises:
            InvariantError: one has not.
        """
        for request_id, request in self._requests.items():
            holds = bool(request.pins) or request.reservation is not None
            require(
                not holds or request_id in self._open, f"request {request_id!r} holds chunks without an open lookup"
            )
