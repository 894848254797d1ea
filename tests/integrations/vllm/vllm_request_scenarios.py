"""Scenarios of requests that say more than tokens: an adapter, or input that arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm_scenarios import settle
from vllm_served import Json, ServedEngine

Prompt = Sequence[int]
STEPS_MAX = 100


def serve_with(served: ServedEngine, prompt: Prompt, adapters: Sequence[str]) -> list[Json]:
    """Serve the prompt with each adapter in turn, by its folder; "" is the model alone.

    One by one: on a CPU, vLLM 0.32 computes the model alone as with an adapter that another request of the batch has.
    """
    answers = []
    for folder in adapters:
        number = sorted({*adapters, ""}).index(folder)
        adapter = LoRARequest("adapter", number, folder) if folder else None
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        served.engine.add_request("asked", {"prompt_token_ids": list(prompt)}, params, lora_request=adapter)
        answer: Json = {}
        while served.engine.has_unfinished_requests():
            for output in served.engine.step():
                answer = {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
        settle(served)
        answers.append(answer)
    return answers


def serve_with_again(served: ServedEngine, prompt: Prompt, adapters: Sequence[str]) -> list[Json]:
    """The same with an empty device."""
    served.forget()
    return serve_with(served, prompt, adapters)


def stream(served: ServedEngine, parts: Sequence[Prompt], tokens: int) -> list[int]:
    """Serve a session whose input arrives in parts, each after the answer to those before. Returns all answers.

    vLLM takes such input in its core only: its synchronous front end has no call for it.
    """
    core, front = served.core, served.engine
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers: list[int] = []
    for number, part in enumerate([*parts, parts[0]]):
        is_end = number == len(parts)  # what ends a session has no input: this one is ignored
        asked = front.input_processor.process_inputs(
            "session", {"prompt_token_ids": list(part)}, params, supported_tasks=("generate",), resumable=not is_end
        )
        asked.external_req_id = "session"
        core.add_request(*core.preprocess_add_request(asked))
        for _ in range(STEPS_MAX):
            for outputs in (core.step_fn()[0] or {}).values():
                answers += [token for output in outputs.outputs for token in output.new_token_ids]
            if is_end or (len(answers) == tokens * (number + 1) and not core.scheduler.running):
                break
    settle(served)
    return answers
