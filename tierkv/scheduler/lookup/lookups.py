"""Open lookups: search, gather, then offer, within a deadline (decision 4).

A hit longer than what can be gathered at once is offered whole as soon as its first segment is gathered. Its load then
streams (:mod:`tierkv.scheduler.load.loads`).

Each call settles the question, or leaves the request ASKING or GATHERING and answers None (:meth:`Lookups._defer`). A
repeated question costs O(1) while nothing has changed.
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
    """Requests whose lookup is open (ASKING, GATHERING or OFFERED). Sans-IO.

    Args:
        manager: answers existence, and gathers chunks.
        deadline_s: a lookup is answered at the latest this long after it was first asked.
        counters: for metrics.
        choice: shortens hits that are slower to load than to compute.
        waits_for_loads: a request that wants chunks which another one is loading waits for that load (S49, S51).
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
        """Defer other requests that want these chunks: they will find them on the GPU (S49)."""
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
        """Ids of requests whose lookup is open."""
        return self._open.keys()

    # -- answering ---------------------------------------------------------------------------------------------------

    def answer(self, record: RequestRecord, computed_tokens: int) -> int | None:
        """Tokens beyond ``computed_tokens`` that can be loaded; None: ask again in the next step.

        The open lookup is reused if the question is the same: OFFERED repeats its answer; GATHERING is answered when
        its reservation is ready; ASKING is searched again only after a tier has answered something.
        """
        question = (computed_tokens, record.hit_end_max, *[len(group.keys) for group in record.groups])
        lookup = record.lookup
        lookup.last_asked_s = self.now_s
        self._open[record.ctx.request_id] = record
        self._open.move_to_end(record.ctx.request_id)
        new_question = record.state is RequestState.OFFERED and lookup.question != question
        if lookup.first_asked_s is None or new_question:
            lookup.first_asked_s = self.now_s
        expired = self.now_s - lookup.first_asked_s >= self._deadline_s
        if lookup.question == question:
            if record.state is RequestState.OFFERED:
                return lookup.hit_tokens
            fits = len(lookup.gathered) <= self._manager.reserved_chunks_max  # shrinks while a load streams
            if record.state is RequestState.GATHERING and not expired and fits:
                ctx = record.ctx
                reservation = self._manager.reservations.reserve(ctx.request_id, lookup.gathered, ctx.hints)
                if not reservation.failed:
                    if not reservation.ready or self._is_being_loaded(lookup.wanted):
                        return self._defer(record, None)
                    if not lookup.will_stream:  # chunks of a stream that are not held are looked up again
                        return self._offer(record, lookup.hit_tokens, expired=False)
            elif record.state is RequestState.ASKING and not expired and self._is_still_open(record):
                return self._defer(record, None)
        lookup.question, lookup.searched_version = question, self._manager.version
        lookup.may_stream = not expired and self._may_stream(record)
        return self._resolve(record, computed_tokens, expired=expired)

    def _resolve(self, record: RequestRecord, computed_tokens: int, *, expired: bool) -> int | None:
        """Search, reserve and answer; None if a tier must answer first, or if wanted chunks are in flight."""
        lookup = record.lookup
        # A wanted chunk can be lost while it is gathered. Then the search is repeated; each time the manager knows of
        # one chunk less. Two rounds per step keep the step short.
        for _ in range(2):
            search = partial(self._search, record, computed_tokens, expired=expired)
            hit = self._choice.choose_hit(record, computed_tokens, search)
            if hit.deferred:
                return self._defer(record, RequestEvent.UNKNOWN)
            if not hit.tokens:
                return self._miss(record, expired=expired)
            wanted = wanted_keys(record.search_groups, computed_tokens, hit.tokens)
            lookup.wanted, lookup.hit_tokens = wanted, hit.tokens
            lookup.gathered = self._to_gather(record, computed_tokens)
            reservation = self._manager.reservations.reserve(record.ctx.request_id, lookup.gathered, record.ctx.hints)
            if reservation.ready and (expired or not self._is_being_loaded(wanted)):
                return self._offer(record, hit.tokens, expired=expired)
            if expired:
                return self._offer_held_part(record, computed_tokens, hit.tokens, reservation)
            if not reservation.failed:
                break
        return self._defer(record, RequestEvent.WANTED)

    def _is_still_open(self, record: RequestRecord) -> bool:
        """Whether nothing has happened since the last search that could change its result."""
        lookup = record.lookup
        return lookup.searched_version == self._manager.version and lookup.may_stream == self._may_stream(record)

    def _may_stream(self, record: RequestRecord) -> bool:
        """Whether the request may be offered more than can be gathered at once.

        Not if its windows leave no room for other chunks. Not if half of its deadline has passed while the length of
        the whole hit is still unknown: then there is time only for the part that can be gathered.
        """
        if window_chunks_max(record.search_groups) >= self._manager.streams.chunks_max:
            return False
        since_s = record.lookup.first_asked_s
        waited_s = 0.0 if since_s is None else self.now_s - since_s
        return 2 * waited_s < self._deadline_s

    def _to_gather(self, record: RequestRecord, computed_tokens: int) -> tuple[Key, ...]:
        """Wanted chunks to gather before the answer: all of them, or the first segment of a longer hit."""
        lookup, chunks_max = record.lookup, self._manager.reserved_chunks_max
        if len(lookup.wanted) <= chunks_max:
            return lookup.wanted
        streams = self._manager.streams
        always = window_keys(record.search_groups, computed_tokens, lookup.hit_tokens)
        return first_segment(lookup.wanted, always, streams.is_readable, streams.chunks_max, chunks_max)

    def sources(self, record: RequestRecord) -> Counter[str]:
        """Number of chunks per tier of the hit that was just answered."""
        sources = self._manager.reservations.count_sources(record.ctx.request_id)
        lookup = record.lookup
        if lookup.will_stream:
            gathered = set(lookup.gathered)
            for key in lookup.wanted:
                if key not in gathered:
                    tier = self._manager.read_costs.source_of(key, record.ctx)
                    sources[HOST if tier is None else self._manager.tiers[tier].name] += 1
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
        """Search for the hit, up to the end ``tokens_max``, as if the tiers ``without`` had nothing.

        If the load cannot stream, the end is also limited to what can be gathered at once. After the deadline only
        chunks readable in the host tier count, and no tier is asked.
        """
        cap = tokens_max
        if not record.lookup.may_stream:
            chunks_max = self._manager.reserved_chunks_max
            cap = tokens_covered(record.search_groups, computed_tokens, tokens_max, chunks_max)
        if record.ctx.hints.max_load_tokens is not None:
            cap = min(cap, computed_tokens + record.ctx.hints.max_load_tokens)
        ctx = self._manager.read_costs.context_without(record.ctx, without) if without else record.ctx
        return self._longest_hit(record, ctx, computed_tokens, cap, expired=expired)

    def _longest_hit(
        self, record: RequestRecord, ctx: RequestContext, computed_tokens: int, tokens_max: int, *, expired: bool
    ) -> Hit:
        """Longest hit that ends at ``tokens_max`` or before; windows of a shorter one need other chunks."""
        resident_prefix = partial(self._manager.resident_prefix, ctx=ctx)

        def readable(key: Key) -> LookupResult:
            """Look up a chunk in the host tier only."""
            return LookupResult.HIT if resident_prefix((key,), 0, 1) else LookupResult.MISS

        lookup = readable if expired else partial(self._manager.lookup, ctx=ctx)
        return find_hit(record.search_groups, computed_tokens, tokens_max, lookup, resident_prefix)

    def _is_being_loaded(self, wanted: tuple[Key, ...]) -> bool:
        return bool(self._loading) and not self._loading.keys().isdisjoint(wanted)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _defer(self, record: RequestRecord, event: RequestEvent | None) -> int | None:
        """Answer None. Every deferred lookup passes here.

        event: the reason, if the state changes. UNKNOWN: a tier must answer first. WANTED: chunks are in flight.
        """
        if event is RequestEvent.UNKNOWN:
            self._manager.reservations.release(record.ctx.request_id)
        if event is not None:
            record.apply(event)
        self._counters.deferrals += 1
        return None

    def _miss(self, record: RequestRecord, *, expired: bool) -> int:
        self._count_deadline(record, expired=expired)
        record.note_hit(record.computed_tokens)
        # After its deadline a request is not deferred again until it runs (S47).
        self._release_chunks(record, keeps_time=expired)
        record.apply(RequestEvent.MISSED)
        return 0

    def _offer(self, record: RequestRecord, tokens: int, *, expired: bool) -> int:
        self._count_deadline(record, expired=expired)
        record.apply(RequestEvent.ANSWERED)
        record.lookup.hit_tokens = tokens
        record.note_hit(record.computed_tokens + tokens)
        return tokens

    def _count_deadline(self, record: RequestRecord, *, expired: bool) -> None:
        self._counters.deadlines_expired += expired and record.state in _DEFERRED

    def _offer_held_part(
        self, record: RequestRecord, computed_tokens: int, tokens: int, reservation: Reservation
    ) -> int:
        """Offer the readable chunks that the reservation holds: the deadline has passed."""
        granted = reservation.granted_ready()

        def held(key: Key) -> LookupResult:
            return LookupResult.HIT if key in granted else LookupResult.MISS

        hit = find_hit(record.search_groups, computed_tokens, computed_tokens + tokens, held)
        if not hit.tokens:
            return self._miss(record, expired=True)
        wanted = wanted_keys(record.search_groups, computed_tokens, hit.tokens)
        record.lookup.wanted = record.lookup.gathered = wanted
        self._manager.reservations.shrink(record.ctx.request_id, wanted)
        return self._offer(record, hit.tokens, expired=True)

    def close_lookup(self, record: RequestRecord) -> None:
        """End the lookup (allocated, missed, lapsed or finished). Releases no chunks."""
        self._open.pop(record.ctx.request_id, None)
        record.lookup.close()

    def _release_chunks(self, record: RequestRecord, *, keeps_time: bool) -> None:
        """Release the request's chunks and close its lookup.

        keeps_time: the next question shares the deadline of this one.
        """
        since_s = record.lookup.first_asked_s if keeps_time else None
        self._manager.reservations.release(record.ctx.request_id)
        self.close_lookup(record)
        record.lookup.first_asked_s = since_s

    def begin_step(self, now_s: float) -> None:
        """Set the time of this step, and release lookups that the engine has not repeated within the deadline.

        A deferred one keeps its deadline, so that a rarely repeated question is still answered.
        """
        self.now_s = now_s
        while self._open:
            record = next(iter(self._open.values()))
            if now_s - record.lookup.last_asked_s < self._deadline_s:
                return
            deferred = record.state in _DEFERRED
            self._counters.deadlines_expired += deferred
            self._release_chunks(record, keeps_time=deferred)
            record.apply(RequestEvent.LAPSED)

    def reset(self) -> None:
        """Reopen every lookup after a reset of the cache. Deferred ones keep their deadline."""
        self._loading.clear()
        for record in list(self._open.values()):
            self._release_chunks(record, keeps_time=record.state in _DEFERRED)
            record.apply(RequestEvent.LAPSED)
