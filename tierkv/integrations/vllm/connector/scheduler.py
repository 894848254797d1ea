"""Scheduler's side of the connector: an open stack, driven by vLLM's scheduler. Does not import vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.connector.requests import is_served, view_of
from tierkv.integrations.vllm.connector.steps import blocks_only, step_output
from tierkv.integrations.vllm.identity.adapters import Adapters
from tierkv.integrations.vllm.refusals import Refusals
from tierkv.integrations.vllm.resets import reset_stack, weights_since_reset
from tierkv.manager.contract import ResetScope
from tierkv.stack.remote_worker import ProcessWorker, WorkerSetup
from tierkv.stack.stack import Stack
from tierkv.types.engine import BlockTables, LoadReport, Request, StepOutput
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

_log = logging.getLogger(__name__)

LAST_STEPS_MAX = 1000
"""Largest number of steps to end the remaining transfers of a closing engine. Each ends those of the previous."""


_NO_TRANSFERS = ConnectorMeta()


@dataclass(frozen=True, slots=True)
class Instructions:
    """Message of a step to the workers, with the fields of :class:`.meta.StepMeta`."""

    meta: ConnectorMeta = _NO_TRANSFERS
    setup: WorkerSetup | None = None
    failed_loads: frozenset[str] = frozenset()
    stops: bool = False


NO_INSTRUCTIONS = Instructions()
"""Message of a step without any; one object, because most steps have none."""


class ConnectorScheduler:
    """Stack behind vLLM's scheduler. All methods belong to its thread. :meth:`shutdown` closes the stack.

    Args:
        stack: an open stack.
        reset_scope: tiers that a reset empties.
        view: what the stack gets of a request.
    """

    def __init__(self, stack: Stack, reset_scope: ResetScope = "all", view: Callable[..., Request] = view_of) -> None:
        self.stack = stack
        self._view = view
        self._reset_scope = reset_scope
        self._requests: dict[str, Any] = {}
        self._loading: set[str] = set()
        self._refusals = Refusals()
        self._adapters = Adapters()
        self._weights = ""  # since a reset: those in memory
        self._stale_loads: set[str] = set()  # in flight when the cache was reset, or when their request was dropped
        self._failed_loads: set[str] = set()
        self._short_loads: set[str] = set()  # ended, perhaps with refused chunks, and not scheduled since
        self._offers = 0  # of this step that vLLM has not taken
        self._is_stalled = False
        self._num_groups = len(stack.geometry.groups)
        self._workers_to_start = stack.geometry.num_workers
        self._sources: dict[str, dict[str, int]] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - vLLM's Request, which has no types here
        """Register a new request."""
        adapter = "" if request.lora_request is None else self._adapters.digest_of(request.lora_request)
        if is_served(request) and adapter is not None:
            self._requests[request.request_id] = request
            try:
                self.stack.on_new_request(self._view(request, adapter + self._weights))
            except EngineProtocolError as error:
                self.drop(request.request_id, error)

    def drop(self, request_id: str, error: Exception) -> None:
        """Go on without tierkv for a request whose call was refused, or failed."""
        self._refusals.log(error)
        if self._requests.pop(request_id, None) is not None:
            if request_id in self._loading:  # vLLM waits for this load. What arrives of it does not count.
                self._stale_loads.add(request_id)
            self.stack.drop_request(request_id)
        elif not isinstance(error, EngineProtocolError):  # it failed before it was registered here
            self.stack.metrics.counters.requests_dropped += 1

    @property
    def stale_loads(self) -> frozenset[str]:
        """Requests whose load was in flight at a reset."""
        return frozenset(self._stale_loads)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - (the same)
        """Return the number of tokens beyond the engine's own that can be loaded; None: ask again."""
        if request.request_id not in self._requests or request.skip_reading_prefix_cache or self._is_stalled:
            return 0, False
        try:
            if num_computed_tokens and request.lora_request is not None:
                self._adapters.check_own_hit(request.lora_request)
            answer = self.stack.get_num_new_matched_tokens(self._view(request), num_computed_tokens)
        except EngineProtocolError as error:
            self.drop(request.request_id, error)
            return 0, False
        self._offers += bool(answer[0])
        return answer

    def update_state_after_alloc(self, request: Any, blocks: BlockTables, num_external_tokens: int) -> None:  # noqa: ANN401 - (the same)
        """Start the load of ``num_external_tokens`` tokens, if any, after blocks were allocated."""
        self._offers -= bool(num_external_tokens)
        if request.request_id not in self._requests:
            return
        before = self._loaded_tokens(request.request_id) if num_external_tokens else {}
        try:
            self.stack.update_state_after_alloc(self._view(request), blocks, num_external_tokens)
        except EngineProtocolError as error:
            self.drop(request.request_id, error)
            if num_external_tokens:  # vLLM waits for this load now. The next step reports it as failed.
                self._failed_loads.add(request.request_id)
                self._short_loads.add(request.request_id)
            return
        if num_external_tokens:
            self._loading.add(request.request_id)
            after = self._loaded_tokens(request.request_id)
            self._sources = {request.request_id: {tier: n - before.get(tier, 0) for tier, n in after.items()}}

    def loaded_by_tier(self, request_id: str) -> Mapping[str, int]:
        """Tokens of the most recent load by the tier whose bytes it reads; empty for other requests."""
        return {tier: tokens for tier, tokens in self._sources.get(request_id, {}).items() if tokens}

    def _loaded_tokens(self, request_id: str) -> dict[str, int]:
        account = self.stack.request_account(request_id)
        return {} if account is None else dict(account.loaded_tokens)

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> None:  # noqa: ANN401 - (the same)
        """End a request. Its blocks may be reused at once, because transfers that read them are flushed before."""
        self._short_loads.discard(request.request_id)
        if request.lora_request is not None and request.num_computed_tokens:
            self._adapters.note_served(request.lora_request)
        if self._requests.pop(request.request_id, None) is not None:
            try:
                self.stack.request_finished(self._view(request), block_ids)
            except EngineProtocolError as error:
                self._refusals.log(error)
                self.stack.drop_request(request.request_id)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def build(self, output: Any) -> Instructions:  # noqa: ANN401 - vLLM's SchedulerOutput, which has no types here
        """Build the step's instructions to the workers. To be called exactly once per step, after scheduling."""
        if self._short_loads:
            self._correct_cached_tokens(output.scheduled_new_reqs)
        self._note_stall(output)
        step = step_output(output, self._num_groups, self._in_flight_tokens, self.stack.advance)
        meta = self._build(step)
        if not (meta.loads or meta.stores or meta.jobs_to_flush or self._workers_to_start or self._failed_loads):
            return NO_INSTRUCTIONS
        failed_loads, self._failed_loads = frozenset(self._failed_loads), set()
        return Instructions(meta, self.stack.worker_setup(0) if self._workers_to_start else None, failed_loads)

    def _note_stall(self, output: Any) -> None:  # noqa: ANN401 - (the same)
        """Offer no loads in the next step if none can begin.

        vLLM reserves the blocks of a prompt whose load failed until it has computed the prompt, and begins no load with
        less than these free. If such prompts need all blocks, it would take no offer ever again, and compute none.
        """
        idle = bool(self._short_loads) and not output.num_scheduled_tokens and not self._loading
        self._is_stalled, self._offers = idle and self._offers > 0, 0

    def _correct_cached_tokens(self, scheduled: Iterable[Any]) -> None:
        """Take refused tokens off the cached ones that vLLM will report to the client of a request.

        vLLM fills ``prefill_stats`` when the load begins, and leaves it as it is when a part of the load fails.
        """
        for new in scheduled:
            if new.req_id in self._short_loads:
                self._short_loads.discard(new.req_id)
                request = self._requests.get(new.req_id)
                if request is None or request.prefill_stats is None:
                    continue
                stats = request.prefill_stats
                offered = stats.num_external_cached_tokens
                lost = min(stats.num_cached_tokens - new.num_computed_tokens, offered)
                if lost > 0:
                    stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, offered - lost)

    def _build(self, step: StepOutput) -> ConnectorMeta:
        """Build the instructions. A refused request is dropped, and the step is built with the others."""
        refused: set[str] = set()
        while True:
            try:
                return self.stack.build_connector_meta(step)
            except EngineProtocolError as error:
                request_id = error.request_id
                if request_id is None or request_id in refused:
                    raise  # it is about no request, or about one that is left with its blocks only
                refused.add(request_id)
                self.drop(request_id, error)
                step = replace(step, scheduled=blocks_only(step.scheduled, request_id, self._num_groups))

    def _in_flight_tokens(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        return 0 if request is None else int(request.num_in_flight_tokens)

    def process_output(self, output: WorkerOutput, started_workers: int, reported: set[str] | None) -> None:
        """Process the reports of the workers.

        Args:
            output: jobs that the workers ended.
            started_workers: number of workers that report for the first time that they have their setup.
            reported: requests whose load is reported to vLLM as ended, or None. Loads with stale data are removed, and
                reported as failed by a later step.
        """
        if not (output.finished or started_workers):
            return
        self._workers_to_start -= started_workers
        try:
            report = self.stack.update_connector_output(output)
        except EngineProtocolError as error:
            self._refusals.log(error)
            return
        if report.finished:
            self._loading -= report.finished
            if report.invalid_block_ids:
                self._short_loads |= report.finished
            self._report_as_failed(report, reported)

    def _report_as_failed(self, report: LoadReport, reported: set[str] | None) -> None:
        for request_id in report.finished & self._stale_loads:
            self._stale_loads.discard(request_id)
            if reported is not None and request_id in reported:
                reported.discard(request_id)
                self._failed_loads.add(request_id)
                self._short_loads.add(request_id)

    # -- the whole cache -----------------------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Empty the tiers that the option names; loads in flight will fail. False while a step is being scheduled.

        If all tiers are emptied, the weights may be new, and chunks get other keys. Requests from before go on without
        tierkv: running ones have KV of the old weights, and all have keys of these.
        """
        try:
            reset_stack(self.stack, self._reset_scope)
        except EngineProtocolError as error:
            _log.warning("the cache was not reset: %s", error)
            return False
        self._stale_loads |= self._loading
        if self._reset_scope == "all":
            self._weights = weights_since_reset()
            for name in [*self._requests]:
                del self._requests[name]
                self.stack.drop_request(name)
        return True

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must run further steps, also without requests.

        True until all workers have started. So they have mapped the host tier, and pinned it on a GPU, before the first
        request arrives.
        """
        pending = self.stack.has_pending_work() or self.stack.tiers.has_waiting_writes()
        return self._workers_to_start > 0 or bool(self._failed_loads) or pending

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and no transfer in flight, so that the next step may be late."""
        return not self._requests and not self.has_pending_work

    def run_last_steps(self, worker: ProcessWorker) -> None:
        """End the remaining transfers with the only worker, which is in this process and gets no further steps."""
        for _ in range(LAST_STEPS_MAX):
            meta = self.stack.build_connector_meta(StepOutput())
            worker.start_step(meta)
            worker.queue_stores(meta)
            worker.drain()
            self.stack.update_connector_output(worker.get_finished())
            if not self.stack.has_pending_work():
                break

    def shutdown(self) -> None:
        """Write stored chunks to the lower tiers, then close the stack. Idempotent."""
        if not self.stack.close():
            _log.warning("tierkv was closed before all stored chunks were written to their tiers")
