"""The parts of ``vllm_ab`` that need no engine: its workload, its meters, and how figures become rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.side_by_side.figures import rows
from benchmarks.side_by_side.jobs import BLOCK_TOKENS, Job, Life, ModelShape, Sizes, StackName
from benchmarks.side_by_side.meters import SCHEDULER_CALLS, WORKER_CALLS, Meters, Summary, os_bytes_read
from benchmarks.side_by_side.prompts import (
    Prompt,
    Shape,
    Texts,
    cacheable_tokens,
    distinct_chunks,
    single_prompts,
    workload,
)
from benchmarks.side_by_side.stacks import transfer_config
from benchmarks.side_by_side.table import markdown
from benchmarks.side_by_side.vllm_ab import FULL, QUICK, in_turns
from tierkv.config.schema import StackConfig
from tierkv.frames.frame import frame_bytes

SHAPE = Shape(
    personas=2,
    persona_chunks=3,
    conversations=5,
    turns=(2, 3),
    turn_chunks=(1, 4),
    one_shots=4,
    one_shot_chunks=(5, 7),
    output_tokens=4,
)
STACKS = list(StackName)
OFFLOADING = STACKS[1:]


def made(seed: int = 7, shape: Shape = SHAPE) -> list[Prompt]:
    """A workload."""
    return workload(shape, BLOCK_TOKENS, Texts(seed, 1000), seed)


def a_job(stack: StackName, life: Life = Life.FIRST, sizes: Sizes = QUICK) -> Job:
    """A job."""
    return Job(stack, life, sizes, "/model", "/below", 1, counts_lookups=True)


# -- the workload ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_prompts() -> None:
    """Stacks are compared across processes: each must make the same prompts for itself."""
    assert made(7) == made(7)
    assert made(7) != made(8)


def test_a_turn_repeats_what_was_said_and_comes_after_it() -> None:
    """Shared prefixes are what a cache can hit; and a user asks on only after an answer."""
    prompts = made()
    by_name = {prompt.name: prompt for prompt in prompts}
    turns = [prompt for prompt in prompts if prompt.after is not None]
    assert turns
    for prompt in turns:
        before = by_name[str(prompt.after)]
        history = before.tokens[: -SHAPE.odd_tokens]
        assert prompt.tokens[: len(history)] == history
        assert len(prompt.tokens) > len(before.tokens)
        assert prompts.index(before) < prompts.index(prompt)


def test_sizes_are_those_asked_for() -> None:
    """A benchmark of sixty chunks that makes six measures something else."""
    prompts = made()
    one_shots = [prompt for prompt in prompts if prompt.name.startswith("one-shot")]
    assert len(one_shots) == SHAPE.one_shots
    assert all(5 <= len(prompt.tokens) // BLOCK_TOKENS <= 7 for prompt in one_shots)
    assert all(len(prompt.tokens) % BLOCK_TOKENS == SHAPE.odd_tokens for prompt in prompts)
    first = [prompt for prompt in prompts if prompt.name.endswith(".0")]
    assert len(first) == SHAPE.conversations
    shared = {prompt.tokens[: SHAPE.persona_chunks * BLOCK_TOKENS] for prompt in first}
    assert len(shared) == SHAPE.personas
    assert all(3 <= token < 1000 for prompt in prompts for token in prompt.tokens)


def test_what_can_be_cached_is_counted_by_whole_chunks() -> None:
    """The limit beside "cached tokens" must be one that a perfect cache reaches."""
    prompts = [Prompt("a", tuple(range(70))), Prompt("b", (*range(32), *range(100, 140)))]
    assert cacheable_tokens(prompts, 32) == 128
    assert distinct_chunks(prompts, 32) == 3  # the first chunk is the same; a later one also has its past
    assert distinct_chunks([*prompts, Prompt("c", tuple(range(32, 64)))], 32) == 4


def test_single_prompts_share_nothing() -> None:
    """A cold prompt that hits is not cold."""
    prompts = single_prompts("alone", 3, 2 * BLOCK_TOKENS + 5, Texts(1, 1000))
    assert distinct_chunks(prompts, BLOCK_TOKENS) == 6
    assert prompts[0].tokens != single_prompts("long", 1, 69, Texts(1, 1000))[0].tokens


@pytest.mark.parametrize("sizes", [FULL, QUICK], ids=["full", "quick"])
def test_the_workload_presses_on_the_cpu_tier(sizes: Sizes) -> None:
    """Without eviction from the CPU tier nothing below it matters; and no prompt may be longer than the context."""
    prompts = workload(sizes.shape, BLOCK_TOKENS, Texts(0, sizes.model.vocabulary), 0)
    assert distinct_chunks(prompts, BLOCK_TOKENS) > sizes.host_chunks
    assert max(len(prompt.tokens) for prompt in prompts) + sizes.shape.output_tokens <= sizes.context_tokens
    assert sizes.long_chunks > sizes.long_host_chunks
    assert sizes.device_chunks > sizes.context_tokens // BLOCK_TOKENS


# -- jobs and stacks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
def test_a_job_survives_its_file(stack: StackName) -> None:
    """The other process must follow its job."""
    job = a_job(stack, Life.LONG)
    text = json.dumps(asdict(job), default=lambda member: member.value)
    assert Job.of_json(json.loads(text)) == job


@pytest.mark.parametrize("life", [Life.FIRST, Life.LONG])
def test_stacks_have_the_same_room(life: Life) -> None:
    """A larger CPU tier would explain every difference."""
    chunks = QUICK.long_host_chunks if life is Life.LONG else QUICK.host_chunks
    theirs = transfer_config(a_job(StackName.VLLM, life))
    assert theirs is not None
    assert theirs["kv_connector_extra_config"]["cpu_bytes_to_use"] == chunks * QUICK.model.chunk_bytes
    for stack in (StackName.SPEC, StackName.CONNECTOR):
        ours = transfer_config(a_job(stack, life))
        assert ours is not None
        config = StackConfig.model_validate(ours["kv_connector_extra_config"]["tierkv"])
        assert config.host.capacity // frame_bytes(QUICK.model.chunk_bytes) == chunks
        assert [tier.backend for tier in config.tiers] == ["disk"]
    assert transfer_config(a_job(StackName.NONE, life)) is None


def test_every_round_has_all_stacks_in_another_order() -> None:
    """Whatever changes during a run, a neighbour or the heat, meets all alike."""
    orders = [in_turns(number, STACKS) for number in range(4)]
    firsts = [[stack for stack, life in order if life is Life.FIRST] for order in orders]
    assert all(sorted(first, key=STACKS.index) == STACKS for first in firsts)
    assert len({tuple(first) for first in firsts}) == 4
    for order in orders:
        assert {stack for stack, life in order if life is Life.RESTART} == set(OFFLOADING)
        assert all(order.index((stack, Life.FIRST)) < order.index((stack, Life.RESTART)) for stack in OFFLOADING)
    assert [sum(life is Life.LONG for _, life in order) for order in orders] == [3, 0, 0, 0]


# -- meters ------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that a fake engine lets pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeConnector:
    """Takes the given time; answers "not known yet" first."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.answers: Iterator[tuple[int | None, bool]] = iter([(None, False), (64, True)])

    def get_num_new_matched_tokens(self, request: object, computed: int) -> tuple[int | None, bool]:
        self.clock.now_s += 0.25
        return next(self.answers)

    def update_state_after_alloc(self, request: object, blocks: object, num_external_tokens: int) -> None:
        self.clock.now_s += 0.5

    def start_load_kv(self) -> None:
        self.clock.now_s += 2.0


class FakeScheduler:
    """Asks its connector once per step; the second step computes 100 tokens."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.connector = FakeConnector(clock)

    def schedule(self) -> Any:
        self.clock.now_s += 1.0
        tokens, _ = self.connector.get_num_new_matched_tokens(None, 0)
        if tokens is not None:
            self.connector.update_state_after_alloc(None, (), num_external_tokens=tokens)
        return SimpleNamespace(total_num_scheduled_tokens=100 if tokens else 0)

    def update_from_output(self, output: object) -> str:
        self.clock.now_s += 4.0
        return "passed on"


def watched_engine() -> tuple[Meters, FakeScheduler]:
    """As the engine process sets it up."""
    clock = Clock()
    scheduler, meters = FakeScheduler(clock), Meters(clock, clock)
    meters.watch_connector(scheduler.connector, SCHEDULER_CALLS, "scheduler")
    meters.watch_answers(scheduler.connector)
    meters.watch_connector(scheduler.connector, WORKER_CALLS, "worker")
    meters.watch_engine(scheduler)
    return meters, scheduler


def test_a_step_is_what_lies_between_schedule_and_update() -> None:
    """The engine's forward pass is not overhead, and steps that only wait are counted apart from those with work."""
    meters, scheduler = watched_engine()
    scheduler.schedule()
    assert not meters.worked
    scheduler.update_from_output(None)
    scheduler.clock.now_s += 1000.0  # between two steps
    scheduler.schedule()
    assert meters.worked
    scheduler.clock.now_s += 1000.0  # the forward pass
    scheduler.connector.start_load_kv()
    assert scheduler.update_from_output(None) == "passed on"
    assert meters.steps == 2
    phase = meters.take().as_dict()
    assert (phase["steps"], phase["working_steps"]) == (2, 1)
    assert phase["scheduling"]["max_s"] == 1.0 + 0.25 + 0.5 + 4.0
    assert phase["idle_scheduling"]["max_s"] == 1.0 + 0.25 + 4.0
    assert phase["connector"]["max_s"] == 0.25 + 0.5 + 2.0
    assert phase["every_call"]["count"] == 4
    assert phase["calls"]["start_load_kv"]["total_s"] == 2.0
    assert phase["counts"] == {"questions": 2, "deferrals": 1, "tokens_loaded": 64}


def test_a_phase_begins_where_the_last_one_was_taken() -> None:
    """Warming up must not be in the figures."""
    meters, scheduler = watched_engine()
    scheduler.schedule()
    meters.take()
    phase = meters.take().as_dict()
    assert phase["steps"] == phase["every_call"]["count"] == 0
    assert phase["counts"] == {}


def test_lookups_are_counted_where_they_are_made() -> None:
    """The count is of calls, not of what they find."""
    meters, manager = Meters(), SimpleNamespace(lookup=lambda key: key)
    meters.watch_count(manager, "lookup", "lookups")
    assert [manager.lookup(key) for key in "abc"] == ["a", "b", "c"]
    assert meters.take().counts == {"lookups": 3}


def test_reads_are_counted_by_the_kernel(tmp_path: Any) -> None:
    """A stack's own word about what it reads would be one side's word."""
    path = tmp_path / "file"
    path.write_bytes(bytes(3_000_000))
    before = os_bytes_read()
    path.read_bytes()
    assert 3_000_000 <= os_bytes_read() - before < 3_100_000


def test_a_summary_has_the_nearest_rank() -> None:
    """Of a hundred calls the p99 is the ninety-ninth, not the worst and not one between."""
    summary = Summary.of([*range(100, 0, -1)])
    assert summary == Summary(count=100, total_s=5050, median_s=50.5, p99_s=99, max_s=100)
    assert Summary.of([3.0]) == Summary(1, 3.0, 3.0, 3.0, 3.0)
    assert Summary.of([]) == Summary()


# -- rows --------------------------------------------------------------------------------------------------------------


def a_phase(*, ttft_s: float, cached: int, loaded: int = 0, read: int = 0, tokens: int = 1) -> dict[str, Any]:
    """One request of 100 tokens."""
    step = asdict(Summary(4, 4 * ttft_s / 100, ttft_s / 100, ttft_s / 50, ttft_s / 40))
    return {
        "asked": 1,
        "wall_s": ttft_s + 1,
        "steps": 6,
        "working_steps": 4,
        "steps_to_answer": 5,
        **dict.fromkeys(("scheduling", "scheduling_cpu", "idle_scheduling", "connector", "every_call"), step),
        "calls": {},
        "counts": {"tokens_loaded": loaded, "lookups": 12, "questions": 3, "deferrals": 2},
        "bytes_read": read,
        "requests": [
            {
                "name": "a phase: conversation-0.0",
                "prompt_tokens": 100,
                "cached_tokens": cached,
                "ttft_s": ttft_s,
                "total_s": ttft_s,
                "tokens": [tokens],
            }
        ],
    }


NAMES = {
    Life.FIRST: ("alone, cold", "alone, warm", "load, first pass", "load, second pass"),
    Life.RESTART: ("alone, restarted", "load, restarted"),
    Life.LONG: ("long, cold", "long, again", "longer by one, cold", "longer by one, again"),
}


def a_round(factor: float, *, with_long: bool) -> dict[tuple[StackName, Life], dict[str, dict[str, Any]]]:
    """Without offloading 2 s and nothing cached; with it ``factor`` of that, and 96 of 100 tokens."""
    bare = a_phase(ttft_s=2.0, cached=32)
    token_bytes = FULL.model.token_bytes
    fast = a_phase(ttft_s=2.0 * factor, cached=96, loaded=64, read=128 * token_bytes)
    lives = [Life.FIRST, Life.RESTART] + ([Life.LONG] if with_long else [])
    results = {(stack, life): dict.fromkeys(NAMES[life], fast) for stack in OFFLOADING for life in lives}
    results[StackName.NONE, Life.FIRST] = dict.fromkeys(NAMES[Life.FIRST], bare)
    return results


def test_rows_compare_within_a_round() -> None:
    """A neighbour that slows one round down must not move the ratio: it slows both sides of it."""
    rounds = [a_round(0.5, with_long=True), a_round(0.25, with_long=False), a_round(0.125, with_long=False)]
    by_name = {row.what: row for row in rows(rounds, STACKS, FULL)}
    for stack in OFFLOADING:
        first = by_name[f"first token, load, second pass: {stack.value}"]
        assert (first.measured, first.limit) == (500.0, 2000.0)
        assert list(first.ratios) == [0.5, 0.25, 0.125]
        cached = by_name[f"cached, load, restarted: {stack.value}"]
        assert (cached.measured, cached.limit, cached.ratio) == (96, 96, 1.0)
        assert by_name[f"cached, load, first pass: {stack.value}"].ratio == 3.0
        read = by_name[f"read from below, alone, restarted: {stack.value}"]
        assert read.ratio == 2.0
        lookups = by_name[f"lookups, load, restarted: {stack.value}"]
        assert (lookups.measured, lookups.limit) == (12, 3)
        assert lookups.extra["of them answered: ask again"] == 2
        step = by_name[f"scheduling of a step, load, first pass: {stack.value}"]
        assert step.extra["waiting steps"] == 2
        assert step.extra["added, us"] == pytest.approx((2.0 * 0.25 - 2.0) * 1e4)
        long = by_name[f"100 chunks over a CPU tier of 64: {stack.value}"]
        assert long.extra["finished, 1 or 0"] == 1
        assert long.extra["of the prefix cached, %"] == 3.0
    assert f"65 chunks over a CPU tier of 64: {StackName.VLLM.value}" in by_name
    assert not any(StackName.NONE.value in name for name in by_name)


def test_a_request_that_never_ends_has_a_row() -> None:
    """The livelock is a finding, not a crash of the benchmark."""
    one = a_round(0.5, with_long=True)
    hung = {**a_phase(ttft_s=1.0, cached=0, read=1 << 30), "requests": []}
    one[StackName.VLLM, Life.LONG] = {**one[StackName.VLLM, Life.LONG], "longer by one, again": hung}
    by_name = {row.what: row for row in rows([one], STACKS, FULL)}
    row = by_name["65 chunks over a CPU tier of 64: vLLM's tiering"]
    assert (row.extra["finished, 1 or 0"], row.extra["of the prefix cached, %"]) == (0, 0)
    assert row.extra["MiB read"] == 1024


def test_other_answers_show() -> None:
    """A stack that is fast and answers something else has lost."""
    one = a_round(0.5, with_long=True)
    other = a_phase(ttft_s=1.0, cached=96, loaded=64, tokens=2)
    one[StackName.SPEC, Life.FIRST] = {**one[StackName.SPEC, Life.FIRST], "load, second pass": other}
    by_name = {row.what: row for row in rows([one], STACKS, FULL)}
    assert by_name["cached, load, second pass: TierKVSpec"].extra["answers as without offloading, %"] == 0
    assert by_name["cached, load, second pass: TierKVConnector"].extra["answers as without offloading, %"] == 100


def test_the_models_shape_gives_realistic_chunks() -> None:
    """Chunks of 64 KiB to 1 MiB are what tiers are made for."""
    assert FULL.model.chunk_bytes == 512 << 10
    assert ModelShape(layers=1, hidden=8, heads=1).token_bytes == 2 * 64 * 2
    assert replace(FULL, long_chunks=10).context_tokens == 12 * BLOCK_TOKENS


def test_the_table_has_a_column_per_stack() -> None:
    """The documentation is made from the rows, and a request that never ended is shown as such."""
    one = a_round(0.5, with_long=True)
    hung = {**a_phase(ttft_s=1.0, cached=0, read=1 << 30), "requests": [], "wall_s": 10.0}
    one[StackName.VLLM, Life.LONG] = {**one[StackName.VLLM, Life.LONG], "longer by one, again": hung}
    made_rows = [json.loads(json.dumps(row.as_dict())) for row in rows([one], STACKS, FULL)]
    head, _, *lines = markdown(made_rows).splitlines()
    assert head == "|  | vLLM's tiering | TierKVSpec | TierKVConnector |"
    assert len(lines) == len(made_rows) / 3
    by_name = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines}
    assert by_name["first token, load, second pass"][0] == "1000 ms, 0.50 (0.50 to 0.50)"
    assert by_name["cached, alone, warm"][1] == "96 of 96"
    theirs, ours, _ = by_name["65 chunks over a CPU tier of 64"]
    assert theirs == "no answer: given up after 10 s, 5 steps, 1,024 MiB read"
    assert ours.startswith("2.00 s (computed: 2.00 s), 5 steps, 5 % cached")
