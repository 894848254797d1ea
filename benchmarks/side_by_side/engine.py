"""One engine process: ``python -m benchmarks.side_by_side.engine JOB.json RESULT.json``.

The real vLLM in this process, driven as its server drives it: one step after the other, and a millisecond of rest after
a step that found nothing to compute.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group

from benchmarks.page_cache import drop_page_cache
from benchmarks.side_by_side.jobs import BLOCK_TOKENS, Job, Life, StackName
from benchmarks.side_by_side.meters import SCHEDULER_CALLS, WORKER_CALLS, Meters
from benchmarks.side_by_side.prompts import Prompt, Texts, single_prompts, workload
from benchmarks.side_by_side.stacks import transfer_config

_REST_S = 0.001
"""Seconds that vLLM's own loop sleeps after a step without work, so that other threads get the interpreter."""
_SETTLE_S = 60.0
_PASS_S = 60.0
"""Seconds after which the requests of a pass are taken back."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request. ttft_s, total_s: from its arrival to its first token and to its end. tokens: generated ones."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float
    tokens: list[int]


class EngineMeters(Protocol):
    """Meters that :class:`Engine` asks."""

    @property
    def worked(self) -> bool:
        """Whether the latest step computed something."""


class Engine:
    """vLLM with one of the stacks, and meters on it.

    Attributes:
        scheduler: vLLM's.
    """

    def __init__(self, job: Job, meters: EngineMeters) -> None:
        sizes = job.sizes
        transfer = transfer_config(job)
        arguments = EngineArgs(
            model=job.model_path,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            seed=0,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=sizes.device_chunks,
            kv_cache_memory_bytes=(sizes.device_chunks + 2) * sizes.model.chunk_bytes,
            max_model_len=sizes.context_tokens,
            enable_prefix_caching=True,
            max_num_seqs=sizes.concurrency,
            max_num_batched_tokens=sizes.batch_tokens,
            async_scheduling=False,
            disable_log_stats=True,
            kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._core: Any = self._engine.engine_core.engine_core
        self.scheduler: Any = self._core.scheduler
        self._output_tokens = sizes.shape.output_tokens
        self._meters = meters

    def serve(
        self, prompts: Sequence[Prompt], at_once: int, give_up_s: float = 600.0, output_tokens: int | None = None
    ) -> Iterator[Served]:
        """Serve requests in order, at most ``at_once`` at a time. Requests that exceed ``give_up_s`` are aborted."""
        waiting, running, ended = deque(prompts), dict[str, tuple[Prompt, float]](), set[str]()
        first_s: dict[str, float] = {}
        deadline_s = time.perf_counter() + give_up_s
        while waiting or running:
            while waiting and len(running) < at_once and (waiting[0].after is None or waiting[0].after in ended):
                prompt = waiting.popleft()
                running[prompt.name] = prompt, time.perf_counter()
                self._send(prompt, output_tokens or self._output_tokens)
            if time.perf_counter() > deadline_s:
                self._engine.abort_request(list(running))
                return
            for output in self._step():
                now_s, (completion, *_) = time.perf_counter(), output.outputs
                if completion.token_ids:
                    first_s.setdefault(output.request_id, now_s)
                if output.finished:
                    prompt, sent_s = running.pop(output.request_id)
                    ended.add(prompt.name)
                    waits_s = first_s[prompt.name] - sent_s, now_s - sent_s
                    cached, tokens = output.num_cached_tokens or 0, list(completion.token_ids)
                    yield Served(prompt.name, len(prompt.tokens), cached, *waits_s, tokens)

    def _send(self, prompt: Prompt, output_tokens: int) -> None:
        parameters = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(prompt.name, {"prompt_token_ids": list(prompt.tokens)}, parameters)

    def _step(self) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        if not self._meters.worked:
            time.sleep(_REST_S)
        return outputs

    def settle(self) -> None:
        """Step until stores and writes to the tier below have ended.

        Raises:
            TimeoutError: there is no end.
        """
        deadline_s = time.perf_counter() + _SETTLE_S
        while self.scheduler.has_requests():
            self._step()
            if time.perf_counter() > deadline_s:
                raise TimeoutError(f"work is left {_SETTLE_S} s after the last request")

    def forget(self) -> None:
        """Empty the engine's own cache.

        Raises:
            RuntimeError: it refuses: blocks are still in use.
        """
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the engine's prefix cache cannot be emptied: blocks are in use")

    def close(self) -> None:
        """Shut down engine, connector and tiers."""
        self._core.shutdown()


def watch(meters: Meters, engine: Engine, job: Job) -> None:
    """Put the meters on an engine."""
    connector = engine.scheduler.connector
    if connector is not None:
        if job.counts_lookups:
            manager, names = _lookups_of(job.stack, connector)
            for name in names:
                meters.watch_count(manager, name, "lookups")
        meters.watch_connector(connector, SCHEDULER_CALLS, "scheduler")
        meters.watch_answers(connector)
        meters.watch_connector(get_kv_transfer_group(), WORKER_CALLS, "worker")
    meters.watch_engine(engine.scheduler)


def _lookups_of(stack: StackName, connector: Any) -> tuple[object, Sequence[str]]:  # noqa: ANN401 - of vLLM, or ours
    """Objects that look up chunks, with their methods. tierkv's scheduler looks up a whole run of chunks in a call."""
    if stack is StackName.CONNECTOR:
        return connector.scheduler.stack._core.wiring.manager, ("lookup", "present_prefix", "resident_prefix")  # noqa: SLF001 - no other caller needs it
    return connector.connector_scheduler.manager, ("lookup",)


class Story:
    """Runs one life of an engine and writes its phases."""

    def __init__(self, job: Job, engine: Engine, meters: Meters) -> None:
        self._job, self._engine, self._meters = job, engine, meters
        self._texts = Texts(job.seed, job.sizes.model.vocabulary)
        self.phases: dict[str, dict[str, Any]] = {}

    def tell(self) -> None:
        """Run the phases of this life."""
        self._phase("warm-up", self._single("warm-up", 2, 4), 2)
        {
            Life.FIRST: self._first,
            Life.RESTART: self._restart,
            Life.LONG: self._long,
            Life.STORED: self._store,
            Life.BURST: self._burst,
            Life.DISK: self._disk,
            Life.PASSES: self._passes,
        }[self._job.life]()

    def _first(self) -> None:
        sizes = self._job.sizes
        alone = self._single("alone", sizes.alone, sizes.alone_chunks)
        self._phase("alone, cold", alone, 1)
        self._engine.forget()
        self._phase("alone, warm", alone, 1)
        prompts = self._workload()
        self._phase("load, first pass", prompts, sizes.concurrency)
        self._engine.forget()
        self._phase("load, second pass", prompts, sizes.concurrency)

    def _restart(self) -> None:
        sizes = self._job.sizes
        self._phase("alone, restarted", self._single("alone", sizes.alone, sizes.alone_chunks), 1)
        self._engine.forget()
        self._phase("load, restarted", self._workload(), sizes.concurrency)

    def _long(self) -> None:
        sizes = self._job.sizes
        for name, chunks in (("long", sizes.long_chunks), ("longer by one", sizes.long_host_chunks + 1)):
            prompt = self._single(name, 1, chunks)
            self._phase(f"{name}, cold", prompt, 1)
            self._engine.forget()
            self._phase(f"{name}, again", prompt, 1, sizes.give_up_s)

    def _store(self) -> None:
        sizes = self._job.sizes
        self._phase("stored", self._single("burst", sizes.burst, sizes.burst_chunks), sizes.concurrency)

    def _burst(self) -> None:
        sizes = self._job.sizes
        self._phase("burst", self._single("burst", sizes.burst, sizes.burst_chunks), sizes.burst)

    def _disk(self) -> None:
        sizes = self._job.sizes
        stored = self._single("burst", sizes.burst, sizes.burst_chunks)
        drop_page_cache(Path(self._job.directory))
        self._phase("alone, from disk", stored[: sizes.alone], 1)
        self._phase("queue, from disk", stored[sizes.alone :], sizes.burst)

    def _passes(self) -> None:
        for name in ("load, first pass", "load, second pass"):
            self._phase(name, self._workload(), self._job.sizes.concurrency, _PASS_S)
            self._engine.forget()

    def _single(self, name: str, count: int, chunks: int) -> list[Prompt]:
        odd = self._job.sizes.shape.odd_tokens
        return single_prompts(name, count, chunks * BLOCK_TOKENS + odd, self._texts)

    def _workload(self) -> list[Prompt]:
        return workload(self._job.sizes.shape, BLOCK_TOKENS, self._texts, self._job.seed)

    def _phase(self, name: str, prompts: Sequence[Prompt], at_once: int, give_up_s: float = 600.0) -> None:
        # The same prompts come again under other names: a name belongs to one request.
        renamed = [
            Prompt(f"{name}: {one.name}", one.tokens, None if one.after is None else f"{name}: {one.after}")
            for one in prompts
        ]
        meters = self._meters
        meters.take()
        began_s = time.perf_counter()
        served = list(self._engine.serve(renamed, at_once, give_up_s))
        wall_s, steps_to_answer = time.perf_counter() - began_s, meters.steps
        self._engine.settle()
        self.phases[name] = {
            **meters.take().as_dict(),
            "asked": len(prompts),
            "wall_s": wall_s,
            "settled_s": time.perf_counter() - began_s - wall_s,
            "steps_to_answer": steps_to_answer,
            "requests": [asdict(one) for one in served],
        }


def main() -> None:
    """Run the life of the job in the file."""
    job_path, result_path = map(Path, sys.argv[1:])
    job = Job.of_json(json.loads(job_path.read_text(encoding="utf-8")))
    meters = Meters()
    with closing(Engine(job, meters)) as engine:  # or vLLM's shared memory would outlive a story that fails
        watch(meters, engine, job)
        story = Story(job, engine, meters)
        story.tell()
    result_path.write_text(json.dumps(story.phases), encoding="utf-8")


if __name__ == "__main__":
    main()
