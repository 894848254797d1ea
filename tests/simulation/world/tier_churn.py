"""Tier churn: detaches tiers of a stack in service and attaches them again, in any state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from simulation.checks.exception_guard import guarded
from simulation.checks.failure import demand
from simulation.checks.monitor import PROGRESS
from simulation.checks.trace import Trace
from simulation.drawing.features import key_at_hand
from simulation.drawing.run_spec import RunSpec
from simulation.world.fault_schedule import Fault
from simulation.world.process import Process
from simulation.world.storage import Opening, Storage
from tierkv.errors import BackendError
from tierkv.stack.tier_lifecycle import TierChange

SCAN_S = 2.0
"""Seconds that an attached tier may take to list its content; the engine waits meanwhile."""

TIMEOUTS_S = (0.0, 0.3, 3.0)
"""Seconds until the backend of a detached tier is closed under its running calls; one is drawn."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Tier that is being detached. opening: its backend. change: done when nothing in it is in flight."""

    name: str
    index: int
    opening: Opening | None
    change: TierChange


class Mover:
    """Makes one change at a time, between steps; the next step must apply it.

    Attributes:
        attached, detached: tiers so far. refused: those that could not be opened.
    """

    def __init__(self, setup: RunSpec, process: Process, storages: Mapping[str, Storage], chance: Random) -> None:
        self.attached = 0
        self.detached = 0
        self.refused = 0
        self._setup = setup
        self._process = process
        self._storages = storages
        self._chance = chance
        self._trace: Trace = process.trace
        self._coming: dict[str, TierChange] = {}
        self._going: list[Departure] = []
        self._leaving: list[Departure] = []

    def move(self) -> None:
        """Detach a tier, or attach one again, perhaps before its detach is complete."""
        name = self._chance.choice(self._setup.tiers).name
        if name in self._process.probe.tiers():
            self._detach(name)
        else:
            self._attach(name)

    def bring_back(self) -> None:
        """Attach every tier that has left its storage."""
        for tier in self._setup.tiers:
            out = tier.name not in self._process.probe.tiers() and tier.name not in self._coming
            if out and self._storages[tier.name].opening is None:
                self._attach(tier.name)

    @property
    def is_idle(self) -> bool:
        """Whether every tier is in service, and none is leaving."""
        return len(self._process.probe.tiers()) == len(self._setup.tiers) and not (self._coming or self._leaving)

    def _detach(self, name: str) -> None:
        process = self._process
        timeout_s = self._chance.choice(TIMEOUTS_S)
        self._trace.note("detach", name, timeout_s)
        process.checks.departs(name)
        index = process.probe.tiers()[name].index
        with guarded("detach_tier"):
            change = process.stack.tiers.detach(name, timeout_s=timeout_s)
        self._going.append(Departure(name, index, self._storages[name].opening, change))
        self.detached += 1

    def _attach(self, name: str) -> None:
        process, storage = self._process, self._storages[name]
        before = self._chance.choice((None, *process.probe.tiers()))
        locked = storage.opening is not None
        with guarded("attach_tier"), key_at_hand():
            try:
                change = process.probe.attach(dict(self._setup.tier(name).options), before, SCAN_S)
            except BackendError as error:
                self._trace.note("not attached", name, error)
                excused = locked or storage.fault_schedule.fault is not Fault.NONE
                demand(excused, PROGRESS, f"{name} cannot be attached, and nothing is wrong with it: {error}")
                self.refused += 1
                return
        self._trace.note("attach", name, "before", before)
        storage.was_indexed()
        process.checks.comes(name)
        self._coming[name] = change
        self.attached += 1

    def after_step(self) -> None:
        """Check the changes after a step of the engine."""
        process = self._process
        for name, change in self._coming.items():
            with guarded("wait for a tier"):
                demand(change.wait(0.0), PROGRESS, f"{name} is not in service after a step")
            process.checks.arrived(name)
        self._coming.clear()
        for departure in self._going:
            in_service = process.probe.tiers().get(departure.name)
            gone = in_service is None or in_service.index != departure.index
            demand(gone, PROGRESS, f"{departure.name} is in service, a step after it was detached")
            process.monitor.left.add(departure.index)
        self._leaving += self._going
        self._going.clear()
        for departure in [departure for departure in self._leaving if departure.change.done]:
            self._trace.note("has left", departure.name)
            if departure.opening is not None:
                demand(departure.opening.is_closed, PROGRESS, f"{departure.name} is said to have left, and is open")
                departure.opening.is_gone = True
            self._leaving.remove(departure)
