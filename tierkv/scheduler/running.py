"""Requests of a step: those that only count tokens, and those whose tables and chunks the step changes. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tierkv.errors import EngineProtocolError, wrong_value
from tierkv.scheduler.jobs.block_tables import RequestTables
from tierkv.scheduler.lookup.prefill_rate import PrefillRate
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.scheduler.requests.rules import check_hashes, refused
from tierkv.scheduler.store.plans import StorePlan
from tierkv.scheduler.store.stores import Stores
from tierkv.types.engine import ScheduledRequest, StepOutput

DECODED_TOKENS_MAX = 64
"""Tokens that a request decodes in one step at most, drafts included. One that gets more computes its prompt."""

_STEP = "build_connector_meta: give a StepOutput of ScheduledRequest entries and of ids"

_ANY = 1 << 62
"""More tokens than any request has."""


class RunningRequests:
    """Applies what an engine has scheduled. Shares records, tables, stores and the store plan with the scheduler.

    Most steps of most requests compute a token, bring no block and complete no chunk. Such a step is *quiet*: it costs
    one comparison, and the engine may leave the request out of the step.

    Attributes:
        resets: number of resets of the cache. A request's chunks are offered again at the first call after one.
        rests: whether the latest step leaves the tiers alone, so that chunks of requests that decode may wait.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the scheduler hands in its parts
        self,
        records: Mapping[str, RequestRecord],
        tables: RequestTables,
        stores: Stores,
        plan: StorePlan,
        prefill: PrefillRate,
        start: Callable[[RequestRecord, int], None],
    ) -> None:
        self._records = records
        self._tables = tables
        self._stores = stores
        self._plan = plan
        self._prefill = prefill
        self._start = start
        self.resets = 0
        self.rests = False
        self._advanced = False  # since the previous step was built

    def advance(self, request_id: str, num_computed_tokens: int, num_scheduled_tokens: int) -> bool:
        """Count the tokens that a running request computes in this step, if the step does nothing else for it.

        To be called before ``build_connector_meta``, for a request that gets no block.

        Returns:
            True: leave the request out of the step. False: nothing was counted, and the request belongs in the step.

        Raises:
            EngineProtocolError: the id is none, or a number of tokens no whole number.
        """
        try:
            records, tokens = self._records, num_computed_tokens + num_scheduled_tokens
            if request_id not in records:  # "in" is no call, and get() is one per request
                return False
        except TypeError as error:
            raise EngineProtocolError(f"advance: {error}: give an id and two numbers of tokens") from error
        if tokens.__class__ is not int and not hasattr(tokens, "__index__"):
            raise wrong_value("advance", "tokens", tokens, "give whole numbers")
        record = records[request_id]
        is_quiet = tokens < record.quiet_tokens and record.resets == self.resets
        if not is_quiet and not (self.rests and self._hold(record, tokens)):
            return False
        record.computed_tokens = tokens
        record.unconfirmed_tokens = num_scheduled_tokens
        self._advanced = True
        return True

    def decodes(self, step: StepOutput) -> bool:
        """Whether this step, as far as its numbers show, only decodes. To be asked once per step.

        Raises:
            EngineProtocolError: the step is of a wrong form.
        """
        advanced, self._advanced = self._advanced, False
        try:
            for entry in step.scheduled:
                if entry.num_scheduled_tokens > DECODED_TOKENS_MAX:
                    return False
        except (AttributeError, TypeError) as error:
            raise EngineProtocolError(f"{_STEP}: {error}") from error
        return not step.preempted and (advanced or bool(step.scheduled))

    def may_rest(self) -> bool:
        """Whether requests run, and none waits for a tier, for a load, or for the report of its last store."""
        if self._prefill.is_measuring:  # by the time until the next step
            return False
        runs = False
        for record in self._records.values():
            if record.state is RequestState.RUNNING:
                runs = True
            elif record.state is not RequestState.FINISHED or record.held_for_stores:
                return False
        return runs

    def is_idle(self) -> bool:
        """Whether all requests have finished."""
        for record in self._records.values():  # noqa: SIM110 - asked in every step: all() makes a generator
            if record.state is not RequestState.FINISHED:
                return False
        return True

    def check(self, scheduled: Sequence[ScheduledRequest], preempted: Collection[str]) -> None:
        """Check all entries of a step, before anything changes.

        Raises:
            EngineProtocolError: an entry breaks a rule; names request and rule.
        """
        try:
            self._check(scheduled, preempted)
        except (AttributeError, TypeError) as error:
            raise EngineProtocolError(f"{_STEP}: {error}") from error

    def _check(self, scheduled: Sequence[ScheduledRequest], preempted: Collection[str]) -> None:
        # A text would be ids of one letter, and an iterator would be used up by the check.
        if type(preempted) is not frozenset and (isinstance(preempted, str) or not isinstance(preempted, Collection)):
            raise TypeError(f"preempted is {preempted!r:.80}: give a set of ids")
        if not all(isinstance(request_id, str) for request_id in preempted):
            raise TypeError("an id of a preempted request is no text")
        names: set[str] = set()
        for entry in scheduled:
            if entry.request_id in names:
                raise refused(entry.request_id, " was scheduled twice in one step: give one entry per request")
            names.add(entry.request_id)
            self._tables.check_numbers(entry)
            record = self._record_of(entry)
            if record is None:
                continue
            if record.state is RequestState.LOADING:
                raise refused(entry.request_id, " was scheduled before its load had ended")
            self._tables.check_table(record, entry, is_preempted=entry.request_id in preempted)
            check_hashes(record)

    def _hold(self, record: RequestRecord, tokens: int) -> bool:
        """Whether the chunks that a decoding request has completed with ``tokens`` can wait for the end of the rest."""
        if not record.quiet_tokens or record.resets != self.resets or record.was_offered(tokens):
            return False  # the last is usual: the step only brings a block
        room = self._tables.room_tokens(record)
        if room is None or tokens > room or self._stores.due_tokens(record) is None or not self._plan.hold(record):
            return False
        record.quiet_tokens = room + 1
        return True

    def apply(self, scheduled: Sequence[ScheduledRequest]) -> set[int]:
        """Update the tables of all entries, and offer chunks. Returns the jobs that must end before the step writes."""
        jobs: set[int] = set()
        changed = []
        # All tables first: a block that one request is given may still be in the table of another one.
        for entry in scheduled:
            record = self._record_of(entry)
            if record is None:  # it is not ours, but it writes to the GPU
                jobs |= self._tables.overwrite_blocks(self._tables.written_ids(entry))
            elif not self._is_quiet(entry):
                jobs |= self._update(record, entry)
                changed.append((record, entry))
        for record, entry in changed:
            if not (self.rests and self._hold(record, record.computed_tokens)):
                self._plan.on_scheduled(record, entry)
                record.quiet_tokens = self._quiet_tokens(record)
        return jobs

    def _record_of(self, entry: ScheduledRequest) -> RequestRecord | None:
        record = self._records.get(entry.request_id)
        return None if record is None or record.state is RequestState.FINISHED else record

    def _is_quiet(self, entry: ScheduledRequest) -> bool:
        if entry.replaces_table or any(entry.block_ids):
            return False
        return self.advance(entry.request_id, entry.num_computed_tokens, entry.num_scheduled_tokens)

    def _update(self, record: RequestRecord, entry: ScheduledRequest) -> set[int]:
        record.note_resets(self.resets)
        if record.state is not RequestState.RUNNING:
            self._start(record, entry.num_computed_tokens)
        tokens = entry.num_computed_tokens + entry.num_scheduled_tokens
        if entry.num_computed_tokens < record.request.num_prompt_tokens:
            self._prefill.step_computes(entry.num_scheduled_tokens)
        if record.prefill_tokens:
            self._prefill.expect(record, max(0, record.request.num_prompt_tokens - tokens))
        jobs = self._tables.update_table(record, entry)
        record.computed_tokens = tokens
        return jobs

    def _quiet_tokens(self, record: RequestRecord) -> int:
        """Tokens from which a step does more for the request than to count its tokens."""
        if record.computed_tokens < record.request.num_prompt_tokens:
            return 0
        room, due = self._tables.room_tokens(record), self._stores.due_tokens(record)
        room = _ANY if room is None else room + 1
        if due is None:
            return room
        return min(room, due) if due > record.computed_tokens else 0  # 0: it found no room, and is offered again
