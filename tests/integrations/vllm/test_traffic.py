"""Traffic of many kinds at once: sampling, log probabilities, grammars, priorities, aborted loads, small budgets."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_process import StartEngine
from vllm_setups import EngineSetup, Seam, prompts

pytestmark = pytest.mark.long

HERE = "vllm_traffic"
STACK = {"host": {"capacity": "16MiB"}, "lookup": {"recompute": "off"}}
ROOM = {"num_gpu_blocks_override": 120}
LENGTHS = (40, 200, 333, 450)
ASYNCHRONOUS = {"async_scheduling": True, "distributed_executor_backend": "mp"}
"""On a CPU, vLLM computes a step in the engine's process before the next one begins, unless there are workers."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small budget": {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_chunked_prefill": True},
    "priorities": {"scheduling_policy": "priority", "max_num_seqs": 3},
    "asynchronous": ASYNCHRONOUS,
    "synchronous": {"async_scheduling": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_kind_of_request_has_its_tokens(seam: Seam, setting: str, start_engine: StartEngine) -> None:
    """Answers from loaded chunks are those of computed ones, also if others are aborted while they load. Requests for
    the log probabilities of their prompts are computed, because vLLM needs the whole prompt for them."""
    asked = [prompts(f"traffic {length}", 1, length)[0] for length in LENGTHS]
    setup = EngineSetup(seam, STACK, arguments={**ROOM, **SETTINGS[setting]})
    options = {"prioritised": setting == "priorities"}
    with start_engine(setup) as engine:
        first = engine.call(f"{HERE}:serve_kinds", prompts=asked, **options)
        again = engine.call(f"{HERE}:serve_kinds_again", prompts=asked, **options)
        rest = engine.call(f"{HERE}:serve_kinds_again", prompts=asked, aborted=["greedy", "parallel"], **options)
        last = engine.call(f"{HERE}:serve_kinds_again", prompts=asked, **options)
        counters = engine.call("vllm_scenarios:counters")
        free, usable = (engine.call(f"vllm_scenarios:{name}") for name in ("free_blocks", "usable_blocks"))
        assert engine.call("vllm_scenarios:steps_at_once") == 1 + (setting == "asynchronous")
    tokens = {name: answer["tokens"] for name, answer in first.items()}
    for answers in (again, rest, last):
        assert {name: answer["tokens"] for name, answer in answers.items() if answer["tokens"][0]} == {
            name: tokens[name] for name in answers if answers[name]["tokens"][0]
        }
    assert len(again) == len(last) == len(first)
    for name, answer in again.items():
        if name.startswith("prompt logprobs"):
            assert answer["logged"] == LENGTHS[int(name.split()[-1])]
        elif not name.endswith(" 0"):
            assert answer["cached"] >= 192, name
    assert (counters["requests_dropped"], counters["errors_contained"]) == (0, 0)
    assert free == usable
