"""Store plans: when computed blocks are offered to the host tier (``store.plan``).

immediate: in the step that computes them. eager: one step later, when their tokens are certain. lazy: shortly before
the engine reuses the blocks.
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
    """Follows requests, and offers their chunks through :class:`~tierkv.scheduler.store.stores.Stores`."""

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Register the engine's queue of free blocks."""

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Blocks were given to another request: their content will be lost when this step writes them."""

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:
        """The request is computed in this step; all block tables are up to date."""

    def hold(self, record: RequestRecord) -> bool:
        """Keep chunks that a request completed in a rest for a later step. Returns whether the plan does."""

    @property
    def holds_chunks(self) -> bool:
        """Whether chunks are held."""

    def end_step(self, *, rests: bool = False) -> None:
        """Every other request of the step was passed to ``on_scheduled``. rests: the step leaves the tiers alone."""

    def on_preempted(self, record: RequestRecord) -> None:
        """The request has lost its blocks; this step will write them."""

    def on_finished(self, record: RequestRecord) -> None:
        """The request ends; its blocks still belong to it."""

    def reset(self) -> None:
        """The cache was reset."""


def make_store_plan(manager: OffloadManager, geometry: Geometry, limits: SchedulerLimits, stores: Stores) -> StorePlan:
    """Store plan that ``limits`` names.

    Raises:
        ConfigError: the plan does not support this geometry.
    """
    if limits.store_plan == "lazy":
        return LazyPlan(manager, geometry, stores)
    return EagerPlan(stores) if limits.store_plan == "eager" else ImmediatePlan(stores)
