"""Scheduler's side of the spec: vLLM's ``OffloadingManager`` over a :class:`StagedStack`.

A HIT is a chunk that is readable in the host tier and pinned for its request. Methods that only vLLM 0.33 calls are
never called by 0.32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.metrics import StatsFeed
from tierkv.integrations.vllm.refusals import Refusals
from tierkv.integrations.vllm.resets import reset_stack, weights_since_reset
from tierkv.integrations.vllm.spec.requests import PLAIN_KEYS, NamedRequests, RequestKeys
from tierkv.integrations.vllm.spec.shape import config_labels
from tierkv.manager.contract import ResetScope
from tierkv.scheduler.staged.staged_jobs import NO_FLAG
from tierkv.stack.remote_worker import WorkerSetup
from tierkv.stack.staged import StagedStack
from tierkv.types import lookup as ours
from tierkv.types.cache_events import HOST
from tierkv.types.transfers import StagedStore, StagedTransfer

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
    request_id: str = ""
    """Request of a load."""
    is_lost: bool = False
    """Whether a load could not be prepared, so that the worker must report it as failed."""


class TierKVManager:
    """Staged stack behind vLLM's interface, held by :class:`.containment.ContainedManager`. Scheduler's thread.

    Args:
        stack: an open stack; :meth:`shutdown` closes it.
        localities: ``LOCAL`` or ``REMOTE`` by name of a lower tier.
        events: translation of events; None if vLLM publishes none.
        reset_scope: tiers that a reset empties.
    """

    def __init__(
        self,
        stack: StagedStack,
        localities: Mapping[str, str],
        events: OffloadingEvents | None,
        reset_scope: ResetScope = "all",
    ) -> None:
        self.stack = stack
        self.named = NamedRequests()
        """Receives each request before :meth:`on_new_request`, where vLLM names them (:mod:`~.requests`)."""
        self._reset_scope = reset_scope
        self._has_scopes = False
        self._localities = localities
        self._events = events
        self.has_events = events is not None
        """Whether :meth:`take_events` may return any."""
        self._stats = StatsFeed(stack)
        self._open: set[str] = set()  # requests
        self._dropped: set[str] = set()  # those of them that vLLM serves without tierkv
        self._refusals = Refusals()
        self._setup = stack.worker_setup(0)

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Register a new request."""
        self._open.add(req_context.req_id)
        keys = self.named.take(req_context.req_id)
        if keys is None:
            self._dropped.add(req_context.req_id)
            return RequestOffloadingContext()
        if keys.scope:
            self._has_scopes = True
            req_context.set_state(keys)
        allowed = self._allowed(req_context.load_tier_filter)
        self.stack.on_new_request(req_context.req_id, req_context.kv_transfer_params, allowed)
        return RequestOffloadingContext()

    def _keys(self, req_context: ReqContext) -> RequestKeys:
        return (self._has_scopes and req_context.get_state(RequestKeys)) or PLAIN_KEYS

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
        self._dropped.discard(req_context.req_id)
        self.named.end(req_context.req_id)
        self.stack.request_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End the scheduling of a step."""
        tokens = self.named.end_step(context.new_req_ids, context.preempted_req_ids)
        self.stack.end_step(context.new_req_ids, context.preempted_req_ids, tokens)

    def has_pending_work(self) -> bool:
        """Whether vLLM must run steps without requests."""
        return self.stack.has_pending_work() or self.stack.tiers.has_waiting_writes()

    # -- loads ---------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look up one chunk. A MISS for each chunk of a request of which one is refused.

        A reset preempts running requests, and vLLM looks them up again in the same step. At the end of that step, it
        tells the preemptions, and asserts that none of these requests loads. So they wait for the next step.
        """
        if self._dropped and self._is_dropped(req_context.req_id):
            return LookupResult.MISS
        if self.named.is_being_preempted(req_context.req_id):
            return LookupResult.RETRY
        end_token = req_context.get_offload_key_position(key)
        if self._has_scopes:
            (key,) = self._keys(req_context).stored((key,))
        try:
            return _ANSWERS[self.stack.lookup(req_context.req_id, key, end_token or 0)]
        except EngineProtocolError as error:
            self.drop(req_context.req_id, error)
            return LookupResult.MISS

    def _is_dropped(self, request_id: str) -> bool:
        if self.named.take_unnamed(request_id):  # one that asks has begun
            self.stack.metrics.counters.requests_dropped += 1
            self._refusals.log(
                EngineProtocolError(
                    f"request {request_id!r} was named by no connector of vLLM, so its adapter is unknown, and whether "
                    "its input is streamed; TierKVSpec needs vLLM's OffloadingConnector"
                )
            )
        return request_id in self._dropped

    def drop(self, request_id: str, error: Exception) -> None:
        """Go on without tierkv for a request whose call was refused, or failed."""
        self._refusals.log(error)
        if request_id not in self._dropped:
            self._dropped.add(request_id)
            self.stack.metrics.counters.requests_dropped += 1
            self.stack.request_finished(request_id)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Source tier of a chunk of the request's load, by vLLM's name."""
        if self._has_scopes:
            (key,) = self._keys(req_context).stored((key,))
        tier = self.stack.load_source(req_context.req_id, key)
        if tier == HOST:
            return CacheHitSource.HOST
        is_local = self._localities.get(tier) == Locality.LOCAL.value
        return CacheHitSource.DISK if is_local else CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> TierKVTransfer:
        """Prepare the load of chunks that were HITs."""
        transfer = self.stack.prepare_load(req_context.req_id, self._keys(req_context).stored(keys))
        return TierKVTransfer(transfer, self._setup, req_context.req_id)

    def lost_load(self, req_context: ReqContext) -> TierKVTransfer:
        """Load that could not be prepared: workers report it as failed. Calls nothing that could raise."""
        return TierKVTransfer(StagedTransfer(NO_FLAG, (), (), ()), self._setup, req_context.req_id, is_lost=True)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> bool:
        """Complete a load that all workers have ended. Returns whether all of them have loaded all of it."""
        return self.stack.complete_load(req_context.req_id, self._keys(req_context).stored(keys))

    # -- stores --------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve slots for the chunks that the host tier lacks; None if there is no room now.

        If one of them is refused, nothing is stored for the request from now on.
        """
        position, names = req_context.get_offload_key_position, self._keys(req_context)
        offered = () if self._is_dropped(req_context.req_id) else tuple(keys)
        chunks = [(stored, position(key) or 0) for key, stored in zip(offered, names.stored(offered), strict=True)]
        try:
            if chunks and self._has_scopes:
                self.named.check_own_hit(req_context.req_id)
            store = self.stack.prepare_store(req_context.req_id, chunks)
        except EngineProtocolError as error:
            self.drop(req_context.req_id, error)
            store = self.stack.prepare_store(req_context.req_id, ())
        if store is None:
            return None
        return self._store_output(store, names)

    def _store_output(self, store: StagedStore, names: RequestKeys = PLAIN_KEYS) -> PrepareStoreOutput:
        spec = TierKVTransfer(store.transfer, self._setup)
        return PrepareStoreOutput(names.named(store.transfer.keys), spec, list(store.evicted))

    def empty_store(self) -> PrepareStoreOutput:
        """Answer that nothing of an offer needs to be stored."""
        return self._store_output(StagedStore(StagedTransfer(NO_FLAG, (), (), ()), ()))

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> None:
        """Complete a store that all workers have ended."""
        self.stack.complete_store(self._keys(req_context).stored(keys), success=success)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note a use of chunks for the eviction policy."""
        self.stack.touch(self._keys(req_context).stored(keys))

    # -- whole cache ---------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the tiers that ``tierkv_reset_scope`` names: all of them, unless it is "host".

        vLLM offers what running requests have computed before once more: with the previous weights, if these are new.
        And it may have given blocks outside a window to other requests meanwhile. So these requests store nothing more.
        If all tiers are emptied, no request from before does: chunks get other keys.
        """
        dropped = (self.named.names() if self._reset_scope == "all" else self.named.begun()) - self._dropped
        self._dropped |= dropped
        self.stack.metrics.counters.requests_dropped += len(dropped)
        reset_stack(self.stack, self._reset_scope)
        if self._reset_scope == "all":
            self.named.weights = weights_since_reset()

    def on_reset_flushed(self) -> None:
        """Note that all transfers in flight at the reset have ended (vLLM 0.33; the workers' marks show it as well)."""
        self.stack.workers_flushed()

    # -- observation ---------------------------------------------------------------------------------------------------

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
