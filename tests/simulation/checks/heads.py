"""Check of what stays of prompts that are too long for a tier: the head, because a tail without it is useless."""

from __future__ import annotations

from simulation.checks.failure import demand
from simulation.checks.probe import Probe
from simulation.drawing.run_spec import RunSpec
from tierkv.types.keys import Key

HEADS = "the head of a prompt stays longest"

SHARE_MIN = 0.3
"""Share of a disk that the head of the only prompt fills at least. The rest may be chunks of its continuations."""


def check_heads(setup: RunSpec, probe: Probe, prompt: list[Key]) -> None:
    """Check, at rest, how much of a prompt can be found from its start.

    Args:
        setup: spec of a run with one disk, and one prompt that it has no room for.
        probe: the stack.
        prompt: chunks of the prompt's first group.
    """
    (tier,) = setup.tiers
    resident = probe.resident(tier.name) | probe.readable(prompt)
    head = next((i for i, key in enumerate(prompt) if key not in resident), len(prompt))
    room = probe.room_in_chunks(tier.name)
    wanted = int(SHARE_MIN * min(len(prompt), room))
    demand(
        head >= wanted, HEADS, f"{head} chunks of the prompt's {len(prompt)} are found, {tier.name} has room for {room}"
    )
