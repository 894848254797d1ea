"""More prompts than the engine can run, all of them in a local tier: the share of their chunks that is loaded.

Time is simulated, so the figures are the same on every machine: an engine that runs four requests at a time, a disk
whose four threads each read a chunk in a millisecond, and a step of 20 ms. Every prompt is different, so nothing is
loaded twice. Loading is faster than computing. A chunk that is not loaded means that a lookup was answered too early.

The same prompts are served with other lookup deadlines in the same run; the limit of the completion time is the best of
them. Further rows: a request that is asked about once and then not for 5.2 s; requests that wait while four run; and a
burst in an engine that states its prefill rate, so that loading is weighed against computing, over tiers that are
faster and slower than it, or become slower meanwhile. Their limit is an engine that only computes. The last rows are
prompts that arrive behind long ones, or behind some that are given up; their limit is the same prompts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.core.rig import BLOCK_TOKENS, GEOMETRY, PAGE_BYTES, keys_of, random_hashes
from benchmarks.measure import Settings, progress
from benchmarks.rows import Row, Target
from benchmarks.stress.clocked_core import ClockedCore, without_collector
from benchmarks.stress.queue_engine import IDLE_S, PREFILL_TOKENS_PER_S, STEP_S, QueueEngine, prompt_of
from benchmarks.stress.simulated_tiers import Pace, local_tiers, shared_tier
from tierkv.types.engine import EngineSpec, GroupKind, GroupSpec, StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key

DEADLINES_S = (0.5, 2.0, 5.0, 60.0, 300.0)
ODD_TOKENS = 10
RUNNING_MAX = 4
KNOWN_PROMPTS, KNOWN_CHUNKS = 3, 8
"""Prompts that make the speed of a tier known, and their chunks."""
_FULL = GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,))
_WINDOW = GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,), GroupKind.SLIDING_WINDOW, window_tokens=8 * BLOCK_TOKENS)
WINDOWED = Geometry.of(EngineSpec("benchmark", "bfloat16", (_FULL, _WINDOW), BLOCK_TOKENS))
"""Model whose layers have full attention, or a window of eight chunks."""
USUAL_PACE = Pace()
PACES = {
    "4 times the engine's rate": Pace(0.005, 0.004),
    "half the engine's rate": Pace(0.05, 0.032),
    "a tenth of it": Pace(0.05, 0.16),
}
"""Tiers by the tokens that they deliver per second, against those that the engine computes."""
SLOW_SHARED_PACE = Pace(0.002, 0.03)
"""Of a shared tier whose questions alone take longer than computing."""
TURN_S = 0.5
"""Time after which a tier becomes slower."""
SLOWER = (10, 50, 200)
"""Factors by which it does."""
GIVEN_UP_STEPS = 20
"""Steps after which requests are given up."""
PAUSE_S = 5.2
"""Time without a question about a request: longer than the default deadline."""


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts that arrive at once, and the slots of the host tier."""

    prompts: int
    chunks: int
    slots: int
    output_tokens: int = 40
    """Tokens that each request generates."""
    shared: bool = False
    """Whether the tier is shared, so that existence is probed."""
    pace: Pace = USUAL_PACE
    """Of the tier."""
    slower: float = 1.0
    """Factor by which the tier becomes slower after ``TURN_S``."""
    running_max: int = RUNNING_MAX
    """Requests that run or load at a time."""
    prefill_tokens_per_s: float | None = None
    """Rate that the engine states; None: none."""
    known_prompts: int = 0
    """Prompts of a few chunks that are served before, so that the speed of the tier is known."""
    is_stored: bool = True
    """Whether the tier has the prompts."""
    geometry: Geometry = GEOMETRY
    """Of the engine's chunks."""

    @property
    def total(self) -> int:
        """Chunks of all prompts."""
        return self.prompts * self.chunks


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of serving a load."""

    completion_s: float
    loaded_chunks: int
    computed_tokens: int
    chunks_read: int
    deadlines_expired: int

    @property
    def read_per_loaded(self) -> float:
        """Chunks read for each one that was loaded."""
        return self.chunks_read / max(1, self.loaded_chunks)


def make_core(load: Load, deadline_s: float | None) -> tuple[ClockedCore, list[list[bytes]], list[list[bytes]]]:
    """Core over a tier that has all prompts, and the hashes of those served before, and of the load."""
    before = [random_hashes(KNOWN_CHUNKS, seed=1 + load.prompts + number) for number in range(load.known_prompts)]
    hashes = [random_hashes(load.chunks, seed=1 + number) for number in range(load.prompts)]
    groups, stored = load.geometry.groups, (*before, *hashes) if load.is_stored else ()
    keys = [make_key(each, group.index) for prompt in stored for group in groups for each in prompt]
    tiers = [shared_tier(0)] if load.shared else local_tiers(load.geometry.payload_bytes_max, [keys])
    rate = load.prefill_tokens_per_s
    core = ClockedCore(load.geometry, load.slots, tiers, [load.pace], deadline_s=deadline_s, prefill_tokens_per_s=rate)
    return core, before, hashes


def serve(load: Load, deadline_s: float | None = None) -> Outcome:
    """Serve a load to its end. deadline_s: of lookups; None: the default."""
    clocked, before, hashes = make_core(load, deadline_s)
    for number, prompt in enumerate(before):
        QueueEngine(clocked, [prompt_of(f"before-{number}", prompt, ODD_TOKENS)], 1, 1).serve()
    turned = Pace(load.pace.latency_s * load.slower, load.pace.chunk_s * load.slower)
    clocked.tiers.change_pace(0, clocked.now_s + TURN_S, turned)
    expired, read = clocked.core.counters.deadlines_expired, clocked.tiers.chunks_read
    prompts = [prompt_of(f"request-{number}", prompt, ODD_TOKENS) for number, prompt in enumerate(hashes)]
    engine = QueueEngine(clocked, prompts, load.running_max, load.output_tokens)
    completion_s = engine.serve()
    loaded = sum(served.loaded for served in engine.done) // BLOCK_TOKENS
    expired = clocked.core.counters.deadlines_expired - expired
    return Outcome(completion_s, loaded, engine.computed_tokens, clocked.tiers.chunks_read - read, expired)


def run(settings: Settings) -> Iterator[Row]:
    """Measure the overload, its completion time beside other deadlines, and two smaller cases."""
    load = settings.pick(Load(120, 60, 64), Load(8, 6, 8))
    with without_collector():
        default = serve(load)
        progress(f"overload: default deadline, {default.completion_s:.1f} s simulated")
        yield _share(f"{load.prompts} prompts of {load.chunks} chunks over {load.slots} slots", load, default)
        others: dict[float, float] = {}
        for deadline_s in DEADLINES_S:
            others[deadline_s] = serve(load, deadline_s).completion_s
            progress(f"overload: deadline {deadline_s:g} s, {others[deadline_s]:.1f} s simulated")
        best = "best of the deadlines " + ", ".join(f"{deadline_s:g}" for deadline_s in DEADLINES_S) + " s"
        extra = {f"with a deadline of {deadline_s:g} s": took_s for deadline_s, took_s in others.items()}
        yield _seconds(
            "completion of the same prompts", default.completion_s, best, min(others.values()), at_most=1.1, extra=extra
        )
        roomy = settings.pick(Load(24, 40, 512, 100), Load(6, 4, 64))
        what = f"{roomy.prompts} prompts of {roomy.chunks} chunks over {roomy.slots} slots"
        yield _share(
            f"{what}, {RUNNING_MAX} running for {roomy.output_tokens * STEP_S:.1f} s each", roomy, serve(roomy)
        )
        yield from _weighed(settings)
        yield from _pauses(settings.pick(500, 8))
        yield from _beside_long_prompts(settings)
        yield _beside_given_up(settings)


def _weighed(settings: Settings) -> Iterator[Row]:
    """Rows of a burst in an engine that states its prefill rate, over a host tier for all prompts or for a part."""
    prompts, chunks = settings.pick((120, 60), (6, 8))
    rate, slots = PREFILL_TOKENS_PER_S, 2 * prompts * chunks
    load = Load(prompts, chunks, slots, running_max=64, prefill_tokens_per_s=rate, known_prompts=KNOWN_PROMPTS)
    what = f"{prompts} prompts of {chunks} chunks over {load.slots} slots, prefill rate stated"
    yield _share(what, load, serve(load))
    computed = serve(replace(load, is_stored=False))
    cases = {
        f"tier of {times}, {'known' if known else 'after a start'}": replace(load, pace=pace, known_prompts=known)
        for times, pace in PACES.items()
        for known in (KNOWN_PROMPTS, 0)
    }
    cases |= {f"{name}, {chunks} slots": replace(case, slots=chunks) for name, case in list(cases.items())[-1:]}
    windowed = replace(load, slots=2 * load.slots, geometry=WINDOWED)
    slower = {f"tier that becomes {times} times slower after {TURN_S:g} s": times for times in SLOWER}
    cases |= {name: replace(load, slower=times) for name, times in slower.items()}
    cases |= {f"{name}, windows in the model": replace(windowed, slower=times) for name, times in slower.items()}
    for name, case in cases.items():
        yield _beside_computing(f"completion of the same, {name}", case, computed)
    yield from _over_shared_tiers(settings)
    long_prompts, long_chunks, slots = settings.pick((8, 2_000, 512), (1, 64, 16))
    long = replace(load, prompts=long_prompts, chunks=long_chunks, slots=slots)
    computed = serve(replace(long, is_stored=False))
    for name, times in slower.items():
        what = f"{long.prompts} prompts of {long.chunks:,} chunks over {long.slots} slots, {name}"
        yield _beside_computing(what, replace(long, slower=times), computed)
        windowed = replace(long, slower=times, slots=2 * long.slots, geometry=WINDOWED)
        yield _beside_computing(f"{what}, windows in the model", windowed, computed)


def _over_shared_tiers(settings: Settings) -> Iterator[Row]:
    """Rows of prompts in a shared tier: one that is faster than computing, and one whose questions alone are slower."""
    prompts, chunks = settings.pick((120, 60), (6, 8))
    load = Load(prompts, chunks, 2 * prompts * chunks, shared=True, pace=Pace(0.005, 0.004), running_max=64)
    load = replace(load, prefill_tokens_per_s=PREFILL_TOKENS_PER_S, known_prompts=KNOWN_PROMPTS)
    what = f"{prompts} prompts of {chunks} chunks in a shared tier that is asked and read in half the time of computing"
    yield _share(what, load, serve(load))
    prompts, chunks = settings.pick((3, 300), (2, 16))
    load = Load(prompts, chunks, 2 * prompts * chunks, shared=True, pace=SLOW_SHARED_PACE, running_max=64)
    load = replace(load, prefill_tokens_per_s=PREFILL_TOKENS_PER_S, known_prompts=KNOWN_PROMPTS)
    computed = serve(replace(load, is_stored=False, shared=False))
    for threads in (load.pace.threads, 1):
        what = f"{prompts} prompts of {chunks} chunks in a shared tier that takes {load.pace.chunk_s:g} s per chunk"
        pace = replace(load.pace, threads=threads)
        yield _beside_computing(f"{what}, {threads} calls at a time", replace(load, pace=pace), computed)


def _beside_computing(what: str, load: Load, computed: Outcome) -> Row:
    """Row of the completion of a load, beside that of an engine that only computes."""
    outcome = serve(load)
    progress(f"overload: {what}, {outcome.completion_s:.1f} s simulated")
    extra = {
        "chunks loaded per chunk in the tier": outcome.loaded_chunks / load.total,
        "chunks read per chunk loaded": outcome.read_per_loaded,
    }
    return _seconds(
        what, outcome.completion_s, "an engine that only computes", computed.completion_s, at_most=1.1, extra=extra
    )


def _pauses(chunks: int) -> Iterator[Row]:
    """Rows of a request that is asked about once, and then not for a while."""
    for where, load in {
        "in a local tier": Load(1, chunks, 2 * chunks),
        "in a local tier, host tier for half of it": Load(1, chunks, chunks // 2),
        "in a shared tier": Load(1, chunks, 2 * chunks, shared=True),
    }.items():
        what = f"{chunks} chunks {where}, asked once, then not for {PAUSE_S:g} s"
        yield _after_pause(load, what, steps=True)
        yield _after_pause(load, f"{what}, without steps", steps=False)


def _beside_long_prompts(settings: Settings) -> Iterator[Row]:
    """Rows of short prompts that arrive together with long ones, behind them, over a large host tier."""
    count, chunks = settings.pick(200, 8), 12
    num_long, long_chunks = 3, settings.pick(8_192, 64)
    load = Load(count + num_long, chunks, 2 * (count * chunks + num_long * long_chunks), running_max=1_000)
    short = [random_hashes(chunks, seed=1 + number) for number in range(count)]
    long = [random_hashes(long_chunks, seed=1 + count + number) for number in range(num_long)]
    what = f"{count} prompts of {chunks} chunks behind {num_long} of {long_chunks:,}"
    yield from _rows_of_waits(load, long, short, what)
    shared = chunks // 2
    short = [long[number % num_long][:shared] + prompt[shared:] for number, prompt in enumerate(short)]
    what = f"{count} prompts of {chunks} chunks, {shared} of them the beginning of one of {num_long} of {long_chunks:,}"
    yield from _rows_of_waits(load, long, short, what)


def _beside_given_up(settings: Settings) -> Row:
    """Row of prompts that arrive behind others which are given up, as clients do that wait no longer."""
    kept, given_up, chunks = 10, *settings.pick((90, 60), (5, 8))
    alone_s = _longest_wait(Load(kept, chunks, 4 * (kept + given_up) * chunks, running_max=1_000), 0)
    wait_s = _longest_wait(Load(kept + given_up, chunks, 4 * (kept + given_up) * chunks, running_max=1_000), given_up)
    what = f"{kept} prompts of {chunks} chunks behind {given_up} that are given up after {GIVEN_UP_STEPS} steps"
    return _seconds(f"{what}, longest wait", wait_s, "the same number alone", alone_s, at_most=2.0, extra={})


def _longest_wait(load: Load, given_up: int) -> float:
    """Longest wait of the prompts behind those that are given up."""
    clocked, _, hashes = make_core(load, None)
    prompts = [prompt_of(str(number), prompt, ODD_TOKENS) for number, prompt in enumerate(hashes)]
    engine = QueueEngine(clocked, prompts, load.running_max, output_tokens=1)
    for _ in range(GIVEN_UP_STEPS):
        engine.step()
    ids = {prompt.request_id for prompt in prompts[:given_up]}
    engine.give_up(ids)
    engine.serve()
    return max(served.waited_s for served in engine.done if served.request.request_id not in ids)


def _rows_of_waits(load: Load, long: list[list[bytes]], short: list[list[bytes]], prompts: str) -> Iterator[Row]:
    """Rows of the waits of short prompts behind long ones, beside the same prompts alone."""
    alone = _waits(load, [], short)
    waits = _waits(load, long, short)
    for what, share in {"median": 0.5, "longest": 1.0}.items():
        own_s, limit_s = _quantile(waits, share), _quantile(alone, share)
        yield _seconds(f"{prompts}, {what} wait", own_s, "the same prompts alone", limit_s, at_most=2.0, extra={})


def _waits(load: Load, long: list[list[bytes]], short: list[list[bytes]]) -> list[float]:
    """Seconds until each of the short prompts runs, ascending. All of them are in a local tier."""
    keys = [key for prompt in (*long, *short) for key in keys_of(prompt)]
    tiers = local_tiers(GEOMETRY.payload_bytes_max, [list(dict.fromkeys(keys))])
    clocked = ClockedCore(GEOMETRY, load.slots, tiers, [load.pace])
    prompts = [prompt_of(f"long-{number}", prompt, ODD_TOKENS) for number, prompt in enumerate(long)]
    prompts += [prompt_of(f"short-{number}", prompt, ODD_TOKENS) for number, prompt in enumerate(short)]
    engine = QueueEngine(clocked, prompts, load.running_max, output_tokens=1)
    engine.serve()
    return sorted(served.waited_s for served in engine.done if served.request.request_id.startswith("short"))


def _quantile(ascending: list[float], share: float) -> float:
    return ascending[round(share * (len(ascending) - 1))]


def _seconds(  # noqa: PLR0913 - a row
    what: str, seconds: float, limit: str, limit_s: float, *, at_most: float, extra: dict[str, float]
) -> Row:
    """Row of simulated seconds beside a limit, with the ratio that is aimed at."""
    return Row(what, "s, simulated", seconds, limit, limit_s, target=Target("ratio", "<=", at_most), extra=extra)


def _share(what: str, load: Load, outcome: Outcome) -> Row:
    return Row(
        what,
        "chunks loaded",
        outcome.loaded_chunks,
        "chunks in the tier",
        load.total,
        target=Target("ratio", ">=", 0.95),
        extra={
            "prompt tokens computed": outcome.computed_tokens,
            "the fewest possible": load.prompts * ODD_TOKENS,
            "chunks read per chunk loaded": outcome.read_per_loaded,
            "lookups that missed their deadline": outcome.deadlines_expired,
            "completion, s simulated": outcome.completion_s,
            "an engine that only computes would need, s": _computing_s(load),
        },
    )


def _computing_s(load: Load) -> float:
    """Least time in which an engine without tiers serves a load."""
    prompt_s = (load.chunks * BLOCK_TOKENS + ODD_TOKENS) / PREFILL_TOKENS_PER_S
    return load.prompts * (prompt_s + load.output_tokens * STEP_S / RUNNING_MAX)


def _after_pause(load: Load, what: str, *, steps: bool) -> Row:
    """Ask about one request, do not ask for a while, then ask until the answer."""
    clocked, _, (hashes,) = make_core(load, None)
    request = prompt_of("request", hashes, ODD_TOKENS)
    clocked.on_new_request(request)
    tokens = clocked.ask(request)
    clocked.end_step(StepOutput(), STEP_S)
    if steps:
        for _ in range(int(PAUSE_S / STEP_S)):
            clocked.end_step(StepOutput(), STEP_S)
    else:
        clocked.now_s += PAUSE_S
    deferrals = 0
    while tokens is None:
        tokens = clocked.ask(request)
        clocked.end_step(StepOutput(), IDLE_S)
        deferrals += tokens is None
    return Row(
        what,
        "chunks offered",
        tokens // BLOCK_TOKENS,
        "chunks in the tier",
        load.total,
        target=Target("ratio", ">=", 0.95),
        extra={"further deferrals": deferrals},
    )
