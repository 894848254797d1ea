"""Protocols of a connector: the calls, in the order in which a vLLM-like engine makes them.

One step::

    get_num_new_matched_tokens, update_state_after_alloc    per waiting request that is considered, or admitted
    build_connector_meta                                    exactly once, also in a step that computes nothing
    worker.start_step  ->  forward pass  ->  worker.queue_stores
    request_finished                                        per request that is done (also outside a step: abort)
    worker.get_finished  ->  update_connector_output  ->  events.take

All calls come from the engine's thread, and none may wait for I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from tierkv.types.cache_events import CacheEvent
from tierkv.types.engine import BlockTables, LoadReport, Request, StepOutput
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

if TYPE_CHECKING:
    from torch import Tensor


class KVConnectorWorker(Protocol):
    """Connector side that copies between the KV pool and the host."""

    def register_kv_caches(self, caches: Sequence[Sequence[Tensor]]) -> None:
        """Once, before the first step: per group, its tensors [num_blocks, ...], one page per block and tensor."""

    def start_step(self, meta: ConnectorMeta) -> None:
        """Before the forward pass: wait for the jobs to flush, submit earlier stores, start this step's loads."""

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """After the forward pass: remember this step's stores."""

    def get_finished(self) -> WorkerOutput:
        """Report the jobs that have ended since the last call."""


class EventSource(Protocol):
    """The connector's events."""

    def take(self) -> Iterable[CacheEvent]:
        """Return what became available or unavailable since the last call."""


class KVConnector(Protocol):
    """Connector side that decides what is loaded and stored."""

    @property
    def events(self) -> EventSource:
        """Cache events, taken once per step."""

    @property
    def worker(self) -> KVConnectorWorker:
        """The only worker; an engine of several ranks is given theirs beside the connector."""

    def on_new_request(self, request: Request) -> None:
        """Announce a request."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up the tokens beyond ``num_computed_tokens`` that can be loaded.

        Returns:
            (None, False): not known yet, ask again next step. (0, False): none. (n, True): n, while the request waits.
        """

    def update_state_after_alloc(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """Start the load of ``num_external_tokens`` tokens (0: there is none) with the next metadata.

        ``blocks`` are all that the request has: local, external, and perhaps some for tokens computed in this step. In
        a group with a window, the null block fills the table before the window of the first token to compute.
        """

    def build_connector_meta(self, step: StepOutput) -> ConnectorMeta:
        """Build the workers' instructions for a decided step."""

    def update_connector_output(self, output: WorkerOutput) -> LoadReport:
        """Take in the workers' reports; return the loads that ended, and their invalid blocks.

        The engine goes on from where every group has valid blocks for all that the next token attends to. With full
        attention that is the first invalid block. A window is loaded for one end only: so where a group has one, a
        load that failed in part is reported whole, and the engine goes on from what it had before, or from the start.

        Every load accepted by ``update_state_after_alloc`` is reported as finished exactly once, also if the request
        was aborted or the cache was reset in between: the engine keeps the blocks until then.
        """

    def request_finished(self, request: Request, block_ids: tuple[tuple[int, ...], ...]) -> tuple[bool, None]:
        """End a request that is complete or aborted.

        Returns:
            (False, None): its blocks may be reused at once. A transfer is flushed before its block is reused.
        """

    def reset_cache(self) -> None:
        """Drop everything cached. Never called inside a step."""

    def has_pending_work(self) -> bool:
        """Whether transfers are in flight, so that steps are needed even with nothing to compute."""
