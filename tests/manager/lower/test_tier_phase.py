"""The phases of a lower tier: what is used, and what a reset or an outage changes."""

from __future__ import annotations

import pytest

from tierkv.errors import IllegalTransitionError
from tierkv.manager.lower.tier_phase import TIER_PHASES, TRANSITIONS, TierEvent, TierPhase


@pytest.mark.parametrize("phase", TierPhase)
@pytest.mark.parametrize("event", TierEvent)
def test_only_the_table_moves_a_tier(phase: TierPhase, event: TierEvent) -> None:
    """An event that the table does not list raises with the tier's name, phase and log."""
    if (phase, event) in TRANSITIONS:
        assert TIER_PHASES.next(phase, event, "disk", str) is TRANSITIONS[phase, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"^tier 'disk' is {phase.value}: .*the log$"):
            TIER_PHASES.next(phase, event, "disk", lambda: "the log")


@pytest.mark.parametrize("phase", [phase for phase in TierPhase if phase is not TierPhase.DETACHED])
def test_an_outage_keeps_a_reset(phase: TierPhase) -> None:
    """A tier that goes out of service while it is emptied must go on with it when it is back, and not before."""
    lost = TRANSITIONS[phase, TierEvent.HEALTH_LOST]
    regained = TRANSITIONS[lost, TierEvent.HEALTH_REGAINED]
    assert (lost.usable, regained.usable) == (False, True)
    assert lost.emptying is regained.emptying is phase.emptying


def test_detached_is_the_end() -> None:
    """A tier that was taken out of the stack must never answer again, whatever dispatch reports of it."""
    after = {state for (phase, _), state in TRANSITIONS.items() if phase is TierPhase.DETACHED}
    assert after == {TierPhase.DETACHED}
    assert not TierPhase.DETACHED.usable
