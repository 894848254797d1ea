"""Store plan "immediate": store in the step that computes; workers copy after the forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store.stores import Stores
from tierkv.types.engine import FreeBlockQueue, ScheduledRequest


class ImmediatePlan:
    """Offers chunks in the step that completes them; if there is no room, again in each later step."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Ignored."""

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Ignored: the block tables suffice."""

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:
        """Offer the chunks that this step completes."""
        tokens = self._stores.storable_tokens(record, record.computed_tokens)
        self._stores.offer_chunks(record, tokens, scheduled.num_scheduled_tokens)

    def end_step(self) -> None:
        """Nothing to do."""

    def on_finished(self, record: RequestRecord) -> None:
        """Offer the rest: late hashes, chunks without room, chunks beyond the bound of a step."""
        self._stores.offer_remaining(record)

    def reset(self) -> None:
        """Nothing to forget."""
