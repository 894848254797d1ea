"""The scheduler's side of the spec seam: vLLM's ``OffloadingManager`` over a :class:`StagedStack`.

A HIT here is a chunk that is readable in the host tier and pinned for its request. Everything vLLM 0.33 asks beyond
0.32 is answered by the same methods; 0.32 never calls them.
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
    """What a worker must know of a job's chunks, and of the stack if this is its first. Pickles."""

    transfer: StagedTransfer
    setup: WorkerSetup


class TierKVManager(OffloadingManager):  # type: ignore[misc]  # (the same)
    """All methods belong to the scheduler's thread.

    Args:
        stack: open; :meth:`shutdown` closes it.
        localities: by name of a lower tier, whether others can reach it: ``LOCAL`` or ``REMOTE``.
        events: makes vLLM's events of ours; None: vLLM publishes none.
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
        """A request has arrived."""
        self._open.add(req_context.req_id)
        allowed = self._allowed(req_context.load_tier_filter)
        self.stack.on_new_request(req_context.req_id, req_context.kv_transfer_params, allowed)
        return RequestOffloadingContext()

    def _allowed(self, load_filter: TierFilter) -> frozenset[str] | None:
        """The tiers that vLLM's ``kv_load_tiers`` lets a hit come from; None: all."""
        if load_filter is TierFilter.ALL:
            return None
        host = {HOST} if load_filter.allows(Medium.CPU, Locality.LOCAL) else set()
        places = {name: Locality(self._localities.get(name, Locality.LOCAL.value)) for name in self.stack.tiers.names}
        return frozenset(host | {name for name, place in places.items() if load_filter.allows(Medium.STORAGE, place)})

    def on_request_finished(self, req_context: ReqContext) -> None:
        """The request ended; its transfers may go on."""
        self._open.discard(req_context.req_id)
        self.stack.request_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The step's questions have been asked."""
        self.stack.end_step(context.new_req_ids, context.preempted_req_ids)

    def has_pending_work(self) -> bool:
        """Whether vLLM should go on stepping without requests."""
        return self.stack.has_pending_work() or self.stack.tiers.has_waiting_writes()

    # -- loads ---------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk can be loaded."""
        end_token = req_context.get_offload_key_position(key)
        return _ANSWERS[self.stack.lookup(req_context.req_id, key, end_token or 0)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """The tier that a chunk of the request's load came from, in vLLM's words."""
        tier = self.stack.load_source(req_context.req_id, cast("Key", key))
        if tier == HOST:
            return CacheHitSource.HOST
        is_local = self._localities.get(tier) == Locality.LOCAL.value
        return CacheHitSource.DISK if is_local else CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> TierKVTransfer:
        """Chunks that were HITs will be loaded."""
        transfer = self.stack.prepare_load(req_context.req_id, _keys(keys))
        return TierKVTransfer(transfer, self._setup)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """All workers have loaded them."""
        self.stack.complete_load(req_context.req_id, _keys(keys))

    # -- stores --------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Room for those that the host tier lacks; None: there is none now."""
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
        """All workers have stored them."""
        self.stack.complete_store(_keys(keys), success=success)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002 - (the same)
        """Recency only."""
        self.stack.touch(_keys(keys))

    # -- whole cache ---------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the host tier."""
        self.stack.reset_cache()

    def on_reset_flushed(self) -> None:
        """All that was in flight at the last reset has ended (vLLM 0.33; the workers' own marks tell it, too)."""
        self.stack.workers_flushed()

    # -- watching ------------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What came and went since the last call."""
        return () if self._events is None else self._events.translate(self.stack.events.take())

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        return self._stats.offloading_stats(idle=not self._open and not self.has_pending_work())

    def config_info(self) -> Sequence[Mapping[str, str | int]]:
        """Static facts for vLLM 0.33's info metric."""
        return [config_labels(self.stack.describe())]

    def shutdown(self) -> None:
        """Flush and close the stack."""
        self.stack.close()


def _keys(keys: Iterable[Any]) -> list[Key]:
    return cast("list[Key]", list(keys))
