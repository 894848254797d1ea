"""Store a step later, when tokens are certain (spec, section 17)."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store.stores import Stores
from tierkv.types.engine import FreeBlockQueue, ScheduledRequest


class EagerPlan:
    """Only confirmed tokens are offered: those computed before this step, without an earlier step's placeholders.

    A full host tier takes what fits and ends the offers of the step; each cursor stops exactly there.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._full = False

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Of no use to this plan."""

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Tables are kept up to date elsewhere."""

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:
        """Offer what was confirmed before this step."""
        if not self._full:
            confirmed = scheduled.num_computed_tokens - scheduled.num_placeholder_tokens
            tokens = self._stores.storable_tokens(record, confirmed)
            self._full = not self._stores.offer_fitting(record, tokens, record.tokens_unconfirmed)
        record.tokens_unconfirmed = scheduled.num_scheduled_tokens

    def end_step(self) -> None:
        """The next step may find room again."""
        self._full = False

    def on_finished(self, record: RequestRecord) -> None:
        """Offer the rest: all of it is confirmed now (D5)."""
        self._stores.offer_remaining(record, record.tokens_unconfirmed)

    def reset(self) -> None:
        """Nothing is remembered."""
