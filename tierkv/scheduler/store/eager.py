"""Store plan "eager": store one step later, when tokens are certain."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store.stores import Stores
from tierkv.types.engine import FreeBlockQueue, ScheduledRequest


class EagerPlan:
    """Offers confirmed tokens only: computed before this step, without placeholders of an earlier step.

    If the host tier is full, the chunks that fit are stored, and the offers of the step end. Each cursor stops there.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._full = False

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Ignored."""

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Ignored: the block tables suffice."""

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:
        """Offer the chunks confirmed before this step."""
        if not self._full:
            confirmed = scheduled.num_computed_tokens - scheduled.num_placeholder_tokens
            tokens = self._stores.storable_tokens(record, confirmed)
            self._full = not self._stores.offer_fitting(record, tokens, record.unconfirmed_tokens)
        record.unconfirmed_tokens = scheduled.num_scheduled_tokens

    def hold(self, record: RequestRecord) -> bool:  # noqa: ARG002 - contract
        """Hold nothing: this plan waits for the next step anyway."""
        return False

    @property
    def holds_chunks(self) -> bool:
        """Whether chunks are held: never."""
        return False

    def end_step(self, *, rests: bool = False) -> None:  # noqa: ARG002 - contract
        """Allow offers again: the next step may find room."""
        self._full = False

    def on_preempted(self, record: RequestRecord) -> None:
        """Nothing to do: its latest tokens are not certain."""

    def on_finished(self, record: RequestRecord) -> None:
        """Offer the rest: all of it is confirmed now (D5)."""
        self._stores.offer_remaining(record, record.unconfirmed_tokens)

    def reset(self) -> None:
        """Nothing to forget."""
