"""Counts of loaded tokens: ours, and vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.metrics.stats import PrefixCacheStats
from vllm_scenarios import serve
from vllm_served import Json, ServedEngine

from tierkv.memory.arena import HostArena
from tierkv.metrics.counters import CoreCounters
from tierkv.stack.staged import StagedStack

_preempted = [0]
_prompt_tokens: list[int] = []


def count_preempted_hits(served: ServedEngine) -> None:
    """Count the hits that vLLM keeps apart and does not publish, from now on."""
    record = PrefixCacheStats.record

    def counting(self: Any, num_tokens: int, num_hits: int, preempted: bool, **more: Any) -> None:
        if preempted and self is served.core.scheduler.connector_prefix_cache_stats:
            _preempted[0] += num_hits
        record(self, num_tokens=num_tokens, num_hits=num_hits, preempted=preempted, **more)

    PrefixCacheStats.record = counting


def serve_and_damage_chunk(served: ServedEngine, prompts: Sequence[Sequence[int]], number: int) -> list[Json]:
    """Serve with an empty host tier, then flip a byte in one of the stored chunks, counted in the order of slots."""
    answers = serve(served, prompts)
    arena = served.found(HostArena)
    written = [slot for slot in range(arena.num_slots) if arena.payload(slot)[:64].any()]
    arena.payload(written[number])[7] ^= 0xFF
    return answers


def hits(served: ServedEngine) -> Json:
    """Tokens loaded by our counters, hits that vLLM published, and those of preempted requests."""
    served.serve([[3, 4, 5]], tokens=2)  # statistics travel with steps
    served.settle()
    published = sum(
        int(metric.value) for metric in served.engine.get_metrics() if metric.name == "vllm:external_prefix_cache_hits"
    )
    loaded = sum(served.found(CoreCounters).tokens_loaded.values())
    return {"loaded": loaded, "published": published, "preempted": _preempted[0]}


def count_prompt_tokens(served: ServedEngine) -> None:
    """Add up the prompt tokens that the spec reports to its stack, from now on."""
    end_step = StagedStack.end_step

    def counting(self: Any, started: Any = (), preempted: Any = (), prompt_tokens: int = 0) -> None:
        _prompt_tokens.append(prompt_tokens)
        end_step(self, started, preempted, prompt_tokens)

    StagedStack.end_step = counting  # type: ignore[method-assign]


def prompt_tokens(served: ServedEngine) -> int:
    """Prompt tokens since the previous call, with those of one short prompt, whose steps report the last ones."""
    served.serve([[3, 4, 5]], tokens=3)
    told = sum(_prompt_tokens)
    _prompt_tokens.clear()
    return told
