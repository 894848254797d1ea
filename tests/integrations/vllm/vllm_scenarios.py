"""Scenarios in an engine's process, by name: each takes a ServedEngine and returns plain JSON."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from vllm_served import Json, ServedEngine

from tierkv.manager.host.host_tier import HostTier
from tierkv.memory.arena import HostArena
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.staged.staged_jobs import StagedJobs
from tierkv.stack.core import StackCore
from tierkv.stack.stack import Stack
from tierkv.stack.staged import StagedStack
from tierkv.types.engine import GroupKind
from tierkv.types.keys import split_key

Prompts = Sequence[Sequence[int]]
RECOVERY_TRIES = 100
RESETS_AT_FIRST = 3


def serve(served: ServedEngine, prompts: Prompts, **options: Any) -> list[Json]:
    """Serve them at once, then let every store end."""
    answers = served.serve(prompts, **options)
    served.settle()
    return answers


def serve_again(served: ServedEngine, prompts: Prompts, **options: Any) -> list[Json]:
    """The same with an empty device: hits can come from the tiers only."""
    served.forget()
    return serve(served, prompts, **options)


def embed(served: ServedEngine, prompts: Prompts) -> list[Json]:
    """Embed each prompt, one by one: its ``embedding``, and how many of its tokens were ``cached``."""
    answers = []
    for prompt in prompts:
        (answer,) = served.embed([prompt])
        served.settle()
        answers.append(answer)
    return answers


def embed_again(served: ServedEngine, prompts: Prompts) -> list[Json]:
    """The same with an empty device."""
    served.forget()
    return embed(served, prompts)


def settle(served: ServedEngine) -> None:
    """Take the steps that vLLM wants, though it has no request."""
    served.settle()


def steps_until_idle(served: ServedEngine, steps_max: int = 1000) -> int:
    """Number of steps that vLLM still needs."""
    steps = 0
    while served.core.scheduler.has_requests() and steps < steps_max:
        served.engine.step()
        steps += 1
    return steps


def serve_and_abort(
    served: ServedEngine, prompts: Prompts, aborted: Sequence[int], at_step: int, **options: Any
) -> list[Json]:
    """Serve them, but end some after a step."""

    def on_step(step: int, names: list[str]) -> None:
        if step == at_step:
            served.abort([names[number] for number in aborted])

    return serve(served, prompts, on_step=on_step, **options)


def forget(served: ServedEngine) -> None:
    """Empty the device."""
    served.forget()


def flush(served: ServedEngine) -> bool:
    """Bring everything down to the lower tiers; whether all of it got there."""
    served.settle()
    return served.found(Stack, StagedStack).flush()


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


def overwrite_states(served: ServedEngine, start: int, stop: int) -> int:
    """Put other bytes into a part of each layer's state in the host tier; in how many chunks.

    start, stop: bytes of the page of the chunk's last block.
    """
    served.settle()
    arena, geometry = served.found(HostArena), served.found(StackCore).wiring.geometry
    layers = [len(group.layer_names) for group in served.core.scheduler.kv_cache_config.kv_cache_groups]
    states = {group.index: group for group in geometry.groups if group.kind is GroupKind.SSM}
    changed = 0
    for chunk in served.found(HostTier).slots.visible():
        group = states.get(split_key(chunk.key)[1])
        if group is not None:
            changed += 1
            payload = arena.payload(chunk.slot)
            pages_bytes = group.worker_bytes // layers[group.index]
            page_bytes = pages_bytes // geometry.blocks_per_chunk
            for page_end in range(pages_bytes, group.worker_bytes + 1, pages_bytes):
                payload[page_end - page_bytes + start : page_end - page_bytes + stop] = 0x3F
    return changed


def recover(served: ServedEngine) -> None:
    """Serve until a tier that was left alone takes chunks again."""
    rng = random.Random("recover")
    for _ in range(RECOVERY_TRIES):
        serve(served, [[rng.randrange(3, 1000) for _ in range(64)]], tokens=1)
        if flush(served):
            return
        time.sleep(0.1)
    raise AssertionError("the tier was never used again")


def counters(served: ServedEngine) -> Json:
    """Counters of the stack."""
    return served.found(CoreCounters).as_dict()


def num_groups(served: ServedEngine) -> int:
    """Groups that vLLM keeps apart."""
    return len(served.core.scheduler.kv_cache_config.kv_cache_groups)


def steps_at_once(served: ServedEngine) -> int:
    """Number of steps that the engine begins before it waits for the first of them."""
    core: Any = served.engine.engine_core
    return int(core.engine_core.batch_queue_size)


def preemptions(served: ServedEngine) -> int:
    """Number of preemptions of running requests."""
    return sum(int(metric.value) for metric in served.engine.get_metrics() if metric.name == "vllm:num_preemptions")


def accepted_drafts(served: ServedEngine) -> int:
    """Number of drafted tokens that the model itself took."""
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(int(metric.value) for metric in served.engine.get_metrics() if metric.name == name)


def free_blocks(served: ServedEngine) -> int:
    """Number of free blocks of the device."""
    served.forget()
    return int(served.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def usable_blocks(served: ServedEngine) -> int:
    """All blocks but the null block."""
    return int(served.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1


def serve_only(served: ServedEngine, prompts: Prompts, **options: Any) -> list[Json]:
    """Serve them, wherever the engine lives: in a process of its own it ends its stores by itself."""
    return served.serve(prompts, **options)


def serve_and_reset(
    served: ServedEngine, prompts: Prompts, every: int, first: int = RESETS_AT_FIRST, **options: Any
) -> Json:
    """Serve them, and empty the connector's cache while they wait for an answer, then while transfers are in flight.

    That is, after each of the first steps (``first``), and then after every N-th step with a transfer in flight
    (``every``). After each step, no request would ever have all its chunks, and all would wait for their deadline.
    Requests that run at a reset store nothing more.

    Returns:
        The answers, how many stores and loads were in flight at a reset, and how many slots of the host tier are free
        or could be at the end, of how many.
    """
    caught = {"stores": 0, "loads": 0}
    jobs, busy = served.found(StagedJobs), 0

    def on_step(step: int, names: list[str]) -> None:
        nonlocal busy
        stores, loads = len(jobs._stores), len(jobs._loads)
        busy += bool(stores or loads)
        if step <= first or ((stores or loads) and busy % every == 0):
            caught["stores"] += stores
            caught["loads"] += loads
            assert served.core.scheduler.reset_connector_cache()

    answers = serve(served, prompts, on_step=on_step, **options)
    flush(served)  # a copy or a write that is still under way holds a slot
    host = served.found(HostTier)
    host.dropping.sweep(host.num_slots)
    return {"answers": answers, "caught": caught, "room": host.room, "slots": host.num_slots}


def serve_and_preempt(served: ServedEngine, prompts: Prompts, times: int, **options: Any) -> Json:
    """Serve them, and preempt all running requests after some steps, with an empty device but not the tiers.

    Returns:
        The answers, and how many of the times no load was in flight: vLLM refuses it otherwise.
    """
    preempted = 0

    def on_step(step: int, names: list[str]) -> None:
        nonlocal preempted
        states = {request.status.name for request in served.core.scheduler.requests.values()}
        if preempted < times and states == {"RUNNING"}:
            assert served.engine.reset_prefix_cache(reset_running_requests=True)
            preempted += 1

    return {"answers": serve(served, prompts, on_step=on_step, **options), "preempted": preempted}
