"""Requests of many kinds at once, in an engine's process: what clients of a server send, not only greedy prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm_served import Json, ServedEngine

CHOICES = ["w7 w8 w9", "w11 w12 w13"]


def kinds() -> Iterator[tuple[str, SamplingParams]]:
    """Parameters by name. Sampled tokens depend on the request's own seed."""
    common: Json = {"max_tokens": 12, "ignore_eos": True}
    yield "greedy", SamplingParams(temperature=0, detokenize=False, **common)
    yield "parallel", SamplingParams(n=3, temperature=0.8, seed=7, detokenize=False, **common)
    yield "prompt logprobs", SamplingParams(temperature=0, prompt_logprobs=1, detokenize=False, **common)
    yield "logprobs", SamplingParams(temperature=0, logprobs=2, detokenize=False, **common)
    yield "penalty", SamplingParams(temperature=0, repetition_penalty=1.3, detokenize=False, **common)
    yield (
        "structured",
        SamplingParams(temperature=0, max_tokens=3, structured_outputs=StructuredOutputsParams(choice=CHOICES)),
    )


def serve_kinds(
    served: ServedEngine, prompts: Sequence[Sequence[int]], aborted: Sequence[str] = (), *, prioritised: bool = False
) -> Json:
    """Send each prompt with each kind of parameters, all at once; abort some kinds after three steps.

    Returns:
        By kind and prompt: tokens of each answer, and how many of its prompt's were cached.
    """
    if getattr(served, "rounds", None) is None:
        served.rounds = 0  # type: ignore[attr-defined]
    served.rounds += 1  # type: ignore[attr-defined]
    names: dict[str, tuple[str, int]] = {}
    for number, prompt in enumerate(prompts):
        for place, (kind, parameters) in enumerate(kinds()):
            name = f"round-{served.rounds}-{kind}-{number}"  # type: ignore[attr-defined]
            names[name] = kind, number
            entry: Any = {"prompt_token_ids": list(prompt)}
            served.engine.add_request(name, entry, parameters, priority=place % 3 if prioritised else 0)
    answers: Json = {}
    step = 0
    while served.engine.has_unfinished_requests():
        for output in served.engine.step():
            kind, number = names[output.request_id]
            if output.finished:
                tokens = [list(one.token_ids) for one in sorted(output.outputs, key=lambda one: one.index)]
                logged = len(output.prompt_logprobs or [])
                answers[f"{kind} {number}"] = {"tokens": tokens, "cached": output.num_cached_tokens, "logged": logged}
        step += 1
        if step == 3:
            served.engine.abort_request([name for name, (kind, _) in names.items() if kind in aborted])
    served.settle()
    return answers


def serve_kinds_again(served: ServedEngine, prompts: Sequence[Sequence[int]], **options: Any) -> Json:
    """The same with an empty device."""
    served.forget()
    return serve_kinds(served, prompts, **options)
