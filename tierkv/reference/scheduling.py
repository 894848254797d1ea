"""Scheduling of a step: continuous batching, chunked prefill, preemption, and requests that wait for loads.

The oldest request always progresses: running requests are scheduled by age, and one that lacks blocks preempts the
youngest. A request never preempts an older one, nor itself: it stalls until blocks are free. No request is admitted in
a step with a preemption or a stall, so freed blocks go to the requests that lack them.

A request whose prefix is being loaded counts against ``max_running`` and holds its blocks: no other request can take
them while the load writes there. Used on the engine's thread.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping

from tierkv.errors import EngineProtocolError
from tierkv.reference.block_tables import TableKeeper
from tierkv.reference.connector import KVConnector
from tierkv.reference.request import Request, RequestState
from tierkv.types.engine import LoadReport, ScheduledRequest, StepOutput


class Scheduler:
    """Queues of requests, and the decision of each step."""

    def __init__(
        self,
        keeper: TableKeeper,
        connector: KVConnector | None,
        *,
        block_tokens: int,
        max_batched_tokens: int,
        max_running: int,
    ) -> None:
        self._keeper = keeper
        self._connector = connector
        self._block_tokens = block_tokens
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """Oldest first."""
        self._loading: dict[str, Request] = {}
        self._orphans: dict[str, Request] = {}
        """Aborted during a load; they hold their blocks until the load has ended."""
        self._finished_since_step: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing."""
        return len(self._waiting)

    @property
    def num_loading(self) -> int:
        """Requests that wait for a load."""
        return len(self._loading)

    @property
    def num_running(self) -> int:
        """Requests that are computed."""
        return len(self._running)

    @property
    def has_loose_ends(self) -> bool:
        """Whether finished or aborted requests need a further step: to be reported, or to free their blocks."""
        return bool(self._finished_since_step or self._orphans)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._waiting.append(request)
        if self._connector is not None:
            self._connector.on_new_request(request)

    def schedule(self) -> tuple[StepOutput, list[Request]]:
        """Decide a step. Returns the connector's view of it, and the scheduled requests in the same order."""
        scheduled: list[tuple[Request, int]] = []
        budget, preempted, stalled = self._schedule_running(scheduled)
        if not preempted and not stalled:
            self._admit(scheduled, budget)
        finished = frozenset(self._finished_since_step)
        self._finished_since_step.clear()
        entries = tuple(self._entry(request, count) for request, count in scheduled)
        return StepOutput(entries, frozenset(preempted), finished), [request for request, _ in scheduled]

    def commit(self, step: StepOutput, tokens: Mapping[str, int]) -> list[Request]:
        """Take in a forward pass; ``tokens`` has a new token for each request that was computed to its end.

        Returns:
            The requests that are complete now.
        """
        done = []
        by_id = {request.request_id: request for request in self._running}
        for entry in step.scheduled:
            request = by_id[entry.request_id]
            request.num_computed_tokens += entry.num_scheduled_tokens
            request.record.tokens_computed += entry.num_scheduled_tokens
            self._keeper.register_computed(request, request.num_computed_tokens)
            if request.request_id in tokens:
                request.append(tokens[request.request_id])
            if request.is_complete:
                self._running.remove(request)
                self._finish(request)
                self._keeper.close(request)
                done.append(request)
        return done

    def end_loads(self, report: LoadReport) -> None:
        """Resume requests whose load has ended, from the first block without valid data."""
        for request_id in report.finished:
            orphan = self._orphans.pop(request_id, None)
            if orphan is not None:
                self._keeper.close(orphan)
            request = self._loading.pop(request_id, None)
            if request is not None:
                self._end_load(request, report.invalid_block_ids)

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is; a finished one stays as it is."""
        match request.state:
            case RequestState.FINISHED:
                return
            case RequestState.WAITING:
                self._waiting.remove(request)
                self._finish(request)
            case RequestState.RUNNING:
                self._running.remove(request)
                self._finish(request)
                self._keeper.close(request)
            case RequestState.LOADING:
                del self._loading[request.request_id]
                self._finish(request)
                self._orphans[request.request_id] = request

    def _schedule_running(self, scheduled: list[tuple[Request, int]]) -> tuple[int, set[str], bool]:
        """Returns the remaining budget, the ids of preempted requests, and whether a request stalls."""
        budget = self._max_batched_tokens
        preempted: set[str] = set()
        for request in list(self._running):
            if budget == 0:
                break
            if request.state is not RequestState.RUNNING:
                continue
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            self._keeper.free_passed(request)
            if not self._make_room(request, request.num_computed_tokens + count, preempted):
                return budget, preempted, True
            budget -= count
            scheduled.append((request, count))
        return budget, preempted, False

    def _make_room(self, request: Request, num_tokens: int, preempted: set[str]) -> bool:
        while not self._keeper.extend(request, num_tokens):
            youngest = self._running[-1]
            if youngest is request:
                return False
            self._preempt(youngest)
            preempted.add(youngest.request_id)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._keeper.close(request)
        request.blocks_reported = 0
        request.num_computed_tokens = 0
        request.record.preemptions += 1
        request.become(RequestState.WAITING)
        self._waiting.appendleft(request)

    def _admit(self, scheduled: list[tuple[Request, int]], budget: int) -> None:
        """Admit waiting requests in order; deferred ones keep their position."""
        deferred: list[Request] = []
        while self._waiting and budget and len(self._running) + len(self._loading) < self._max_running:
            request = self._waiting.popleft()
            prefix = self._keeper.find_prefix(request)
            local = len(prefix[0]) * self._block_tokens
            external = self._ask_connector(request, local)
            if external is None:
                request.record.deferrals += 1
                deferred.append(request)
                continue
            count = 0 if external else min(budget, request.num_tokens - local)
            if not self._keeper.open(request, prefix, local + external, local + external + count):
                self._waiting.appendleft(request)
                break
            request.num_computed_tokens = local
            request.record.tokens_cached += local
            if self._connector is not None:
                self._connector.update_state_after_alloc(request, request.tables, external)
            if external:
                self._start_load(request, local + external)
            else:
                self._start_running(request)
                scheduled.append((request, count))
                budget -= count
        self._waiting.extendleft(reversed(deferred))

    def _ask_connector(self, request: Request, local: int) -> int | None:
        if self._connector is None:
            return 0
        external, _ = self._connector.get_num_new_matched_tokens(request, local)
        if external is not None and not 0 <= external <= request.num_tokens - local:
            raise EngineProtocolError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, {local} of them local, and the "
                f"connector offered {external} more"
            )
        return external

    def _start_load(self, request: Request, num_tokens: int) -> None:
        request.load_end_tokens = num_tokens
        request.become(RequestState.LOADING)
        self._loading[request.request_id] = request

    def _start_running(self, request: Request) -> None:
        request.become(RequestState.RUNNING)
        insort(self._running, request, key=lambda r: r.record.index)

    def _end_load(self, request: Request, invalid: frozenset[int]) -> None:
        before = request.num_computed_tokens
        for table in request.tables:
            local = {block.block_id for block in table[: before // self._block_tokens] if not block.is_null}
            if local & invalid:
                raise EngineProtocolError(
                    f"the connector reported blocks {sorted(local & invalid)} of request {request.request_id!r} as "
                    f"invalid that it did not load: {before} tokens were local"
                )
        valid = self._keeper.usable_tokens(request, request.load_end_tokens, invalid)
        # Later tokens are computed again, into new blocks: windows may have none there.
        self._keeper.truncate(request, valid)
        self._keeper.register_computed(request, valid)
        # The model must run on the last token to give the next one, so that token is computed even if it was loaded.
        request.num_computed_tokens = min(valid, request.num_tokens - 1)
        request.record.tokens_loaded += max(0, request.num_computed_tokens - before)
        request.record.tokens_cached -= max(0, before - request.num_computed_tokens)
        self._start_running(request)

    def _finish(self, request: Request) -> None:
        request.become(RequestState.FINISHED)
        self._finished_since_step.add(request.request_id)
        if self._connector is None:
            return
        hold, _ = self._connector.request_finished(request, request.block_ids)
        if hold:
            raise EngineProtocolError(
                f"the connector wants to keep the blocks of finished request {request.request_id!r}; this engine "
                "frees them at once, and the connector must flush whatever still reads them"
            )

    def _entry(self, request: Request, count: int) -> ScheduledRequest:
        reported = request.blocks_reported
        request.blocks_reported = len(request.tables[0])
        return ScheduledRequest(
            request_id=request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_scheduled_tokens=count,
            block_ids=tuple(ids[reported:] for ids in request.block_ids),
            replaces_table=reported == 0,
        )
