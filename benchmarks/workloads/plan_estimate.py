"""Times to the first token as ``tierkv plan`` estimates them, beside those of the reference engine.

The engine serves conversations that arrive in real time: without a cache, then over a host tier and a disk. What a plan
assumes is measured: tokens per second in the run without a cache, and the speed of loads from either tier. The engine's
own prefix cache is off, since a plan leaves it out. Time is the processor time of the engine's thread and the time in
which it waits for loads or arrivals, so other processes matter little.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Settings, progress
from benchmarks.rows import Row
from tierkv.config.loading import parse_config
from tierkv.config.resolving import resolve
from tierkv.frames.frame import frame_bytes
from tierkv.planning.assumptions import Assumptions, TierSpeed
from tierkv.planning.plan import make_plan
from tierkv.plugins.loading import load_plugins
from tierkv.reference.configs import EngineConfig
from tierkv.replay.trace import load_trace
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack

CHUNK_TOKENS = 64
IDLE_S = 0.0005
BUSY = 0.6
"""Share of its time for which the engine would be busy without a cache."""
CONTINUES = 0.6
"""Share of prompts that continue an earlier one."""
PROMPT_CHUNKS_MAX = 24
CONFIG = EngineConfig(num_blocks=4 * PROMPT_CHUNKS_MAX * 8, prefix_caching=False, max_running=4)
CHUNK_BYTES = sum(sum(group.page_bytes) for group in CONFIG.engine_spec().groups) * CHUNK_TOKENS // CONFIG.block_tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt as a list of chunks, and its time."""

    at_s: float
    chunks: list[int]

    @property
    def tokens(self) -> list[int]:
        """Tokens of the prompt, and one behind its chunks."""
        drawn = [random.Random(chunk).choices(range(1, CONFIG.model.vocab), k=CHUNK_TOKENS) for chunk in self.chunks]
        return [token for chunk in drawn for token in chunk] + [1]


class _Clock:
    """Processor time of this thread, and the time that it slept."""

    def __init__(self) -> None:
        self._slept_s = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.thread_time() + self._slept_s

    def sleep(self, seconds: float = IDLE_S) -> None:
        """Wait."""
        began_s = time.monotonic()
        time.sleep(seconds)
        self._slept_s += time.monotonic() - began_s


@dataclass(frozen=True, slots=True)
class Measured:
    """Waiting times of a run, in seconds, the share of chunks that were loaded, and the rate of computation."""

    waits_s: Sequence[float]
    loaded: float
    tokens_per_s: float

    def quantile(self, share: float) -> float:
        """Waiting time that ``share`` of the requests do not exceed."""
        return float(np.percentile(self.waits_s, 100 * share))


def run(settings: Settings) -> Iterator[Row]:
    """Compare the median and the 95 % of both runs."""
    if importlib.util.find_spec("torch") is None:
        sys.stderr.write("plan_estimate: torch is not installed here, so there is no reference engine\n")
        return
    import torch  # noqa: PLC0415 - where this benchmark runs

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
        prompts = _conversations(settings.pick(80, 6))
        rate = _prefill_rate(prompts[: settings.pick(20, 3)])
        arrivals = _arrivals(prompts, rate)
        longest = max(len(arrival.chunks) for arrival in arrivals)
        described = _stack(Path(folder), host_chunks=2 * longest, disk_chunks=settings.pick(1_000, 200))
        speeds = _speeds(described, settings.pick(5, 1))
        alone = _serve(arrivals, None)
        progress(f"plan_estimate: {alone.tokens_per_s:,.0f} tokens/s (prompts alone: {rate:,.0f}); {speeds}")
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("".join(_line(arrival) for arrival in arrivals), encoding="utf-8")
        registry = load_plugins()
        assumed = Assumptions(alone.tokens_per_s, CHUNK_TOKENS, CHUNK_BYTES, engines=1, speeds=speeds)
        planned = {"stack": resolve(parse_config(described), registry)}
        plan = make_plan(load_trace(trace), planned, registry, assumed)
        (stack,) = plan.stacks
        with _opened(described, Path(folder) / "served") as opened:
            cached = _serve(arrivals, opened)
    for name, measured, fleet in (("without a cache", alone, plan.without), ("with two tiers", cached, stack.fleet)):
        for share, estimated in ((0.5, fleet.ttft_p50_s), (0.95, fleet.ttft_p95_s)):
            yield Row(
                f"first token {name}, {100 * share:.0f} %, estimated",
                "ms",
                1000 * estimated,
                "measured in the reference engine",
                1000 * measured.quantile(share),
            )
    yield Row(
        "chunks found, estimated", "%", stack.hit_percent - 100 * stack.slow / max(1, stack.chunks),
        "measured", 100 * cached.loaded,
    )  # fmt: skip


def _line(arrival: Arrival) -> str:
    fields = {"timestamp": 1000 * arrival.at_s, "hash_ids": arrival.chunks, "input_length": len(arrival.tokens)}
    return json.dumps(fields) + "\n"


def _conversations(count: int) -> list[list[int]]:
    """Prompts of conversations that go on, as chunks."""
    rng, fresh = random.Random(11), iter(range(1, 10**9))
    prompts: list[list[int]] = []
    open_ones: list[list[int]] = []
    for _ in range(count):
        if open_ones and rng.random() < CONTINUES:
            prompt = open_ones.pop(rng.randrange(len(open_ones)))
        else:
            prompt = [next(fresh) for _ in range(rng.randrange(2, 8))]
        prompt = prompt + [next(fresh) for _ in range(rng.randrange(1, 6))]
        prompts.append(prompt)
        if len(prompt) < PROMPT_CHUNKS_MAX - 6:
            open_ones.append(prompt)
    return prompts


def _arrivals(prompts: Sequence[list[int]], rate: float) -> list[Arrival]:
    """Prompts at the times of a Poisson process."""
    rng, arrivals = random.Random(12), list[Arrival]()
    seconds = statistics.mean(len(prompt) for prompt in prompts) * CHUNK_TOKENS / rate
    at_s = 0.0
    for prompt in prompts:
        at_s += rng.expovariate(BUSY / seconds)
        arrivals.append(Arrival(at_s, prompt))
    return arrivals


def _stack(folder: Path, host_chunks: int, disk_chunks: int) -> dict[str, Any]:
    size = frame_bytes(CHUNK_BYTES)
    disk = {"backend": "disk", "path": str(folder / "disk"), "capacity": disk_chunks * size, "min_free_bytes": 0}
    return {
        "chunk": {"tokens": CHUNK_TOKENS},
        "host": {"capacity": host_chunks * size},
        "tiers": [{**disk, "segment_bytes": 64 * size}],
    }


def _opened(described: dict[str, Any], place: Path) -> Stack:
    tiers = [{**tier, "path": str(place)} for tier in described["tiers"]]
    return open_stack({**described, "tiers": tiers}, CONFIG.engine_spec())


def _prefill_rate(prompts: Sequence[list[int]]) -> float:
    """Tokens per second of prompts of the workload, each alone. Long ones take longer per token."""
    alone = [Arrival(0.0, prompt) for prompt in prompts]
    _serve(alone[:1], None)  # warms up
    seconds = sum(_serve([arrival], None).waits_s[0] for arrival in alone)
    return sum(len(arrival.tokens) for arrival in alone) / seconds


def _speeds(described: dict[str, Any], rounds: int) -> dict[str, TierSpeed]:
    """Speeds of loads from the host tier and from the disk, of one prompt alone."""
    prompts = [Arrival(0.0, [10**6 + n]) for n in range(2)]
    longest = Arrival(0.0, list(range(10**7, 10**7 + PROMPT_CHUNKS_MAX)))
    found: dict[str, TierSpeed] = {}
    place = Path(described["tiers"][0]["path"])
    for tier in ("host", "disk"):
        with _opened(described, place) as stack:
            if tier == "host":
                _serve([longest, *prompts], stack)
                stack.flush()
            times_s = []
            for _ in range(rounds if tier == "host" else 1):
                times_s.append(_serve([longest], stack).waits_s[0])
            short_s = _serve([prompts[0]], stack).waits_s[0]
        chunk_s = max(1e-6, (statistics.median(times_s) - short_s) / (PROMPT_CHUNKS_MAX - 1))
        found[tier] = TierSpeed(CHUNK_BYTES / chunk_s, max(0.0, short_s - chunk_s))
    return found


def _serve(arrivals: Sequence[Arrival], stack: Stack | None) -> Measured:
    """Serve prompts at their times, in a new engine. Each gets one token."""
    from tierkv.reference.engine import Engine  # noqa: PLC0415 - torch, where this benchmark runs

    clock = _Clock()
    engine = Engine(CONFIG, connector=stack, clock=clock.now, idle=clock.sleep)
    waiting, names = list(reversed(arrivals)), list[str]()
    prompts = {id(arrival): arrival.tokens for arrival in arrivals}
    began_s = clock.now()
    due: dict[str, float] = {}
    busy_s = 0.0
    while waiting or engine.has_unfinished:
        now_s = clock.now() - began_s
        while waiting and waiting[-1].at_s <= now_s:
            arrival = waiting.pop()
            names.append(engine.add_request(prompts[id(arrival)], 1))
            due[names[-1]] = began_s + arrival.at_s
        if engine.has_work:
            step_s = clock.now()
            if engine.step().output.scheduled:
                busy_s += clock.now() - step_s
        else:
            clock.sleep()
    engine.drain()
    records = [engine.record(name) for name in names]
    waits_s = [(record.first_token_s or 0.0) - due[record.request_id] for record in records]
    asked = sum(len(arrival.chunks) for arrival in arrivals) * CHUNK_TOKENS
    loaded = sum(record.tokens_loaded for record in records)
    computed = sum(record.tokens_computed for record in records)
    return Measured(waits_s, loaded / asked, computed / max(1e-9, busy_s))
