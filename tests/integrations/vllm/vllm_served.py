"""An engine of vLLM in this process, and what scenarios do with it. Only the processes of engines import this."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import vllm_cpu_states
from vllm import EngineArgs, PoolingParams, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

if current_platform.is_cpu():
    vllm_cpu_states.complete()

T = TypeVar("T")
Json = dict[str, Any]


def _keep_async_scheduling() -> None:
    """Let an engine on a CPU begin a step while a worker's process computes the last one, as all engines on GPUs do."""
    check = type(current_platform).check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    type(current_platform).check_and_update_config = staticmethod(check_and_keep)  # type: ignore[method-assign]


class ServedEngine:
    """vLLM's engine, stepped by hand.

    Args:
        arguments: of vLLM's EngineArgs.
    """

    def __init__(self, arguments: Json) -> None:
        if arguments.get("async_scheduling") and current_platform.is_cpu():
            _keep_async_scheduling()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._served = 0

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int = 16,
        *,
        on_step: Callable[[int, list[str]], object] = lambda step, names: None,
        salts: Sequence[str | None] = (),
    ) -> list[Json]:
        """Generate greedily for all prompts at once.

        Args:
            prompts: token ids.
            tokens: how many to generate for each.
            on_step: called after every step with its number and the ids of all requests.
            salts: ``cache_salt`` of each.

        Returns:
            Of each request its ``tokens``, how many of its prompt's were ``cached``, whether it was ``finished``, and
            the seconds until its first token.
        """
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = [f"request-{self._served + number}" for number in range(len(prompts))]
        self._served += len(prompts)
        answers: dict[str, Json] = {
            name: {"tokens": [], "cached": None, "finished": False, "first_token_s": None} for name in names
        }
        began_s = time.monotonic()
        for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            entry: Json = {"prompt_token_ids": list(prompt)}
            if salts:
                entry["cache_salt"] = salts[number]
            self.engine.add_request(name, entry, params)
        step = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                answer = answers[output.request_id]
                if answer["first_token_s"] is None:
                    answer["first_token_s"] = time.monotonic() - began_s
                answer["tokens"] = list(output.outputs[0].token_ids)
                answer["cached"] = output.num_cached_tokens
                answer["finished"] = output.finished
            step += 1
            on_step(step, names)
        return [answers[name] for name in names]

    def embed(self, prompts: Sequence[Sequence[int]]) -> list[Json]:
        """Embed all prompts at once: of each its ``embedding``, and how many of its tokens were ``cached``."""
        names = [f"request-{self._served + number}" for number in range(len(prompts))]
        self._served += len(prompts)
        answers: dict[str, Json] = {}
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, PoolingParams(task="embed"))
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                embedding = output.outputs.data.flatten().tolist()
                answers[output.request_id] = {"embedding": embedding, "cached": output.num_cached_tokens}
        return [answers[name] for name in names]

    def abort(self, names: Sequence[str]) -> None:
        """End requests before their time."""
        self.engine.abort_request(list(names))

    def forget(self) -> None:
        """Empty the device's prefix cache: what is found from now on is found in the tiers."""
        assert self.engine.reset_prefix_cache(), "requests still hold blocks of the device"

    # -- where the engine lives in this process ------------------------------------------------------------------------

    @property
    def core(self) -> Any:
        """The EngineCore of vLLM."""
        return self.engine.engine_core.engine_core

    def found(self, *kinds: type[T]) -> T:
        """The object of that kind that the connector of the scheduler leads to, however the seam is built."""
        for item in reachable(self.core.scheduler.connector):
            if isinstance(item, kinds):
                return item
        raise LookupError(f"the connector leads to no {' or '.join(kind.__name__ for kind in kinds)}")

    def settle(self) -> None:
        """Step until the connector has nothing left to do. vLLM must want these steps by itself."""
        while self.core.scheduler.has_requests():
            self.engine.step()

    def close(self) -> None:
        """Shut down in order, as the end of a server does."""
        self.engine.engine_core.shutdown()


def reachable(root: object, objects_max: int = 1_000_000) -> Iterator[object]:
    """Everything that an object leads to, nearest first, but for classes, functions and modules."""
    seen = {id(root)}
    ring = [root]
    while ring and len(seen) < objects_max:
        yield from ring
        ring = [
            item
            for item in gc.get_referents(*ring)
            if not isinstance(item, type | type(gc) | type(reachable)) and id(item) not in seen
            if not seen.add(id(item))  # type: ignore[func-returns-value]
        ]
