"""The scheduler's side of the connector: an open stack, driven by vLLM's scheduler. Needs no vLLM itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.connector.requests import is_served, view_of
from tierkv.integrations.vllm.connector.steps import step_output
from tierkv.stack.remote_worker import WorkerSetup
from tierkv.stack.stack import Stack
from tierkv.types.engine import BlockTables, LoadReport, StepOutput
from tierkv.types.transfers import ConnectorMeta, WorkerOutput
from tierkv.worker.worker import Worker

_log = logging.getLogger(__name__)

LAST_STEPS_MAX = 1000
"""Steps that a closing engine is given for what its requests have left; each ends what the one before has begun."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """A step's message to the workers; fields as in :class:`~tierkv.integrations.vllm.connector.meta.StepMeta`."""

    meta: ConnectorMeta
    setup: WorkerSetup | None
    voided: frozenset[str]


class ConnectorScheduler:
    """All methods belong to the thread of vLLM's scheduler. The stack is closed by :meth:`shutdown`."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._requests: dict[str, Any] = {}
        self._loading: set[str] = set()
        self._overtaken: set[str] = set()  # loading when the cache was reset: what comes is of the past
        self._voided: set[str] = set()
        self._to_begin = stack.geometry.num_workers
        self._sources: dict[str, dict[str, int]] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - vLLM's Request, which has no types here
        """A request has arrived."""
        if is_served(request):
            self._requests[request.request_id] = request
            self.stack.on_new_request(view_of(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - (the same)
        """How many tokens beyond the engine's own can be loaded; None: ask again."""
        if request.request_id not in self._requests or request.skip_reading_prefix_cache:
            return 0, False
        return self.stack.get_num_new_matched_tokens(view_of(request), num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: BlockTables, num_external_tokens: int) -> None:  # noqa: ANN401 - (the same)
        """Blocks were allocated: start the load of ``num_external_tokens``, if any."""
        if request.request_id not in self._requests:
            return
        before = self._loaded_tokens(request.request_id) if num_external_tokens else {}
        try:
            self.stack.update_state_after_alloc(view_of(request), blocks, num_external_tokens)
        except EngineProtocolError as error:
            if not num_external_tokens:
                raise
            # vLLM waits for this load now. It is told in the next step that it has failed, and computes.
            _log.exception("request %s is computed instead of loaded: %s", request.request_id, error)
            self._voided.add(request.request_id)
            return
        if num_external_tokens:
            self._loading.add(request.request_id)
            after = self._loaded_tokens(request.request_id)
            self._sources = {request.request_id: {tier: n - before.get(tier, 0) for tier, n in after.items()}}

    def loaded_by_tier(self, request_id: str) -> Mapping[str, int]:
        """Tokens of the load that was started last, by the tier whose bytes it takes; empty for any other request."""
        return {tier: tokens for tier, tokens in self._sources.get(request_id, {}).items() if tokens}

    def _loaded_tokens(self, request_id: str) -> dict[str, int]:
        account = self.stack.request_account(request_id)
        return {} if account is None else dict(account.loaded_tokens)

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> None:  # noqa: ANN401 - (the same)
        """A request ended; its blocks may be reused at once: what still reads them is flushed before."""
        if self._requests.pop(request.request_id, None) is not None:
            self.stack.request_finished(view_of(request), block_ids)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def build(self, output: Any) -> Instructions:  # noqa: ANN401 - vLLM's SchedulerOutput, which has no types here
        """The step's instructions to the workers. Exactly once per step, after scheduling."""
        step = step_output(output, len(self.stack.geometry.groups), self._in_flight_tokens)
        return self._instructions(self.stack.build_connector_meta(step))

    def _instructions(self, meta: ConnectorMeta) -> Instructions:
        voided, self._voided = frozenset(self._voided), set()
        return Instructions(meta, self.stack.worker_setup(0) if self._to_begin else None, voided)

    def _in_flight_tokens(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        return 0 if request is None else int(request.num_in_flight_tokens)

    def take_in(self, output: WorkerOutput, begun: int, told: set[str] | None) -> None:
        """What the workers reported.

        Args:
            output: the jobs that they ended.
            begun: workers that tell for the first time that they have their setup.
            told: requests whose load they tell vLLM has ended; those whose data is of the past are taken out, and told
                again, as failed, by a later step.
        """
        self._to_begin -= begun
        report = self.stack.update_connector_output(output)
        if report.finished:
            self._loading -= report.finished
            self._void(report, told)

    def _void(self, report: LoadReport, told: set[str] | None) -> None:
        for request_id in report.finished & self._overtaken:
            self._overtaken.discard(request_id)
            if told is not None and request_id in told:
                told.discard(request_id)
                self._voided.add(request_id)

    # -- the whole cache -----------------------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Empty the host tier. Loads under way will be told as failed. False: not now, a step is being scheduled."""
        try:
            self.stack.reset_cache()
        except EngineProtocolError as error:
            _log.warning("the cache was not reset: %s", error)
            return False
        self._overtaken |= self._loading
        return True

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping, with empty steps if there is nothing to compute.

        So a server's workers have mapped, and on a GPU pinned, the host tier before its first request comes.
        """
        pending = self.stack.has_pending_work() or self.stack.tiers.has_waiting_writes()
        return self._to_begin > 0 or bool(self._voided) or pending

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, and nothing under way: the engine may take no step for long."""
        return not self._requests and not self.has_pending_work

    def take_last_steps(self, worker: Worker) -> None:
        """Lead what is left to its end, with the only worker, which lives in this process and gets no step any more."""
        for _ in range(LAST_STEPS_MAX):
            meta = self.stack.build_connector_meta(StepOutput())
            worker.start_step(meta)
            worker.queue_stores(meta)
            worker.drain()
            self.stack.update_connector_output(worker.get_finished())
            if not self.stack.has_pending_work():
                break

    def shutdown(self) -> None:
        """Bring down what was stored, then close the stack. Idempotent."""
        if not self.stack.close():
            _log.warning("tierkv was closed before all that was stored had reached its tiers")
