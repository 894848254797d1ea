"""Check of writes to lower tiers: a shared tier is not written what this process knows it to have."""

from __future__ import annotations

from collections.abc import Mapping

from simulation.checks.failure import demand
from simulation.drawing.run_spec import RunSpec
from simulation.world.storage import Storage
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Outcome, OutcomeKind, TierOp, Verb

ONCE = "no second write of what a shared tier has"


class WriteChecks:
    """Remembers what was written to each shared tier. On days under load only: no fault loses a frame there."""

    def __init__(self, setup: RunSpec, storages: Mapping[str, Storage]) -> None:
        self._storages = storages
        shared = [tier.name for tier in setup.tiers if tier.capabilities.shared]
        self._written: dict[str, set[Key]] = {name: set() for name in shared if setup.scenario.steady}

    def submitted(self, tier: str, op: TierOp) -> None:
        """An operation is submitted to a tier."""
        written = self._written.get(tier)
        if written is None:
            return
        if op.verb is Verb.DELETE:
            written.difference_update(op.keys)
        elif op.verb is Verb.WRITE:
            again = [key.hex() for key in op.keys if key in written and key in self._storages[tier].frames]
            demand(not again, ONCE, f"{tier} gets {again} once more")

    def ended(self, tier: str, op: TierOp, outcomes: tuple[Outcome, ...]) -> None:
        """An operation has ended."""
        written = self._written.get(tier)
        if written is not None and op.verb in (Verb.WRITE, Verb.READ):
            written.update(
                key for key, outcome in zip(op.keys, outcomes, strict=True) if outcome.kind is OutcomeKind.OK
            )
