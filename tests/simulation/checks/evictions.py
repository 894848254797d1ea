"""Check of evictions: chunks with a copy below leave the host tier before dirty ones."""

from __future__ import annotations

from collections.abc import Iterable

from simulation.checks.failure import demand
from simulation.checks.probe import Probe
from simulation.drawing.features import has_quotas
from simulation.drawing.run_spec import RunSpec
from tierkv.manager.moves.dirty_pins import PINNED_SHARE, UNWRITTEN_SHARE

WAITING = "dirty chunks are evicted last"


class EvictionChecks:
    """Observes every choice of victims in the host tier of one process.

    It is off where tenants have quotas, because a tenant evicts its own chunks. It is also off where a tier has
    write-back: there a chunk can become dirty during its eviction. A step whose budget is used up pins no more chunks.
    """

    def __init__(self, setup: RunSpec, probe: Probe) -> None:
        self._probe = probe
        self._slots = setup.host_slots
        self._broken = ""
        if not has_quotas(setup.host) and all(tier.options["write"] != "back" for tier in setup.tiers):
            probe.listen_to_evictions(self._evicted)

    def _evicted(self, waited: set[int], victims: Iterable[int]) -> None:
        """``victims`` were evicted; ``waited``: the slots of chunks that were dirty before."""
        lost = waited.intersection(victims)
        others = self._probe.idle_slots() - waited
        bound = min(int(self._slots * PINNED_SHARE), int(self._slots * UNWRITTEN_SHARE) - self._probe.num_writing())
        if lost and others and self._probe.may_pin() and len(self._probe.dirty_pinned()) < bound:
            self._broken = f"{len(lost)} chunks are lost for a tier, and {len(others)} others could have left"

    def after_step(self) -> None:
        """Raise the first violation that was seen."""
        demand(not self._broken, WAITING, self._broken)
