"""Store in the step that computes: workers copy after the forward pass (spec, section 10)."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store.stores import Stores
from tierkv.types.engine import FreeBlockQueue, ScheduledRequest


class ImmediatePlan:
    """Chunks are offered in the step that completes them; without room they are offered again, whole, step by step."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Of no use to this plan."""

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Tables are kept up to date elsewhere."""

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:
        """Offer what the request has computed when this step ends."""
        tokens = self._stores.storable_tokens(record, record.computed_tokens)
        self._stores.offer_chunks(record, tokens, scheduled.num_scheduled_tokens)

    def end_step(self) -> None:
        """Nothing is left to do."""

    def on_finished(self, record: RequestRecord) -> None:
        """Offer what is left: hashes that came late, what had no room, or what one step's bound left over."""
        self._stores.offer_remaining(record)

    def reset(self) -> None:
        """Nothing is remembered."""
