"""What a stack is made of, as the one who wires it hands it over."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.dispatch.copy_pool import CopyPool
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.events import Observers
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.block_events import BlockEvents
from tierkv.scheduler.event_queue import EventQueue
from tierkv.scheduler.hint_reader import HintReader
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.scheduler.staged_jobs import StagedJobs
from tierkv.scheduler.staged_lookups import StagedLookups
from tierkv.tier_changes import TierChanges
from tierkv.tiers.arena import HostArena
from tierkv.tiers.shared_memory import SharedMemory
from tierkv.types.geometry import Geometry
from tierkv.types.namespace import Namespace
from tierkv.worker.job_marks import MarksBook
from tierkv.worker.part_book import PartBook
from tierkv.worker.slot_seals import SlotSeals
from tierkv.worker.worker import Worker
from tierkv.worker_setup import WorkerSetup


@dataclass(frozen=True, slots=True)
class BaseParts:
    """What every stack is made of.

    workers: those of this process, by rank, and copies: their threads; none where workers are other processes.
    shared: the arena's memory for those, and setup: what they need to know. block_events: what describes events.
    changes: tiers that come and go. completions_per_step_max: I/O results taken in per step; the rest waits.
    """

    manager: OffloadManager
    dispatcher: Dispatcher
    workers: tuple[Worker, ...]
    copies: tuple[CopyPool, ...]
    arena: HostArena
    shared: SharedMemory | None
    setup: WorkerSetup | None
    namespace: Namespace
    geometry: Geometry
    counters: CoreCounters
    observers: Observers
    block_events: BlockEvents
    events: EventQueue
    changes: TierChanges
    completions_per_step_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackParts(BaseParts):
    """And a stack with our own scheduler. part_book: where workers are several, or other processes."""

    scheduler: OffloadScheduler
    part_book: PartBook | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedParts(BaseParts):
    """And a stack for an engine that schedules itself.

    marks: where workers mark the jobs that they ended. seals: what tells whether a store is whole. group_ids: the
    number at the end of the keys of each group.
    """

    lookups: StagedLookups
    jobs: StagedJobs
    marks: MarksBook
    seals: SlotSeals
    hints: HintReader
    group_ids: tuple[int, ...]
