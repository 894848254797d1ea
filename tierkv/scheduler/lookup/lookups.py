"""Open lookups: search, gather, then offer (decision 4).

A hit longer than what can be gathered at once is offered whole as soon as its first segment is gathered, and the hit of
a request that is alone as soon as half of it is. Its load then streams (:mod:`tierkv.scheduler.load.loads`).

Each call settles the question, or answers None (:meth:`Lookups._defer`), within a bounded number of key operations. A
repeated question costs O(1) while nothing has changed.

A lookup is *late* when an operation that it waits for has made no progress for the deadline: its own, or one of those
ahead of it. Then the answer is what is held. Neither a silent engine nor a queue that moves makes it late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import chain

from tierkv.manager.contract import RequestContext
from tierkv.manager.manager import OffloadManager
from tierkv.manager.passages.passage import Passage
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.lookup.first_segment import first_segment, may_begin_early, window_chunks_max, window_keys
from tierkv.scheduler.lookup.load_or_recompute import LoadOrRecompute
from tierkv.scheduler.lookup.loads_in_flight import LoadsInFlight
from tierkv.scheduler.lookup.questions import HostQuestions, Questions, SearchTurns
from tierkv.scheduler.lookup.search import Hit, find_hit, tokens_covered, wanted_keys
from tierkv.scheduler.requests.observations import arrival_of, sources_of_hit
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.request_state import RequestEvent, RequestState
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_DEFERRED = (RequestState.ASKING, RequestState.GATHERING)


class Lookups:
    """Requests whose lookup is open (ASKING, GATHERING or OFFERED). Sans-IO.

    Args:
        manager: answers existence, and gathers chunks.
        deadline_s: seconds without progress after which a lookup is late.
        counters: for metrics.
        choice: shortens hits that are slower to load than to compute.
        loads: loads of all requests, in flight.
    """

    def __init__(
        self,
        manager: OffloadManager,
        deadline_s: float,
        counters: CoreCounters,
        choice: LoadOrRecompute,
        loads: LoadsInFlight,
    ) -> None:
        self.now_s = self._asked_s = 0.0  # the latter: time of the latest question about any request
        self._manager = manager
        self._deadline_s = deadline_s
        self._counters = counters
        self.choice = choice
        self._loads = loads
        self.share = manager.budget.share()  # makes the keys of questions, and searches
        self._turns = SearchTurns(self.share)
        # By id, the one that was asked least recently first.
        self._open: OrderedDict[str, RequestRecord] = OrderedDict()
        self._to_reopen: OrderedDict[str, RequestRecord] = OrderedDict()  # open when the cache was reset

    @property
    def open_ids(self) -> AbstractSet[str]:
        """Ids of requests whose lookup is open."""
        return self._open.keys() | self._to_reopen.keys()

    # -- answering ---------------------------------------------------------------------------------------------------

    def answer(self, record: RequestRecord, computed_tokens: int) -> int | None:
        """Tokens beyond ``computed_tokens`` that can be loaded; None: ask again in the next step.

        The open lookup is reused if the question is the same: OFFERED repeats its answer; GATHERING is answered when
        its passage is ready; ASKING is searched again only after a tier has answered something.
        """
        question = (computed_tokens, record.hit_end_max, *[len(group.keys) for group in record.groups])
        self.refresh(record)
        lookup = record.lookup
        lookup.previous_asked_s, lookup.last_asked_s, self._asked_s = lookup.last_asked_s, self.now_s, self.now_s
        self._open[record.ctx.request_id] = record
        self._open.move_to_end(record.ctx.request_id)
        new_question = record.state is RequestState.OFFERED and lookup.question != question
        if lookup.since_s is None or new_question:
            lookup.since_s = self.now_s
        late = self._is_late(record, question)
        if lookup.question == question:
            if record.state is RequestState.OFFERED:
                return lookup.hit_tokens
            if record.state is RequestState.GATHERING:
                is_decided, answer = self._answer_gathered(record, late=late)
                if is_decided:
                    return answer
            elif record.state is RequestState.ASKING and not late and self._is_still_open(record):
                return self._defer(record, None)
        else:
            self._note_tier_answered(record)
            lookup.forget_found()
        self._note_tier_answered(record)
        lookup.question, lookup.searched_version = question, self._manager.version
        return self._resolve(record, computed_tokens, late=late)

    def _answer_gathered(self, record: RequestRecord, *, late: bool) -> tuple[bool, int | None]:
        """Answer from the chunks that are gathered. Returns whether no search must follow, and the answer."""
        lookup, passages = record.lookup, self._manager.passages
        held = passages.get(record.ctx.request_id)
        if held is not None and held.failed:  # a step has lost a chunk; a paused search goes on
            lookup.search_anew(self.now_s)
            return False, None
        if self.choice.is_outdated(record) and not (held and held.ready):  # reads that are wanted still go on
            lookup.forget_found()
            return False, None
        fits = len(lookup.gathered) <= passages.hold_chunks_max  # shrinks while a load streams
        if not fits or (late and (held is None or not held.ready)):
            return False, None
        passage = self._reserve(record)
        if passage.failed:
            lookup.search_anew(self.now_s)
        elif not late and (not passage.ready or self._loads.has_any(lookup.wanted)):
            return True, self._offer_early(record, passage)
        elif passage.ready and (late or not lookup.will_stream or lookup.verifies):
            return True, self._offer(record, lookup.hit_tokens, late=late)  # late: another's load; its own may stream
        elif not late:
            lookup.verify()
        return False, None

    def _resolve(self, record: RequestRecord, computed_tokens: int, *, late: bool) -> int | None:
        """Search, reserve and answer; None if a tier must answer first, or if wanted chunks are in flight."""
        lookup = record.lookup
        if not late and not self._turns.take(lookup):
            return self._defer(record, RequestEvent.UNKNOWN)
        # A wanted chunk can be lost while it is gathered. Then the search is repeated, twice at most in a step.
        for _ in range(2):
            lookup.begin_search(self._manager.budget.step)
            search = partial(self._search, record, computed_tokens, late=late)
            hit = self.choice.choose_hit(record, computed_tokens, search)
            if not lookup.paused:  # otherwise all searches of the choice are repeated, and each continues
                lookup.seen, lookup.ends = {}, {}
            lookup.late_s = self.now_s if late and hit.deferred else None  # it goes on as late
            if hit.deferred:
                return self._defer(record, RequestEvent.UNKNOWN)
            if not hit.tokens:
                return self._miss(record, late=late)
            wanted = wanted_keys(record.search_groups, computed_tokens, hit.tokens)
            lookup.wanted, lookup.hit_tokens = wanted, hit.tokens
            lookup.gathered = self._to_gather(record, computed_tokens)
            passage = self._reserve(record)
            if passage.ready and (late or not self._loads.has_any(wanted)):
                if lookup.is_outdated(self._manager.budget.step):
                    lookup.verify()
                    continue
                return self._offer(record, hit.tokens, late=late)
            if late and not self._manager.passages.is_being_held(passage):
                return self._offer_held_part(record, computed_tokens, hit.tokens, passage)
            if not passage.failed:
                break
            lookup.search_anew(self.now_s)
        self._count_deadline(record, late=late)
        return self._defer(record, RequestEvent.WANTED)

    def _reserve(self, record: RequestRecord) -> Passage:
        """Gather what the open lookup wants before its answer."""
        lookup, ctx = record.lookup, record.ctx
        asked_s = self.now_s if lookup.since_s is None else lookup.since_s
        return self._manager.passages.reserve(ctx.request_id, lookup.gathered, ctx.hints, asked_s)

    def _offer_early(self, record: RequestRecord, passage: Passage) -> int | None:
        """Offer a hit while its last chunks are being read, so that the first ones are copied meanwhile, or defer.

        Only to a request that is alone: beside others, copies overlap with their reads in any case, and GPU blocks
        that are allocated early would be missing for them.
        """
        lookup, is_alone = record.lookup, self._manager.passages.is_alone(passage.owner)
        begins = passage.early_front and may_begin_early(record.search_groups, self.now_s - (lookup.since_s or 0.0))
        if begins and is_alone and not lookup.will_stream and not self._loads.has_any(lookup.wanted):
            lookup.gathered = lookup.gathered[: passage.front]
            return self._offer(record, lookup.hit_tokens, late=False)
        return self._defer(record, None)

    def renew_gathered(self, record: RequestRecord) -> None:
        """Count the chunks that have arrived since an early offer as gathered."""
        lookup, passage = record.lookup, self._manager.passages.get(record.ctx.request_id)
        if passage is not None and len(lookup.gathered) < len(passage.keys) and passage.complete:
            lookup.gathered = lookup.wanted if passage.ready else passage.keys[: passage.front]

    def _is_still_open(self, record: RequestRecord) -> bool:
        """Whether another search could find nothing new now.

        Nothing has happened since the last one; or that one stopped at the budget of its step, and no budget is left.
        """
        lookup = record.lookup
        return self._turns.waits(lookup) if lookup.paused else lookup.is_settled(self._manager.version)

    def _is_late(self, record: RequestRecord, question: tuple[int, ...]) -> bool:
        """Whether the lookup is late. One that was given up stays late until a tier answers something."""
        lookup, manager = record.lookup, self._manager
        if lookup.late_s is not None:
            if manager.step.answered_s <= lookup.late_s:
                return True
            lookup.late_s, lookup.since_s = None, self.now_s
        if record.state is RequestState.ASKING:
            asked_s = None if manager.step.is_behind else lookup.asked_tier_s
            return asked_s is not None and manager.step.probed_s < asked_s and self.now_s - asked_s >= self._deadline_s
        if record.state is not RequestState.GATHERING:
            return False
        passage = manager.passages.get(record.ctx.request_id)
        if passage is not None and passage.ready:
            moved_s = self._loads.moved_s(lookup.wanted)
            return lookup.question == question and lookup.is_load_late(moved_s, self.now_s, self._deadline_s)
        return manager.passages.is_late(record.ctx.request_id, self._deadline_s)

    def _may_stream(self, record: RequestRecord) -> bool:
        """Whether the request may be offered more than can be gathered at once.

        Not if its windows leave no room for other chunks.
        """
        return window_chunks_max(record.search_groups) < self._manager.passages.account.copy_chunks_min

    def _to_gather(self, record: RequestRecord, computed_tokens: int) -> tuple[Key, ...]:
        """Wanted chunks to gather before the answer: all of them, or the first segment of a longer hit."""
        lookup, passages = record.lookup, self._manager.passages
        if len(lookup.wanted) <= passages.hold_chunks_max:
            return lookup.wanted
        always = window_keys(record.search_groups, computed_tokens, lookup.hit_tokens)
        chunks_min = passages.account.copy_chunks_min
        return first_segment(
            lookup.wanted, always, passages.readable(lookup.wanted), chunks_min, passages.hold_chunks_max
        )

    def report_arrival(self, record: RequestRecord, tokens: int) -> None:
        """Report a request to policies with its first answer: ``tokens`` beyond the computed ones."""
        record.has_arrived = True
        if self._manager.wants_observations:
            record.arrival = arrival_of(record, tokens, sources_of_hit(record, self._manager), self.now_s)
            self._manager.observe_request(record.arrival)

    def _search(
        self,
        record: RequestRecord,
        computed_tokens: int,
        tokens_max: int,
        without: frozenset[str] = frozenset(),
        *,
        late: bool,
    ) -> Hit:
        """Search for the hit, up to the end ``tokens_max``, as if the tiers ``without`` had nothing.

        If the load cannot stream, the end is also limited to what can be gathered at once. If it is late, only chunks
        readable in the host tier count, and no tier is asked.
        """
        cap = tokens_max
        if late or not self._may_stream(record):
            chunks_max = self._manager.passages.hold_chunks_max
            cap = tokens_covered(record.search_groups, computed_tokens, tokens_max, chunks_max)
        if record.ctx.hints.max_load_tokens is not None:
            cap = min(cap, computed_tokens + record.ctx.hints.max_load_tokens)
        asked_s = self.now_s if record.lookup.since_s is None else record.lookup.since_s
        ctx = record.ctx.asked_at(asked_s)
        if without:
            ctx = self._manager.read_costs.context_without(ctx, without)
        return self._longest_hit(record, ctx, computed_tokens, cap, late=late)

    def _longest_hit(
        self, record: RequestRecord, ctx: RequestContext, computed_tokens: int, tokens_max: int, *, late: bool
    ) -> Hit:
        """Longest hit that ends at ``tokens_max`` or before; windows of a shorter one need other chunks."""
        questions = (HostQuestions if late else Questions)(self._manager, record.lookup, ctx, self.share)
        return questions.longest_hit(record.search_groups, computed_tokens, tokens_max)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _defer(self, record: RequestRecord, event: RequestEvent | None) -> int | None:
        """Answer None. Every deferred lookup passes here.

        event: the reason, if the state changes. UNKNOWN: a tier must answer first. WANTED: chunks are in flight.
        """
        if event is RequestEvent.UNKNOWN and not (record.lookup.paused or record.lookup.continued):
            self._release_passage(record)
            if record.lookup.asked_tier_s is None:
                record.lookup.asked_tier_s = self.now_s
                record.lookup.probing_s = self._manager.step.probing_s
        if event is not None:
            record.apply(event)
        self._counters.deferrals += 1
        return None

    def _miss(self, record: RequestRecord, *, late: bool) -> int:
        self._count_deadline(record, late=late)
        record.note_hit(record.computed_tokens)
        self._release_chunks(record)
        record.lookup.late_s = self.now_s if late else None
        record.apply(RequestEvent.MISSED)
        return 0

    def _offer(self, record: RequestRecord, tokens: int, *, late: bool) -> int:
        self._count_deadline(record, late=late)
        record.apply(RequestEvent.ANSWERED)
        self._manager.passages.promise(record.ctx.request_id)
        record.lookup.hit_tokens = tokens
        record.note_hit(record.computed_tokens + tokens)
        return tokens

    def _count_deadline(self, record: RequestRecord, *, late: bool) -> None:
        self._counters.deadlines_expired += late and record.state in _DEFERRED

    def _offer_held_part(self, record: RequestRecord, computed_tokens: int, tokens: int, passage: Passage) -> int:
        """Offer the readable chunks that the passage holds: the lookup is late."""
        granted = passage.granted_ready()

        def held(key: Key) -> LookupResult:
            return LookupResult.HIT if key in granted else LookupResult.MISS

        hit = find_hit(record.search_groups, computed_tokens, computed_tokens + tokens, held)
        if not hit.tokens:
            return self._miss(record, late=True)
        wanted = wanted_keys(record.search_groups, computed_tokens, hit.tokens)
        record.lookup.wanted = record.lookup.gathered = wanted
        self._manager.passages.shrink(record.ctx.request_id, wanted)
        return self._offer(record, hit.tokens, late=True)

    # -- time spent waiting for tiers --------------------------------------------------------------------------------

    def _note_tier_answered(self, record: RequestRecord) -> None:
        """Count the time for which a tier was asked: until its answer, or until now if there was none."""
        lookup, manager = record.lookup, self._manager
        if lookup.asked_tier_s is not None:
            last = next(reversed(lookup.known), None)  # not an answer to others, after its own
            answered_s = manager.step.probed_s if last is None else manager.tiers.answered_s(last)
            ended_s = answered_s if answered_s >= lookup.asked_tier_s else self.now_s
            # A read for another request renews the answer, perhaps long after it was given.
            lookup.tier_s += min(ended_s - lookup.asked_tier_s, manager.step.probing_s - lookup.probing_s)
            lookup.asked_tier_s = None

    def take_tier_s(self, record: RequestRecord) -> float:
        """Seconds since the previous call in which a tier was asked, or chunks were read, for the request."""
        self._note_tier_answered(record)
        lookup = record.lookup
        taken = lookup.tier_s + self._manager.passages.take_reading_s(record.ctx.request_id)
        lookup.tier_s = 0.0
        return taken

    # -- ends --------------------------------------------------------------------------------------------------------

    def close_lookup(self, record: RequestRecord) -> None:
        """End the lookup (allocated, missed, lapsed or finished). Releases no chunks."""
        self._open.pop(record.ctx.request_id, None)
        self._to_reopen.pop(record.ctx.request_id, None)
        record.lookup.late_s = None
        record.lookup.close()

    def _release_passage(self, record: RequestRecord) -> None:
        request_id = record.ctx.request_id
        record.lookup.tier_s += self._manager.passages.take_reading_s(request_id)
        self._manager.passages.release(request_id)

    def _release_chunks(self, record: RequestRecord) -> None:
        """Release the request's chunks and close its lookup."""
        self._note_tier_answered(record)
        self._release_passage(record)
        self.close_lookup(record)

    def begin_step(self, now_s: float) -> None:
        """Set the time, and reopen lookups that a reset ended, within the budget.

        While slots are short, a lookup that the engine has not repeated gives up the chunks that it holds, once the
        engine has asked about others for the deadline. They stay in the host tier until others need the slots.
        """
        self.now_s = now_s
        self._turns.begin_step()
        while self._to_reopen and self.share.take(1):
            self._lapse(next(iter(self._to_reopen.values())))
        while self._open and self._manager.passages.is_short:
            record = next(iter(self._open.values()))
            if self._asked_s - record.lookup.last_asked_s < self._deadline_s or not self.share.take(1):
                return  # a look takes nothing: a small share is for the questions of this step
            self._lapse(record)

    def refresh(self, record: RequestRecord) -> None:
        """End the lookup of the request if the cache was reset since it was asked."""
        if record.ctx.request_id in self._to_reopen:
            self._lapse(record)

    def _lapse(self, record: RequestRecord) -> None:
        self._release_chunks(record)
        record.apply(RequestEvent.LAPSED)

    def reset(self) -> None:
        """Reopen every lookup after a reset of the cache; later steps do it for most of them."""
        self._loads.clear()
        if self._to_reopen:
            self._open = OrderedDict(chain(self._to_reopen.items(), self._open.items()))
        self._to_reopen, self._open = self._open, OrderedDict()
