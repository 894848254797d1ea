"""Manager of the spec, with errors of tierkv kept from vLLM.

An error of a call about one request drops that request. After any other error the state of the stack is unknown, and
tierkv *stops*: every lookup is a MISS, nothing is stored, and no transfer is completed, so nothing half stored becomes
readable.

A load that cannot be prepared goes to the workers as a lost one. They report it as failed, like one whose copy fails
(:mod:`.failed_loads`), so vLLM computes the request. tierkv then drops it: otherwise its next lookup would be a HIT on
the same chunks.

With ``TIERKV_VALIDATE=1``, errors are raised instead, so that tests and debuggers see them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, PrepareStoreOutput, RequestOffloadingContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.errors import EngineProtocolError, TierKVError
from tierkv.integrations.vllm.refusals import Containment
from tierkv.integrations.vllm.spec.manager import TierKVManager, TierKVTransfer

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey, ReqContext, ScheduleEndContext


class LoadFailedError(TierKVError):
    """A load ended without success in a worker."""


class ContainedManager(OffloadingManager):  # type: ignore[misc]  # vLLM has no types here
    """Manager that raises nothing after its start. Scheduler's thread.

    Args:
        inner: the manager.
        contains: whether errors are contained.
    """

    def __init__(self, inner: TierKVManager, *, contains: bool = True) -> None:
        self.inner = inner
        self.stack = inner.stack
        self.errors = Containment(self.stack.metrics.counters, inner.drop, contains=contains)

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Register a new request."""
        if not self.errors.is_stopped:
            try:
                return self.inner.on_new_request(req_context)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.drop(req_context.req_id, error)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request."""
        if not self.errors.is_stopped:
            try:
                self.inner.on_request_finished(req_context)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End the scheduling of a step."""
        if not self.errors.is_stopped:
            try:
                self.inner.on_schedule_end(context)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)

    def has_pending_work(self) -> bool:
        """Whether vLLM must run steps without requests."""
        return self.errors.run(self.inner.has_pending_work, otherwise=False)

    # -- loads ---------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look up one chunk."""
        if self.errors.is_stopped:
            return LookupResult.MISS
        try:
            return self.inner.lookup(key, req_context)
        except Exception as error:  # noqa: BLE001 - (the same)
            self.errors.drop(req_context.req_id, error)
            return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Source tier of a chunk of the request's load, by vLLM's name."""
        try:
            return self.inner.get_load_source(key, req_context)
        except Exception as error:  # noqa: BLE001 - (the same)
            self.errors.note(error)
            return CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> TierKVTransfer:
        """Prepare the load of chunks that were HITs; a lost load if that fails, or after a stop."""
        if not self.errors.is_stopped:
            try:
                return self.inner.prepare_load(keys, req_context)
            except EngineProtocolError as error:  # nothing has changed
                self.errors.drop(req_context.req_id, error)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)
        return self.inner.lost_load(req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Complete a load that all workers have ended; drop a request whose load failed."""
        if not self.errors.is_stopped:
            try:
                is_complete = self.inner.complete_load(keys, req_context)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)
                return
            if not is_complete:
                failed = LoadFailedError("a worker could not load chunks; its log has the cause")
                self.errors.drop(req_context.req_id, failed)

    # -- stores --------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve slots for the chunks that the host tier lacks; None if there is no room now."""
        if not self.errors.is_stopped:
            try:
                return self.inner.prepare_store(keys, req_context)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)
        return self.inner.empty_store()

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> None:
        """Complete a store that all workers have ended."""
        if not self.errors.is_stopped:
            try:
                self.inner.complete_store(keys, req_context, success)
            except Exception as error:  # noqa: BLE001 - (the same)
                self.errors.stop(error)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note a use of chunks for the eviction policy."""
        self.errors.run(lambda: self.inner.touch(keys, req_context), None)

    # -- whole cache ---------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the tiers. After a stop there is nothing to empty, because nothing is loaded any more."""
        self.errors.run(self.inner.reset_cache, None)

    def on_reset_flushed(self) -> None:
        """Note that all transfers in flight at the reset have ended (vLLM 0.33)."""
        self.errors.run(self.inner.on_reset_flushed, None)

    # -- observation ---------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the previous call."""
        if not self.inner.has_events:
            return ()
        return self.errors.observe(lambda: list(self.inner.take_events()), [])

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the statistics since the previous call; None between reports."""
        try:  # as errors.observe() does, at a call less per step
            return self.inner.get_stats()
        except Exception as error:  # noqa: BLE001 - (the same)
            self.errors.note(error)
            return None

    def config_info(self) -> Sequence[Mapping[str, str | int]]:
        """Static labels for the info metric of vLLM 0.33."""
        return self.errors.observe(self.inner.config_info, [])

    def shutdown(self) -> None:
        """Flush and close the stack."""
        self.errors.observe(self.inner.shutdown, None)
