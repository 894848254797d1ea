"""Scenarios that only the connector knows: loads that wait, fail or are overtaken, and what a user may say to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_scenarios import serve
from vllm_served import Json, ServedEngine

from tierkv.integrations.vllm.connector.scheduler import ConnectorScheduler
from tierkv.integrations.vllm.connector.shape import engine_spec
from tierkv.integrations.vllm.connector.worker import LoadResults
from tierkv.memory.arena import HostArena
from tierkv.scheduler.scheduler import OffloadScheduler

Prompts = Sequence[Sequence[int]]


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """The worker's results of loads are kept from vLLM until the function is called: loads are in flight that long."""
    worker = get_kv_transfer_group().worker
    take = worker.take_results
    worker.take_results = LoadResults

    def release() -> None:
        worker.take_results = take

    try:
        yield release
    finally:
        release()


def _loading(served: ServedEngine) -> set[str]:
    return set(served.found(ConnectorScheduler)._loading)


def abort_while_loading(served: ServedEngine, prompts: Prompts, then: Prompts) -> list[Json]:
    """Abort requests while their loads are in flight; serve others meanwhile, and return their answers."""
    served.forget()
    with held_back() as release:
        aborted: set[str] = set()

        def on_step(step: int, names: list[str]) -> None:
            loading = _loading(served) - aborted
            if loading:
                served.abort([name for name in names if any(name in request for request in loading)])
                aborted.update(loading)

        served.serve(prompts, on_step=on_step)
        assert len(aborted) == len(prompts), "every one of them was loading"
        answers = served.serve(then)
        assert served.core.scheduler.requests, "vLLM keeps the blocks of what still loads"
        release()
        served.settle()
        assert not served.core.scheduler.requests
    return answers


def reset_while_loading(served: ServedEngine, prompts: Prompts) -> list[Json]:
    """Empty the host tier while requests load from it, as after an update of weights."""
    served.forget()
    resets: list[bool] = []
    with held_back() as release:

        def on_step(step: int, names: list[str]) -> None:
            if not resets and len(_loading(served)) == len(prompts):
                served.engine.reset_prefix_cache(reset_connector=True)
                resets.append(True)
            elif resets:
                release()

        answers = serve(served, prompts, on_step=on_step)
    assert resets
    return answers


def serve_and_damage(served: ServedEngine, prompts: Prompts) -> list[Json]:
    """Serve with an empty host tier, then flip a byte in a chunk that was stored, of a group without a window: a later
    load needs it.
    """
    arena, scheduler = served.found(HostArena), served.found(OffloadScheduler)
    slots = scheduler._manager._host.slots
    whole = {group.index for group in scheduler._geometry.groups if group.window_chunks is None}
    for slot in range(arena.num_slots):
        arena.payload(slot)[:64] = 0
    answers = serve(served, prompts)
    written = [slot for slot in range(arena.num_slots) if arena.payload(slot)[:64].any()]
    needed = [slot for slot in written if int.from_bytes(slots.key(slot)[-4:], "big") in whole]
    arena.payload(needed[0])[7] ^= 0xFF
    return answers


def hinted(served: ServedEngine, prompt: Sequence[int], hints: Mapping[str, Any]) -> Json:
    """Serve one prompt with hints for tierkv."""
    served.forget()
    extra = {"kv_transfer_params": {"tierkv": dict(hints)}}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, extra_args=extra)
    served.engine.add_request("hinted", {"prompt_token_ids": list(prompt)}, params)
    answer: Json = {}
    while served.engine.has_unfinished_requests():
        for output in served.engine.step():
            answer = {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
    served.settle()
    return answer


def sources(served: ServedEngine) -> dict[str, int]:
    """Cached prompt tokens by where they came from, as vLLM's own metrics tell."""
    return {
        metric.labels["source"]: int(metric.value)
        for metric in served.engine.get_metrics()
        if metric.name == "vllm:prompt_tokens_cached_by_source" and metric.value
    }


def shapes(served: ServedEngine) -> Json:
    """The engine's shape as each side of the connector finds it, and what was settled in its configuration."""
    config = served.core.vllm_config
    ours, theirs = served.core.scheduler.connector, get_kv_transfer_group()
    return {
        "scheduler": repr(engine_spec(config, ours._kv_cache_config)),
        "worker": repr(engine_spec(theirs._vllm_config, theirs._kv_cache_config)),
        "policy": config.kv_transfer_config.kv_load_failure_policy,
        "recomputes": served.core.scheduler.recompute_kv_load_failures,
    }


def serve_and_leave(served: ServedEngine, prompts: Prompts) -> list[Json]:
    """Serve, and take not one step more."""
    return served.serve(prompts, tokens=1)
