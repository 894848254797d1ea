"""What happens inside an engine's process, by name: each takes a ServedEngine and returns plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_served import Json, ServedEngine

from tierkv.metrics.counters import CoreCounters
from tierkv.stack import Stack
from tierkv.tiers.arena import HostArena

Prompts = Sequence[Sequence[int]]


def serve(served: ServedEngine, prompts: Prompts, **options: Any) -> list[Json]:
    """Serve them at once, then let every store end."""
    answers = served.serve(prompts, **options)
    served.settle()
    return answers


def serve_again(served: ServedEngine, prompts: Prompts, **options: Any) -> list[Json]:
    """The same with an empty device: hits can come from the tiers only."""
    served.forget()
    return serve(served, prompts, **options)


def counters(served: ServedEngine) -> Json:
    """Counters of the stack."""
    return served.found(CoreCounters).as_dict()


def flush(served: ServedEngine) -> bool:
    """Bring everything down to the lower tiers; whether all of it got there."""
    served.settle()
    return served.found(Stack).flush()


def forget_host(served: ServedEngine) -> None:
    """Bring everything down, then empty the device and the host tier: what is found now comes from below."""
    assert flush(served)
    assert served.engine.reset_prefix_cache(reset_connector=True)


def overwrite_host(served: ServedEngine) -> int:
    """Put other bytes into every payload of the host tier; how many chunks it has room for."""
    served.settle()
    arena = served.found(HostArena)
    for slot in range(arena.num_slots):
        arena.payload(slot)[:] = 0x3C
    return arena.num_slots
