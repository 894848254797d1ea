"""Many requests at once over little room: blocks are handed out again all the time, requests preempted and aborted."""

from __future__ import annotations

from typing import Any

from vllm_process import EngineProcess, PlainTokens
from vllm_setups import cached_of, prompts, tokens_of


def crowd(engine: EngineProcess, plain_tokens: PlainTokens, model: str) -> dict[str, Any]:
    """Serve twelve prompts twice, then twice with every other one aborted; all that answer give vLLM's own tokens.

    Returns:
        The engine's counters.
    """
    asked = prompts("crowd", 12)
    expected = plain_tokens(model, asked, 60)
    for _ in range(2):
        answers = engine.call("vllm_scenarios:serve_again", prompts=asked, tokens=60)
        assert tokens_of(answers) == expected
    assert sum(cached_of(answers)) > 0
    for step in (2, 6):
        engine.call("vllm_scenarios:forget")
        answers = engine.call(
            "vllm_scenarios:serve_and_abort", prompts=asked, aborted=list(range(0, 12, 2)), at_step=step, tokens=60
        )
        assert tokens_of(answers)[1::2] == expected[1::2]
    counters: dict[str, Any] = engine.call("vllm_scenarios:counters")
    assert counters["evictions"].get("host", 0) > 0
    assert counters["promotions"].get("disk", 0) > 0
    assert engine.call("vllm_scenarios:preemptions") > 0
    assert engine.call("vllm_scenarios:free_blocks") == engine.call("vllm_scenarios:usable_blocks")
    return counters
