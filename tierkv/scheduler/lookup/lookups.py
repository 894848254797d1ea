"""How a lookup is answered: ask, then gather, then offer, within a deadline (decision 4).

A hit that is longer than what can be gathered at once is offered whole when a first part of it is gathered: its load
streams (see :mod:`tierkv.scheduler.load.loads`).

Each call either settles the question or leaves the request ASKING or GATHERING and answers None. A request that is
asked again while nothing has changed costs O(1).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Set as AbstractSet
from functools import partial

from tierkv.manager.contract import HOST, RequestContext
from tierkv.manager.manager import OffloadManager
from tierkv.manager.reservations.reservation import Reservation
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.lookup.first_segment import first_segment, window_chunks_max, window_keys
from tierkv.scheduler.lookup.load_or_recompute import LoadOrRecompute
from tierkv.scheduler.lookup.search import Hit, find_hit, tokens_covered, wanted_keys
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.request_state import RequestEvent, RequestState
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_DEFERRED = (RequestState.ASKING, RequestState.GATHERING)


class Lookups:
    """The book of requests whose lookup is open (ASKING, GATHERING or OFFERED). Sans-IO.

    Args:
        manager: answers existence and gathers.
        deadline_s: a lookup is answered at the latest this long after it was first asked.
        counters: what happened, for metrics.
        choice: how much of a hit is worth loading.
        waits_for_loads: a request that wants what another one is just loading waits for that (S49, S51).
    """

    def __init__(
        self,
        manager: OffloadManager,
        deadline_s: float,
        counters: CoreCounters,
        choice: LoadOrRecompute,
        *,
        waits_for_loads: bool,
    ) -> None:
        self.now_s = 0.0
        self._manager = manager
        self._deadline_s = deadline_s
        self._counters = counters
        self._choice = choice
        self._waits_for_loads = waits_for_loads
        self._open: OrderedDict[str, RequestRecord] = OrderedDict()
        self._loading: Counter[Key] = Counter()

    # -- loads of other requests -------------------------------------------------------------------------------------

    def loading_started(self, keys: tuple[Key, ...]) -> None:
        """These chunks are being loaded to the GPU: who wants them next waits and finds them there (S49)."""
        if self._waits_for_loads:
            self._loading.update(keys)

    def loading_ended(self, keys: tuple[Key, ...]) -> None:
        """Undo :meth:`loading_started`."""
        loading = self._loading
        for key in keys:
            count = loading.pop(key, 0)  # a reset may have ended them all
            if count > 1:
                loading[key] = count - 1

    @property
    def open_ids(self) -> AbstractSet[str]:
        """Requests whose lookup is open."""
        return self._open.keys()

    # -- answering ---------------------------------------------------------------------------------------------------

    def answer(self, record: RequestRecord, computed_tokens: int) -> int | None:
        """Tokens beyond ``computed_tokens`` that can be loaded; None: ask again next step."""
        about = (computed_tokens, record.hit_end_max, *[len(group.keys) for group in record.groups])
        record.asked_at_s = self.now_s
        self._open[record.ctx.request_id] = record
        self._open.move_to_end(record.ctx.request_id)
        new_question = record.state is RequestState.OFFERED and record.asked_about != about
        if record.asked_since_s is None or new_question:
            record.asked_since_s = self.now_s
        expired = self.now_s - record.asked_since_s >= self._deadline_s
        if record.asked_about == about:
            if record.state is RequestState.OFFERED:
                return record.hit_tokens
            fits = len(record.gathered) <= self._manager.reserved_chunks_max  # less may be left since a load streams
            if record.state is RequestState.GATHERING and not expired and fits:
                reservation = self._manager.reserve(record.gathered, record.ctx)
                if not reservation.failed:
                    if not reservation.ready or self._is_being_loaded(record.wanted):
                        return self._defer(record, None)
                    if not record.will_stream:  # else what is not held may have gone meanwhile: it is looked up again
                        return self._offer(record, record.hit_tokens, expired=False)
            elif record.state is RequestState.ASKING and not expired and self._is_still_open(record):
                return self._defer(record, None)
        record.asked_about, record.asked_version = about, self._manager.version
        record.asked_whole = not expired and self._asks_whole(record)
        return self._resolve(record, computed_tokens, expired=expired)

    def _resolve(self, record: RequestRecord, computed_tokens: int, *, expired: bool) -> int | None:
        # A wanted chunk can turn out to be gone while it is gathered; then the question is put once more, and every
        # time this happens the manager knows of one chunk less. Two rounds per step keep the step short.
        for _ in range(2):
            search = partial(self._search, record, computed_tokens, expired=expired)
            hit = self._choice.choose_hit(record, computed_tokens, search)
            if hit.deferred:
                return self._defer(record, RequestEvent.UNKNOWN)
            if not hit.tokens:
                return self._miss(record, expired=expired)
            wanted = wanted_keys(record.search_groups, computed_tokens, hit.tokens)
            record.wanted, record.hit_tokens = wanted, hit.tokens
            record.gathered = self._to_gather(record, computed_tokens)
            reservation = self._manager.reserve(record.gathered, record.ctx)
            if reservation.ready and (expired or not self._is_being_loaded(wanted)):
                return self._offer(record, hit.tokens, expired=expired)
            if expired:
                return self._offer_held_part(record, computed_tokens, hit.tokens, reservation)
            if not reservation.failed:
                break
        return self._defer(record, RequestEvent.WANTED)

    def _is_still_open(self, record: RequestRecord) -> bool:
        """Whether nothing has happened that could settle a question that was put to a tier."""
        return record.asked_version == self._manager.version and record.asked_whole == self._asks_whole(record)

    def _asks_whole(self, record: RequestRecord) -> bool:
        """Whether the request may be offered more than what can be gathered at once.

        Not where its windows leave no room for anything else; nor if half of its deadline has passed and it is not even
        known how long the whole hit is: then the part that can be gathered is what there is time for.
        """
        if window_chunks_max(record.search_groups) >= self._manager.streams.chunks_max:
            return False
        waited_s = 0.0 if record.asked_since_s is None else self.now_s - record.asked_since_s
        return 2 * waited_s < self._deadline_s

    def _to_gather(self, record: RequestRecord, computed_tokens: int) -> tuple[Key, ...]:
        """Of what is wanted, what is gathered before the answer: all of it, or the first part of a longer hit."""
        chunks_max = self._manager.reserved_chunks_max
        if len(record.wanted) <= chunks_max:
            return record.wanted
        streams = self._manager.streams
        always = window_keys(record.search_groups, computed_tokens, record.hit_tokens)
        return first_segment(record.wanted, always, streams.is_readable, streams.chunks_max, chunks_max)

    def sources(self, record: RequestRecord) -> Counter[str]:
        """How many chunks of the hit that was just answered come from which tier."""
        sources = self._manager.sources(record.ctx)
        if record.will_stream:
            gathered = set(record.gathered)
            for key in record.wanted:
                if key not in gathered:
                    tier = self._manager.would_read(key, record.ctx)
                    sources[HOST if tier is None else self._manager.tier_name(tier)] += 1
        return sources

    def _search(
        self,
        record: RequestRecord,
        computed_tokens: int,
        tokens_max: int,
        without: frozenset[str] = frozenset(),
        *,
        expired: bool,
    ) -> Hit:
        """The search, under the cap ``tokens_max``, as if some tiers had nothing.

        Where the load cannot stream, also under the cap of what can be gathered at once. After the deadline only what
        is readable in the host tier counts, and nobody else is asked any more.
        """
        cap = tokens_max
        if not record.asked_whole:
            chunks_max = self._manager.reserved_chunks_max
            cap = tokens_covered(record.search_groups, computed_tokens, tokens_max, chunks_max)
        if record.ctx.hints.max_load_tokens is not None:
            cap = min(cap, computed_tokens + record.ctx.hints.max_load_tokens)
        ctx = self._manager.without(record.ctx, without) if without else record.ctx
        return self._longest_hit(record, ctx, computed_tokens, cap, expired=expired)

    def _longest_hit(
        self, record: RequestRecord, ctx: RequestContext, computed_tokens: int, tokens_max: int, *, expired: bool
    ) -> Hit:
        """The longest hit that ends at ``tokens_max`` or before; a shorter one can need other chunks (windows)."""
        resident_prefix = partial(self._manager.resident_prefix, ctx=ctx)

        def readable(key: Key) -> LookupResult:
            """A lookup that knows the host tier only."""
            return LookupResult.HIT if resident_prefix((key,), 0, 1) else LookupResult.MISS

        lookup = readable if expired else partial(self._manager.lookup, ctx=ctx)
        return find_hit(record.search_groups, computed_tokens, tokens_max, lookup, resident_prefix)

    def _is_being_loaded(self, wanted: tuple[Key, ...]) -> bool:
        return bool(self._loading) and not self._loading.keys().isdisjoint(wanted)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _defer(self, record: RequestRecord, event: RequestEvent | None) -> int | None:
        if event is RequestEvent.UNKNOWN:
            self._manager.release(record.ctx)
        if event is not None:
            record.apply(event)
        self._counters.deferrals += 1
        return None

    def _miss(self, record: RequestRecord, *, expired: bool) -> int:
        self._count_deadline(record, expired=expired)
        record.note_hit(record.computed_tokens)
        # What the deadline has ended stays ended: until the request runs it is not deferred again (S47).
        self._release_chunks(record, keeps_time=expired)
        record.apply(RequestEvent.MISSED)
        return 0

    def _offer(self, record: RequestRecord, tokens: int, *, expired: bool) -> int:
        self._count_deadline(record, expired=expired)
        record.apply(RequestEvent.ANSWERED)
        record.hit_tokens = tokens
        record.note_hit(record.computed_tokens + tokens)
        return tokens

    def _count_deadline(self, record: RequestRecord, *, expired: bool) -> None:
        self._counters.deadlines_expired += expired and record.state in _DEFERRED

    def _offer_held_part(
        self, record: RequestRecord, computed_tokens: int, tokens: int, reservation: Reservation
    ) -> int:
        """The deadline has passed, and not all that is readable may be held: the part that is held is the answer."""
        granted = reservation.granted_ready()

        def held(key: Key) -> LookupResult:
            return LookupResult.HIT if key in granted else LookupResult.MISS

        hit = find_hit(record.search_groups, computed_tokens, computed_tokens + tokens, held)
        if not hit.tokens:
            return self._miss(record, expired=True)
        record.wanted = record.gathered = wanted_keys(record.search_groups, computed_tokens, hit.tokens)
        self._manager.trim(record.wanted, record.ctx)
        return self._offer(record, hit.tokens, expired=True)

    def close_lookup(self, record: RequestRecord) -> None:
        """The lookup is over: allocated, missed, lapsed, or the request is gone. Does not release chunks."""
        self._open.pop(record.ctx.request_id, None)
        record.end_lookup()

    def _release_chunks(self, record: RequestRecord, *, keeps_time: bool) -> None:
        """Hold nothing for the request any more. keeps_time: its next question shares this one's deadline."""
        since = record.asked_since_s if keeps_time else None
        self._manager.release(record.ctx)
        self.close_lookup(record)
        record.asked_since_s = since

    def sweep(self) -> None:
        """Release what is held for requests that the engine has stopped asking about for longer than the deadline.

        One that was deferred keeps its deadline: however seldom it is asked about, its next answer is an answer.
        """
        while self._open:
            record = next(iter(self._open.values()))
            if self.now_s - record.asked_at_s < self._deadline_s:
                return
            deferred = record.state in _DEFERRED
            self._counters.deadlines_expired += deferred
            self._release_chunks(record, keeps_time=deferred)
            record.apply(RequestEvent.LAPSED)

    def reset(self) -> None:
        """The cache was emptied: every open lookup starts over, within its deadline."""
        self._loading.clear()
        for record in list(self._open.values()):
            self._release_chunks(record, keeps_time=record.state in _DEFERRED)
            record.apply(RequestEvent.LAPSED)
