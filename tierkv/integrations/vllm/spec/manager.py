"""Scheduler's side of the spec: vLLM's ``OffloadingManager`` over a :class:`StagedStack`.

A HIT is a chunk that is readable in the host tier and pinned for its request. Methods that only vLLM 0.33 calls are
never called by 0.32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.integrations.vllm.metrics import StatsFeed
from tierkv.integrations.vllm.spec.shape import config_labels
from tierkv.manager.contract import HOST
from tierkv.stack.remote_worker import WorkerSetup
from tierkv.stack.staged import StagedStack, StagedTransfer
from tierkv.types import lookup as ours
from tierkv.types.keys import Key

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey, ReqContext, ScheduleEndContext

    from tierkv.integrations.vllm.kv_events import OffloadingEvents

_ANSWERS = {
    ours.LookupResult.HIT: LookupResult.HIT,
    ours.LookupResult.MISS: LookupResult.MISS,
    ours.LookupResult.PENDING: LookupResult.HIT_PENDING,
    ours.LookupResult.RETRY: LookupResult.RETRY,
}


@dataclass(frozen=True, slots=True)
class TierKVTransfer(LoadStoreSpec):  # type: ignore[misc]  # vLLM has no types here
    """Chunks of a job, and the setup of the worker for its first job. Can be pickled."""

    transfer: StagedTransfer
    """Chunks of the job."""
    setup: WorkerSetup
    """Setup of the worker."""


class TierKVManager(OffloadingManager):  # type: ignore[misc]  # (the same)
    """Staged stack behind vLLM's interface. All methods belong to the scheduler's thread.

    Args:
        stack: an open stack; :meth:`shutdown` closes it.
        localities: ``LOCAL`` or ``REMOTE`` by name of a lower tier.
        events: translation of events; None if vLLM publishes none.
    """

    def __init__(self, stack: StagedStack, localities: Mapping[str, str], events: OffloadingEvents | None) -> None:
        self.stack = stack
        self._localities = localities
        self._events = events
        self._stats = StatsFeed(stack)
        self._open: set[str] = set()  # requests
        self._setup = stack.worker_setup(0)

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Register a new request."""
        self._open.add(req_context.req_id)
        allowed = self._allowed(req_context.load_tier_filter)
        self.stack.on_new_request(req_context.req_id, req_context.kv_transfer_params, allowed)
        return RequestOffloadingContext()

    def _allowed(self, load_filter: TierFilter) -> frozenset[str] | None:
        """Tiers that vLLM's ``kv_load_tiers`` allows for hits; None: all."""
        if load_filter is TierFilter.ALL:
            return None
        host = {HOST} if load_filter.allows(Medium.CPU, Locality.LOCAL) else set()
        places = {name: Locality(self._localities.get(name, Locality.LOCAL.value)) for name in self.stack.tiers.names}
        return frozenset(host | {name for name, place in places.items() if load_filter.allows(Medium.STORAGE, place)})

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request. Its transfers may continue."""
        self._open.discard(req_context.req_id)
        self.stack.request_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End the scheduling of a step."""
        self.stack.end_step(context.new_req_ids, context.preempted_req_ids)

    def has_pending_work(self) -> bool:
        """Whether vLLM must run steps without requests."""
        return self.stack.has_pending_work() or self.stack.tiers.has_waiting_writes()

    # -- loads ---------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look up one chunk."""
        end_token = req_context.get_offload_key_position(key)
        return _ANSWERS[self.stack.lookup(req_context.req_id, key, end_token or 0)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Source tier of a chunk of the request's load, by vLLM's name."""
        tier = self.stack.load_source(req_context.req_id, cast("Key", key))
        if tier == HOST:
            return CacheHitSource.HOST
        is_local = self._localities.get(tier) == Locality.LOCAL.value
        return CacheHitSource.DISK if is_local else CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> TierKVTransfer:
        """Prepare the load of chunks that were HITs."""
        transfer = self.stack.prepare_load(req_context.req_id, _keys(keys))
        return TierKVTransfer(transfer, self._setup)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Complete a load that all workers have ended."""
        self.stack.complete_load(req_context.req_id, _keys(keys))

    # -- stores --------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve slots for the chunks that the host tier lacks; None if there is no room now."""
        position = req_context.get_offload_key_position
        store = self.stack.prepare_store(req_context.req_id, [(key, position(key) or 0) for key in _keys(keys)])
        if store is None:
            return None
        spec = TierKVTransfer(store.transfer, self._setup)
        return PrepareStoreOutput(list(store.transfer.keys), spec, list(store.evicted))

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,  # noqa: ARG002 - vLLM's signature
        success: bool = True,  # noqa: FBT001, FBT002 - (the same)
    ) -> None:
        """Complete a store that all workers have ended."""
        self.stack.complete_store(_keys(keys), success=success)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002 - (the same)
        """Note a use of chunks for the eviction policy."""
        self.stack.touch(_keys(keys))

    # -- whole cache ---------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the host tier."""
        self.stack.reset_cache()

    def on_reset_flushed(self) -> None:
        """Note that all transfers in flight at the reset have ended (vLLM 0.33; the workers' marks show it as well)."""
        self.stack.workers_flushed()

    # -- observation
    # -----------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the previous call."""
        return () if self._events is None else self._events.translate(self.stack.events.take())

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the statistics since the previous call; None between reports."""
        return self._stats.offloading_stats(idle=not self._open and not self.has_pending_work())

    def config_info(self) -> Sequence[Mapping[str, str | int]]:
        """Static labels for the info metric of vLLM 0.33."""
        return [config_labels(self.stack.describe())]

    def shutdown(self) -> None:
        """Flush and close the stack."""
        self.stack.close()


def _keys(keys: Iterable[Any]) -> list[Key]:
    return cast("list[Key]", list(keys))
