"""Store plans: when computed blocks are offered to the host tier (``store.plan``; spec, sections 10 and 17).

immediate: in the step that computes them. eager: a step later, when their tokens are certain. lazy: not before the
engine is about to hand their blocks out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierkv.manager.manager import OffloadManager
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store.eager import EagerPlan
from tierkv.scheduler.store.immediate import ImmediatePlan
from tierkv.scheduler.store.lazy import LazyPlan
from tierkv.scheduler.store.stores import Stores
from tierkv.types.engine import FreeBlockQueue, ScheduledRequest
from tierkv.types.geometry import Geometry


class StorePlan(Protocol):
    """Told what happens to requests; offers chunks through :class:`~tierkv.scheduler.store.stores.Stores`."""

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """The engine shows the blocks that nobody uses."""

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Blocks were handed out anew: what they held will be lost when this step writes them."""

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:
        """The request is computed in this step; its table is up to date, and so are all others."""

    def end_step(self) -> None:
        """All requests of the step were told of."""

    def on_finished(self, record: RequestRecord) -> None:
        """The request ends; its blocks are still its own."""

    def reset(self) -> None:
        """The cache was emptied."""


def make_store_plan(manager: OffloadManager, geometry: Geometry, limits: SchedulerLimits, stores: Stores) -> StorePlan:
    """The plan that ``limits`` names.

    Raises:
        ConfigError: it cannot be followed with this geometry.
    """
    if limits.store_plan == "lazy":
        return LazyPlan(manager, geometry, stores)
    return EagerPlan(stores) if limits.store_plan == "eager" else ImmediatePlan(stores)
