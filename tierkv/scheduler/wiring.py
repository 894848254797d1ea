"""Wiring of the core without I/O: host tier, lower tiers, manager, and what schedules over them.

A stack adds dispatch, workers and memory to it. Tests and benchmarks use it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.manager import OffloadManager
from tierkv.manager.step_budget import STEP_KEYS_MAX
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.types.geometry import Geometry


def _no_warning(text: str) -> None:
    """Drop a warning."""


@dataclass(frozen=True, slots=True)
class WiredCore:
    """Scheduler and manager with what they share."""

    geometry: Geometry
    """Sizes of groups and chunks."""
    counters: CoreCounters
    """Counters of scheduler and manager."""
    host: HostTier
    """The host tier's index."""
    lower: Sequence[LowerTier]
    """Lower tiers, in the order in which they are searched."""
    manager: OffloadManager
    """Owner of all chunks."""
    block_events: BlockEvents
    """Describes events by blocks and tokens."""
    scheduler: OffloadScheduler
    """Decides per request what is loaded and stored."""


def wire_manager(  # noqa: PLR0913, PLR0917 - all but four have defaults
    geometry: Geometry,
    host: HostTier,
    lower: Sequence[LowerTier],
    counters: CoreCounters,
    reserved_chunks_max: int | None = None,
    step_keys_max: int = STEP_KEYS_MAX,
) -> OffloadManager:
    """Wire a manager.

    Args:
        geometry: sizes of groups and chunks.
        host: the host tier, empty.
        lower: lower tiers in search order, each numbered by its position.
        counters: of the manager.
        reserved_chunks_max: host chunks that requests may reserve together; None: all slots.
        step_keys_max: key operations per step.
    """
    group_bytes = [group.payload_bytes for group in geometry.groups]
    reserved = host.num_slots if reserved_chunks_max is None else reserved_chunks_max
    return OffloadManager(host, lower, group_bytes, reserved, counters, step_keys_max)


def wire_core(  # noqa: PLR0913 - all but two have defaults
    geometry: Geometry,
    host: HostTier,
    lower: Sequence[LowerTier] = (),
    *,
    limits: SchedulerLimits | None = None,
    counters: CoreCounters | None = None,
    reserved_chunks_max: int | None = None,
    step_keys_max: int = STEP_KEYS_MAX,
    warn: Callable[[str], None] = _no_warning,
    block_events: BlockEvents | None = None,
) -> WiredCore:
    """Wire a scheduler over a manager.

    Args:
        geometry: sizes of groups and chunks.
        host: the host tier, empty.
        lower: lower tiers in search order, each numbered by its position.
        limits: of the scheduler; its defaults if left out.
        counters: new ones if left out.
        reserved_chunks_max: host chunks that requests may reserve together; None: all slots.
        step_keys_max: key operations per step.
        warn: receives the faults in a request's parameters.
        block_events: describes events; inactive ones if left out.
    """
    counters = CoreCounters() if counters is None else counters
    if block_events is None:
        block_events = BlockEvents(geometry, counters, warn, active=False)
    manager = wire_manager(geometry, host, lower, counters, reserved_chunks_max, step_keys_max)
    block_events.tiers = manager.tiers
    scheduler = OffloadScheduler(
        manager, geometry, limits or SchedulerLimits(), counters, warn, block_events=block_events
    )
    return WiredCore(geometry, counters, host, lower, manager, block_events, scheduler)
