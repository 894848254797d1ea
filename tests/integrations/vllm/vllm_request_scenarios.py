"""Scenarios of requests that say more than tokens: an adapter, pictures, or input that arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm_scenarios import settle
from vllm_served import Json, ServedEngine

Prompt = Sequence[int]
STEPS_MAX = 100
PICTURE_PIXELS = 112


def serve_alone(served: ServedEngine, entry: Json, **more: Any) -> Json:
    """Serve one request, with nothing beside it: its ``tokens``, and how many of its prompt's were ``cached``."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    served.engine.add_request("asked", entry, params, **more)
    answer: Json = {}
    while served.engine.has_unfinished_requests():
        for output in served.engine.step():
            answer = {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
    settle(served)
    return answer


def serve_with(
    served: ServedEngine, prompt: Prompt, adapters: Sequence[str], *, load_inplace: bool = False
) -> list[Json]:
    """Serve the prompt with each adapter in turn, by its folder; "" is the model alone.

    One by one: on a CPU, vLLM 0.32 computes the model alone as with an adapter that another request of the batch has.
    """
    answers = []
    for folder in adapters:
        number = sorted({*adapters, ""}).index(folder)
        adapter = LoRARequest("adapter", number, folder, load_inplace=load_inplace) if folder else None
        answers.append(serve_alone(served, {"prompt_token_ids": list(prompt)}, lora_request=adapter))
    return answers


def serve_with_again(served: ServedEngine, prompt: Prompt, adapters: Sequence[str], **options: bool) -> list[Json]:
    """The same with an empty device."""
    served.forget()
    return serve_with(served, prompt, adapters, **options)


def serve_pictures(served: ServedEngine, asked: Sequence[Json]) -> list[Json]:
    """Serve prompts with pictures, one by one: of each its ``tokens``, and how many of its prompt's were ``cached``.

    Each asks with a ``prompt``, with the vocabulary's last token in the place of a picture, and ``pictures``, a number
    for each. It may also have ``names`` of the pictures, by which a client tells them apart, and a ``salt``.
    """
    answers = []
    for one in asked:
        entry: Json = {
            "prompt_token_ids": one["prompt"],
            "multi_modal_data": {"image": [picture(number) for number in one["pictures"]]},
        }
        if "names" in one:
            entry["multi_modal_uuids"] = {"image": one["names"]}
        if "salt" in one:
            entry["cache_salt"] = one["salt"]
        answers.append(serve_alone(served, entry))
    return answers


def picture(number: int) -> Image.Image:
    """A picture that no other number gives."""
    pixels = np.random.default_rng(number).integers(0, 256, (PICTURE_PIXELS, PICTURE_PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


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
