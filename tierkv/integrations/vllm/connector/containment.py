"""Both sides of the connector, with errors of tierkv kept from vLLM. Does not import vLLM.

An error of a call about one request drops that request: vLLM goes on without tierkv for it. After any other error the
state of the stack is unknown, and tierkv *stops*: from then on it offers and stores nothing, and vLLM goes on without
it.

What keeps tokens right at a stop: no transfer is completed from then on, so nothing half stored becomes readable. The
workers wait for their copies, and report every load that they know as failed. The scheduler's side has those reported
as failed that no worker knows. Each load is reported once, because vLLM accepts a report only while it waits.

With ``TIERKV_VALIDATE=1``, errors are raised instead, so that tests and debuggers see them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.integrations.vllm.connector.scheduler import NO_INSTRUCTIONS, ConnectorScheduler, Instructions
from tierkv.integrations.vllm.connector.worker import ConnectorWorker, LoadResults
from tierkv.integrations.vllm.refusals import Containment
from tierkv.stack.remote_worker import ProcessWorker, WorkerSetup
from tierkv.types.engine import BlockTables
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

_log = logging.getLogger(__name__)


class ContainedScheduler:
    """Scheduler's side that raises nothing after its start. All methods belong to the scheduler's thread.

    Args:
        inner: the scheduler's side.
        contains: whether errors are contained.
    """

    def __init__(self, inner: ConnectorScheduler, *, contains: bool = True) -> None:
        self.inner = inner
        self.stack = inner.stack
        self.errors = Containment(self.stack.metrics.counters, inner.drop, self._on_stop, contains=contains)
        self._tells_workers = False  # the stop is still to be sent
        self._waiting: set[str] = set()  # requests whose load vLLM waits for
        self._sent: set[str] = set()  # those of them that the workers know
        self._stale: set[str] = set()  # after a stop: in flight at a reset

    def _on_stop(self) -> None:
        self._tells_workers = True
        self._stale |= self.inner.stale_loads

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - vLLM's Request, which has no types here
        """Register a new request."""
        if not self.errors.is_stopped:
            try:
                self.inner.on_new_request(request)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.drop(request.request_id, error)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401 - (the same)
        """Return the number of tokens that can be loaded; none for a dropped request."""
        if self.errors.is_stopped:
            return 0, False
        try:
            return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        except Exception as error:  # noqa: BLE001 - (the same)
            self.errors.drop(request.request_id, error)
            return 0, False

    def update_state_after_alloc(self, request: Any, blocks: BlockTables, num_external_tokens: int) -> None:  # noqa: ANN401 - (the same)
        """Start the load of a request, if it has one."""
        if num_external_tokens:
            self._waiting.add(request.request_id)
        if not self.errors.is_stopped:
            try:
                self.inner.update_state_after_alloc(request, blocks, num_external_tokens)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> None:  # noqa: ANN401 - (the same)
        """End a request."""
        if not self.errors.is_stopped:
            try:
                self.inner.request_finished(request, block_ids)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.drop(request.request_id, error)

    def loaded_by_tier(self, request_id: str) -> Mapping[str, int]:
        """Tokens of the most recent load by the tier whose bytes it reads; empty for other requests."""
        nothing: Mapping[str, int] = {}
        return self.errors.observe(lambda: self.inner.loaded_by_tier(request_id), nothing)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def build(self, output: Any) -> Instructions:  # noqa: ANN401 - vLLM's SchedulerOutput, which has no types here
        """Build the step's instructions to the workers."""
        if not self.errors.is_stopped:
            try:
                made = self.inner.build(output)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)
            else:
                if made is not NO_INSTRUCTIONS:
                    self._sent.update(made.failed_loads, (job.request_id for job in made.meta.loads))
                return made
        unknown = frozenset(self._waiting - self._sent)
        if not (unknown or self._tells_workers):
            return NO_INSTRUCTIONS
        self._sent |= unknown
        self._tells_workers = False
        return Instructions(failed_loads=unknown, stops=True)

    def process_output(
        self, output: WorkerOutput, started_workers: int, reported: set[str] | None, stopped_workers: int = 0
    ) -> None:
        """Process the reports of the workers.

        Args:
            output: jobs that the workers ended.
            started_workers: number of workers that report for the first time that they have their setup.
            reported: requests whose load is reported to vLLM as ended, or None. Loads with stale data are removed.
            stopped_workers: number of workers that have stopped after an error.
        """
        before = set(reported or ())
        if not self.errors.is_stopped:
            try:
                self.inner.process_output(output, started_workers, reported)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)
        if stopped_workers:
            self.errors.stop(RuntimeError(f"{stopped_workers} of its workers stopped; their logs have the cause"))
        if before and reported is not None:
            stale = reported & self._stale
            reported -= stale
            self._stale -= stale
            self._sent -= before  # a stale load is reported again, as failed, by a later step
            self._waiting -= reported

    # -- the whole cache -----------------------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Empty the tiers. After a stop there is nothing to empty, because nothing is loaded any more."""
        if not self.errors.is_stopped:
            try:
                return self.inner.reset_cache()
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)
        self._stale |= self._waiting
        return True

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must run further steps, also without requests."""
        if not self.errors.is_stopped:
            try:
                return self.inner.has_pending_work
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)
        return self._tells_workers or bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and no transfer in flight. To be called inside ``errors.observe``."""
        return self.errors.is_stopped or self.inner.is_idle

    def run_last_steps(self, worker: ProcessWorker) -> None:
        """End the remaining transfers with the only worker, which is in this process and gets no further steps."""
        if not self.errors.is_stopped:
            try:
                self.inner.run_last_steps(worker)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)

    def shutdown(self) -> None:
        """Write stored chunks to the lower tiers, then close the stack."""
        self.errors.observe(self.inner.shutdown, None)


class ContainedWorker:
    """Worker's side that raises nothing after its start. All methods belong to the worker's thread.

    Only copies that cannot be awaited are an error for vLLM: they would write to blocks of other requests.

    Args:
        inner: the worker's side.
        contains: whether errors are contained.
    """

    def __init__(self, inner: ConnectorWorker, *, contains: bool = True) -> None:
        self.inner = inner
        self._contains = contains
        self._is_stopped = False
        self._stop_unreported = 0

    def _stop(self, error: Exception | None) -> None:
        """Wait for all copies, and have every load reported as failed."""
        if error is not None:
            if not self._contains:
                raise error
            _log.critical(
                "a worker of tierkv stopped after an error, and vLLM goes on without it: %s: %s",
                type(error).__name__,
                error,
                exc_info=error,
            )
            self._stop_unreported = 1
        self._is_stopped = True
        self.inner.abandon()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the engine's KV tensors, by layer. Part of the start: errors are raised."""
        self.inner.register_kv_caches(kv_caches)

    def start_step(
        self,
        meta: ConnectorMeta,
        setup: WorkerSetup | None,
        failed_loads: frozenset[str],
        last_steps: Callable[[ProcessWorker], None] | None,
        *,
        stops: bool = False,
    ) -> None:
        """Start a step; with ``stops``, the last one, because the scheduler's side has stopped."""
        if stops and not self._is_stopped:
            self._stop(None)
        if not self._is_stopped:
            try:
                self.inner.start_step(meta, setup, failed_loads, last_steps)
            except Exception as error:  # noqa: BLE001 - nothing of tierkv may end the engine
                self._stop(error)
            else:
                return
        self.inner.refuse_loads(meta, failed_loads)

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """Queue the stores of the step."""
        if not self._is_stopped:
            try:
                self.inner.queue_stores(meta)
            except Exception as error:  # noqa: BLE001 - (the same)
                self._stop(error)

    def take_results(self) -> LoadResults:
        """Return the loads that ended since the previous call."""
        if not self._is_stopped:
            try:
                return self.inner.take_results()
            except Exception as error:  # noqa: BLE001 - (the same)
                self._stop(error)
        return self.inner.take_ended()

    def take_output(self) -> tuple[WorkerOutput, int, int] | None:
        """Return ended jobs, 1 if this worker has just started, 1 if it has just stopped; None: nothing to report."""
        report = self.inner.take_output()
        if report is None and not self._stop_unreported:
            return None
        stopped, self._stop_unreported = self._stop_unreported, 0
        return (*(report or (WorkerOutput(), 0)), stopped)

    def drain(self) -> None:
        """Wait for all transfers."""
        if not self._is_stopped:
            try:
                self.inner.drain()
            except Exception as error:  # noqa: BLE001 - (the same)
                self._stop(error)

    def shutdown(self) -> None:
        """End all transfers, and close."""
        try:
            self.inner.shutdown()
        except Exception as error:
            if not self._contains:
                raise
            _log.error("a worker of tierkv was not closed: %s", error, exc_info=error)
