"""Store plan "immediate": store in the step that computes; workers copy after the forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store.stores import Stores
from tierkv.types.engine import FreeBlockQueue, ScheduledRequest

HELD_MAX = 8
"""Requests that hold chunks at most. More would cost one step too much, and save no more per chunk."""


class ImmediatePlan:
    """Offers chunks in the step that completes them; if there is no room, again in each later step.

    In a rest, chunks of requests that decode are held until its last step, and offered together. A request that is
    preempted or ends meanwhile offers its own, because it loses its blocks then.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._held: dict[RequestRecord, frozenset[int]] = {}  # and the blocks of its chunks

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Ignored."""

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Hold no chunk with such a block. If its request is scheduled again, it is offered from the table of then."""
        if self._held:
            for record in [of for of, held in self._held.items() if not held.isdisjoint(block_ids)]:
                del self._held[record]
                record.quiet_tokens = 0

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:
        """Offer the chunks that this step completes."""
        self._held.pop(record, None)
        self._offer(record, scheduled.num_scheduled_tokens)

    def _offer(self, record: RequestRecord, new_tokens: int = 0) -> None:
        self._stores.offer_chunks(record, self._stores.storable_tokens(record, record.computed_tokens), new_tokens)

    def hold(self, record: RequestRecord) -> bool:
        """Hold the chunks that were not offered, unless the engine may reuse their blocks while the request runs."""
        if self._stores.has_windows:
            return False
        self._held[record] = self._stores.blocks_to_offer(record)
        return True

    @property
    def holds_chunks(self) -> bool:
        """Whether chunks are held."""
        return bool(self._held)

    def end_step(self, *, rests: bool = False) -> None:
        """Offer what was held, unless the rest goes on and few requests wait."""
        if not self._held or (rests and len(self._held) < HELD_MAX):
            return
        held, self._held = self._held, {}
        for record in held:
            self._offer(record)  # one that was preempted or has ended has no table, so it offers nothing
            due = self._stores.due_tokens(record)
            if due is not None:  # what found no room is offered again in each step
                record.quiet_tokens = min(record.quiet_tokens, due) if due > record.computed_tokens else 0

    def on_preempted(self, record: RequestRecord) -> None:
        """Offer what was held. What the latest step was to compute may not have been computed."""
        if self._held.pop(record, None):
            self._stores.offer_chunks(record, self._stores.final_tokens(record), 0)

    def on_finished(self, record: RequestRecord) -> None:
        """Offer the rest: late hashes, held chunks, chunks without room, chunks beyond the bound of a step."""
        self._held.pop(record, None)
        self._stores.offer_remaining(record)

    def reset(self) -> None:
        """Hold nothing: all chunks are offered again."""
        self._held.clear()
