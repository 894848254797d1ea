"""Lookups for an engine that schedules itself, asks chunk by chunk, and cannot hear of a load that failed.

Such an engine asks the same run of chunks in every step until no answer is "ask me again". A chunk is a HIT only when
it is readable in the host tier and held for the asker, so that nothing can take it away before it is loaded. What lies
below is gathered under the request's reservation (:mod:`tierkv.manager.reservations.reservations`): not while
the engine asks, but at the end of the step, when it is known what it really wants, and that no tier still owes an
answer.
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

    __slots__ = ("_owed", "_unknown", "asked", "backwards", "first_end", "last_end", "wanted")

    def __init__(self, end_token: int) -> None:
        self.asked: set[Key] = set()
        self.wanted: dict[Key, int] = {}
        self.first_end = self.last_end = end_token
        self.backwards = False
        self._owed = False
        self._unknown = 0  # of those in ``wanted``

    def ask(self, key: Key, end_token: int) -> None:
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

    def heard(self, key: Key, end_token: int, answer: LookupResult) -> None:
        """The answer about the last chunk that was asked about."""
        if answer is _RETRY:
            self._owed = True
            self._unknown += 1
        if answer is not _MISS:
            self.wanted[key] = end_token
        elif self.backwards:
            self.wanted.clear()
            self._unknown = 0

    @property
    def owes(self) -> bool:
        """Whether the engine defers because of a chunk nearer to the end, though a gap has cut it off since."""
        return self._owed and self.backwards


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


class _Asker:
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
    def owed(self) -> bool:
        """Whether a tier has to answer before it is known what the engine wants of some group."""
        return any(run.owes for run in self.runs.values())

    def is_deferred(self) -> bool:
        """Whether the engine waits. Not for the chunks of one group, if another group has none."""
        if self.owed or not all(run.wanted for run in self.runs.values()):
            return self.owed
        return bool(self.waits(key for run in self.runs.values() for key in run.wanted))

    def waits(self, keys: Iterable[Key]) -> set[LookupResult]:
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
        self._askers: dict[str, _Asker] = {}
        self._asked: dict[str, _Asker] = {}  # in this step, in the order of the engine's queue
        self._open: OrderedDict[str, _Asker] = OrderedDict()  # for whom something may be held, longest unasked first
        self._now_s = 0.0
        self._step = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, ctx: RequestContext) -> None:
        """A request has arrived. One of its id that is still known has ended without notice."""
        self.finish(ctx.request_id)
        self._askers[ctx.request_id] = _Asker(ctx)

    def context(self, request_id: str) -> RequestContext:
        """Who asks; somebody unknown has no hints."""
        asker = self._askers.get(request_id)
        return RequestContext(request_id) if asker is None else asker.ctx

    def settle(self, request_id: str) -> None:
        """The request runs, loads, or has lost its blocks: this lookup is over, the next one is a new question."""
        asker = self._askers.get(request_id)
        if asker is not None:
            self._let_go(asker, keeps_time=False)

    def finish(self, request_id: str) -> None:
        """The request has ended, in whatever way."""
        self.settle(request_id)
        self._askers.pop(request_id, None)

    def _let_go(self, asker: _Asker, *, keeps_time: bool) -> None:
        request_id = asker.ctx.request_id
        self._manager.release(asker.ctx)
        self._open.pop(request_id, None)
        self._asked.pop(request_id, None)
        if not keeps_time:
            self._count_wait(asker)
        asker.forget(keeps_time=keeps_time)

    def _count_wait(self, asker: _Asker) -> None:
        """A request waits no more for its answer. One whose deadline has passed was counted then."""
        if asker.since_s is not None and not asker.expired:
            self._counters.deferred_ms += round((self._now_s - asker.since_s) * 1000)

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """The time, in seconds on the stack's clock, that holds until the next call.

        Whatever is held for a request that the engine has stopped asking about for longer than the deadline is
        released: engines do not tell when they drop a hit.
        """
        self._now_s = now_s
        while self._open:
            asker = next(iter(self._open.values()))
            if now_s - asker.asked_at_s < self._deadline_s:
                return
            waited = asker.since_s is not None
            self._counters.deadlines_expired += waited and not asker.expired
            self._let_go(asker, keeps_time=waited)

    def end_step(self) -> None:
        """All questions of the step have been asked: gather what is wanted, let go of what is not."""
        gathering = {asker: wanted for asker in self._asked.values() if (wanted := self._conclude(asker))}
        for asker in gathering:  # all of them first: what a younger one holds is not in an older one's way
            self._manager.unpin(asker.ctx)
            asker.pins.clear()
        for asker, wanted in gathering.items():
            asker.reservation = self._manager.reserve(wanted, asker.ctx)
        self._asked.clear()
        self._step += 1

    def _conclude(self, asker: _Asker) -> tuple[Key, ...]:
        """What is to be gathered for a request; nothing if it has its answer, or if a tier still owes one."""
        wanted = asker.wanted(self._chunk_tokens)
        if not asker.is_deferred():
            self._count_wait(asker)
            if not asker.expired:
                asker.since_s = None  # an answer: what is asked from now on is a new question
            self._keep(asker, wanted)
            return ()
        self._counters.deferrals += 1
        if asker.since_s is None:
            asker.since_s = self._now_s
        waits = asker.waits(wanted)
        if asker.owed or not waits or LookupResult.RETRY in waits:  # what is wanted is known when all has been answered
            self._keep(asker, wanted)
            return ()
        return wanted

    def _keep(self, asker: _Asker, wanted: Collection[Key]) -> None:
        """Of what is held, only what is wanted."""
        kept = frozenset(wanted)
        if not asker.pins <= kept:
            self._manager.unpin(asker.ctx, kept)
            asker.pins &= kept
        if asker.reservation is not None and not kept.issuperset(asker.reservation.keys):
            self._manager.trim(tuple(key for key in asker.reservation.granted() if key in kept), asker.ctx)

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
        asker = self._askers.get(request_id)
        if asker is None:
            self.add(RequestContext(request_id))
            asker = self._askers[request_id]
        if asker.step != self._step:
            self._begin(asker)
        run = asker.runs.get(group)
        if run is None or key in run.asked:
            run = asker.runs[group] = Run(end_token)
        run.ask(key, end_token)
        if run.is_full(self._budgets[group]):
            return _MISS
        if asker.tokens_max is not None and self._is_beyond(asker.tokens_max, run, group, end_token):
            return _MISS
        answer = asker.answers.get(key)
        if answer is None:
            answer = asker.answers[key] = self._answer(asker, key)
        run.heard(key, end_token, answer)
        return answer

    def _begin(self, asker: _Asker) -> None:
        """The first question about a request in this step."""
        request_id = asker.ctx.request_id
        asker.step = self._step
        asker.asked_at_s = self._now_s
        asker.runs.clear()
        asker.answers.clear()
        self._asked[request_id] = asker
        self._open[request_id] = asker
        self._open.move_to_end(request_id)
        self._counters.lookups += 1
        if asker.since_s is not None and not asker.expired and self._now_s - asker.since_s >= self._deadline_s:
            self._count_wait(asker)
            asker.expired = True
            self._counters.deadlines_expired += 1
        ready = set() if asker.reservation is None else asker.reservation.granted_ready()
        asker.held = asker.pins | ready

    def _is_beyond(self, tokens_max: int, run: Run, group: int, end_token: int) -> bool:
        """Whether the request's hints forbid to load so much. A window reaches no further than the prefix before it."""
        if run.backwards:
            return tokens_max == 0
        return end_token - run.first_end + self._chunk_tokens[group] > tokens_max

    def _answer(self, asker: _Asker, key: Key) -> LookupResult:
        if key in asker.held:
            return _HIT
        manager, ctx = self._manager, asker.ctx
        if asker.expired:  # only what is ready counts, and nobody else is asked any more
            result = _HIT if manager.resident_prefix((key,), 0, 1, ctx) else _MISS
        else:
            result = manager.lookup(key, ctx)
        if result is not _HIT:
            return result
        if manager.pin(key, ctx):
            asker.pins.add(key)
            asker.held.add(key)
            return _HIT
        # It lies below, or all that may be held is held for others.
        return _MISS if asker.expired else LookupResult.PENDING

    # -- whole cache -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The cache was emptied: every open lookup starts over, within its deadline."""
        for asker in list(self._open.values()):
            self._let_go(asker, keeps_time=asker.since_s is not None)

    def validate(self) -> None:
        """Check that nothing is held for a request that nobody sweeps.

        Raises:
            InvariantError: there is.
        """
        for request_id, asker in self._askers.items():
            holds = bool(asker.pins) or asker.reservation is not None
            require(not holds or request_id in self._open, f"request {request_id!r} holds chunks, and is not open")
