"""The engine as a whole: the same tokens and the same bytes, however they came about."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tierkv.reference import Engine, EngineConfig, ModelConfig, StepReport
from tierkv.types.keys import make_key, split_key

MODELS = {
    dtype: ModelConfig(layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=64, vocab=512, dtype=dtype)
    for dtype in ("float32", "bfloat16")
}
MODEL = MODELS["bfloat16"]
BLOCK = 4

Expected = Callable[..., list[int]]


def small_engine(connector: Any = None, *, clock: Callable[[], float] = lambda: 0.0, **config: Any) -> Engine:
    """An engine that never sleeps; with room for everything, unless said otherwise."""
    config = {"model": MODEL, "num_blocks": 200, "block_tokens": BLOCK, **config}
    return Engine(EngineConfig(**config), connector=connector, clock=clock, idle=lambda: None)


def words(count: int, seed: object = 0) -> list[int]:
    """A prompt; the same for the same seed."""
    rng = random.Random(f"words {seed}")
    return [rng.randrange(MODEL.vocab) for _ in range(count)]


def conversations() -> list[list[int]]:
    """Prompts that share a system prompt, of lengths that end inside, at, and just behind a block."""
    system = words(19, "system")
    return [system + words(length, length) for length in (1, 5, 9, 13, 14, 21, 33)]


def kv_by_hash(engine: Engine) -> dict[tuple[bytes, int], list[torch.Tensor]]:
    """The pages of every block that can be found, by content."""
    return {
        key: [tensor[next(iter(blocks))] for tensor in engine.kv_caches()[key[1]]]
        for key, blocks in engine.block_pool._cached.items()
    }


@pytest.fixture(scope="module")
def cold() -> Callable[..., dict[tuple[bytes, int], list[torch.Tensor]]]:
    """The pages of all conversations, each prompt computed alone and in one piece."""
    known: dict[Any, Any] = {}

    def pages(shape: Any, dtype: str = "bfloat16") -> dict[tuple[bytes, int], list[torch.Tensor]]:
        if (shape, dtype) not in known:
            found = known.setdefault((shape, dtype), {})
            for prompt in conversations():
                engine = small_engine(**shape.config(dtype))
                engine.generate([prompt], 10)
                found |= kv_by_hash(engine)
        return known[shape, dtype]

    return pages


@pytest.mark.parametrize("dtype", MODELS)
@pytest.mark.parametrize(("max_batched_tokens", "max_running"), [(1, 1), (7, 3), (16, 8), (1000, 8)])
def test_tokens_and_bytes_do_not_depend_on_batching(
    expected: Expected, cold: Any, dtype: str, shape: Any, max_batched_tokens: int, max_running: int
) -> None:
    """Cold against cached, alone against batched, whole against chunked: no bit of KV and no token may differ."""
    engine = small_engine(**shape.config(dtype), max_batched_tokens=max_batched_tokens, max_running=max_running)
    for _ in range(2):
        records = engine.generate(conversations(), 10)
        for prompt, record in zip(conversations(), records, strict=True):
            assert record.output_tokens == expected(shape.model(dtype), prompt, 10)
    assert all(record.tokens_cached for record in records), "the second time everything comes from the pool"
    pages, others = kv_by_hash(engine), cold(shape, dtype)
    common = pages.keys() & others.keys()
    assert len(common) > len(pages) // 2
    assert pages.keys() == others.keys() or any(shape.windows), "blocks that a window passed may have been reused"
    for key in common:
        assert all(torch.equal(*pair) for pair in zip(pages[key], others[key], strict=True))


def test_preemption_changes_no_token(expected: Expected, shape: Any) -> None:
    """A pool far too small for all: requests are thrown out and come back, with other blocks and other chunks."""
    sizes = {"full": (15, 24), "full-2": (29, 24), "hybrid": (26, 12), "windows": (19, 24)}
    num_blocks, step_tokens = sizes[shape.name]
    engine = small_engine(num_blocks=num_blocks, **shape.config(), max_batched_tokens=step_tokens)
    prompts = [words(length, length) for length in (13, 20, 9, 17, 22, 11)]
    records = engine.generate(prompts, 24)
    assert sum(record.preemptions for record in records) >= 2
    for prompt, record in zip(prompts, records, strict=True):
        assert record.output_tokens == expected(shape.model(), prompt, 24)
    assert engine.block_pool.num_held == 0


@pytest.mark.parametrize("load_steps", [1, 4])
def test_loaded_prefixes_change_no_token(
    expected: Expected, cold: Any, host_connector: Any, shape: Any, load_steps: int
) -> None:
    """Tokens loaded into an empty pool must give the same continuation as computed ones."""
    connector = host_connector(load_steps=load_steps, deferrals=1, windows=shape.group_windows)
    first = small_engine(connector, **shape.config())
    first.generate(conversations(), 10)
    assert first.reset_prefix_cache()
    records = first.generate([prompt + words(3, "more") for prompt in conversations()], 10)
    assert all(record.tokens_loaded for record in records)
    for prompt, record in zip(conversations(), records, strict=True):
        assert record.output_tokens == expected(shape.model(), prompt + words(3, "more"), 10)
    pages, others = kv_by_hash(first), cold(shape)
    common = pages.keys() & others.keys()
    assert len(common) > len(pages) // 3
    for key in common:
        assert all(torch.equal(*pair) for pair in zip(pages[key], others[key], strict=True))


def test_a_prompt_loaded_in_whole(expected: Expected, host_connector: Any, shape: Any) -> None:
    """The same prompt again, a multiple of the block: all of it is loaded, and its last token computed all the same."""
    connector = host_connector(windows=shape.group_windows)
    engine = small_engine(connector, **shape.config())
    prompt = words(4 * BLOCK)
    engine.generate([prompt], 6)
    engine.reset_prefix_cache()
    record = engine.generate([prompt], 6)[0]
    assert record.output_tokens == expected(shape.model(), prompt, 6)
    assert (record.tokens_loaded, record.tokens_computed) == (4 * BLOCK - 1, 6)


@pytest.mark.parametrize("failing", [[(0, 0)], [(2, 0)], [(2, 1)], [(4, 0), (1, 1)], [(i, 0) for i in range(5)]])
def test_a_failed_load_is_recomputed(expected: Expected, host_connector: Any, failing: list[tuple[int, int]]) -> None:
    """The blocks of a failed load hold NaN here: had one been used, every later token would tell."""
    connector = host_connector(load_steps=2)
    engine = small_engine(connector, num_groups=2)
    prompt = words(5 * BLOCK + 2)
    engine.generate([prompt], 6)
    engine.reset_prefix_cache()
    hashes = [block_hash for block_hash, group in map(split_key, connector.worker.host) if group == 0]
    bad = {make_key(hashes[index], group) for index, group in failing}
    connector.worker.fails = bad.__contains__
    record = engine.generate([prompt], 6)[0]
    assert record.output_tokens == expected(MODEL, prompt, 6)
    assert record.tokens_loaded == min(index for index, _ in failing) * BLOCK
    assert all(page.isfinite().all() for pages in kv_by_hash(engine).values() for page in pages)


@pytest.mark.parametrize("failing", [(3, 0), (4, 1), (0, 2), (4, 2)])
def test_a_failed_load_behind_a_window_is_recomputed_from_the_start(
    expected: Expected, host_connector: Any, shapes: Any, failing: tuple[int, int]
) -> None:
    """A window is loaded for the end of the prefix only: a shorter prefix has no window to be continued with."""
    shape = shapes["hybrid"]
    connector = host_connector(load_steps=2, windows=shape.group_windows)
    engine = small_engine(connector, **shape.config())
    prompt = words(5 * BLOCK + 2)
    engine.generate([prompt], 6)
    engine.reset_prefix_cache()
    hashes = [block_hash for block_hash, group in map(split_key, connector.worker.host) if group == 2]
    connector.worker.fails = {make_key(hashes[failing[0]], failing[1])}.__contains__
    record = engine.generate([prompt], 6)[0]
    assert record.output_tokens == expected(shape.model(), prompt, 6)
    assert (record.tokens_loaded, record.tokens_computed) == (0, len(prompt) + 5)
    assert all(page.isfinite().all() for pages in kv_by_hash(engine).values() for page in pages)
    assert engine.block_pool.num_held == 0


def test_a_local_prefix_is_computed_again_if_a_window_behind_it_fails(
    expected: Expected, host_connector: Any, shapes: Any
) -> None:
    """Its window blocks were let go for those further on. The records must tell so, and shared blocks stay whole."""
    shape = shapes["hybrid"]
    connector = host_connector(windows=shape.group_windows)
    engine = small_engine(connector, **shape.config())
    prompt = words(8 * BLOCK + 2)
    engine.generate([prompt], 1)
    engine.reset_prefix_cache()
    engine.generate([prompt[: 3 * BLOCK + 1]], 1)
    stored = {key for key, group in ((key, split_key(key)[1]) for key in connector.worker.host) if group == 0}
    connector.worker.fails = stored.__contains__
    other = engine.add_request(prompt[: 3 * BLOCK + 2], 9)
    name = engine.add_request(prompt, 6)
    engine.drain()
    record = engine.record(name)
    assert connector.told("get_num_new_matched_tokens")[-1][2:] == (3 * BLOCK, 5 * BLOCK)
    assert record.output_tokens == expected(shape.model(), prompt, 6)
    assert (record.tokens_cached, record.tokens_loaded, record.tokens_computed) == (0, 0, len(prompt) + 5)
    assert engine.record(other).output_tokens == expected(shape.model(), prompt[: 3 * BLOCK + 2], 9)


def test_a_window_bounds_what_a_request_holds() -> None:
    """That is what windows are for: decoding goes on for ever in a few blocks. And the rest is free for others."""
    model = ModelConfig(layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=64, vocab=512, windows=(9,))
    engine = small_engine(model=model, num_blocks=9, max_batched_tokens=7)
    held = 0
    name = engine.add_request(words(30), 90)
    while engine.has_unfinished:
        engine.step()
        held = max(held, engine.block_pool.num_held)
    assert len(engine.record(name).output_tokens) == 90
    assert held == 5, "15 tokens in sight or in work, cut anywhere"


def test_two_ranks_store_and_load_their_own_heads(host_connector: Any, shapes: Any) -> None:
    """Each worker sees its rank's pool only. At an equal number of ranks the tokens are equal, and a wrong rank tells.

    Sums of two ranks round otherwise than those of one, so runs with one and with two ranks are not compared.
    """
    shape = shapes["hybrid"]
    alone = small_engine(**shape.config(), tensor_parallel=2).generate(conversations(), 10)
    connector = host_connector(load_steps=2, windows=shape.group_windows, ranks=2)
    config = EngineConfig(**shape.config(), num_blocks=200, block_tokens=BLOCK, tensor_parallel=2)
    engine = Engine(config, connector=connector, workers=connector.workers, idle=lambda: None)
    assert [r.output_tokens for r in engine.generate(conversations(), 10)] == [r.output_tokens for r in alone]
    first, second = (worker.host for worker in connector.workers)
    assert first.keys() == second.keys()
    assert not any(torch.equal(*pair) for key in first for pair in zip(first[key], second[key], strict=True))
    engine.reset_prefix_cache()
    again = engine.generate(conversations(), 10)
    assert all(record.tokens_loaded for record in again)
    assert [r.output_tokens for r in again] == [r.output_tokens for r in alone]
    engine.reset_prefix_cache()
    connector.workers[1].host = first
    wrong = engine.generate(conversations(), 10)
    assert [r.output_tokens for r in wrong] != [r.output_tokens for r in alone]


def test_each_rank_needs_a_worker(host_connector: Any) -> None:
    """With one worker for two ranks, half of the heads would be stored and the other half loaded as zeros."""
    connector = host_connector()
    with pytest.raises(ValueError, match="tensor_parallel = 2 and 1 workers were given"):
        Engine(EngineConfig(tensor_parallel=2), connector=connector)


def test_the_pool_can_lie_in_memory_of_the_caller() -> None:
    """Workers in other processes copy from shared memory: what is computed must be written there, and only there."""
    given: list[bytearray] = []

    def allocate(size: int) -> memoryview:
        given.append(bytearray(size))
        return memoryview(given[-1])

    config = EngineConfig(model=MODEL, num_blocks=20, block_tokens=BLOCK)
    engine, own = Engine(config, allocate=allocate), Engine(config)
    for each in (engine, own):
        each.generate([words(20)], 4)
    assert [bytes(memory) for memory in given] == [
        tensor.view(torch.uint8).numpy().tobytes() for tensor in own.kv_caches()[0]
    ]


def test_damaged_kv_changes_the_tokens(expected: Expected, host_connector: Any) -> None:
    """The other side of all tests above: if the loaded bytes are wrong, the tokens are, so equality means something."""
    connector = host_connector()
    engine = small_engine(connector)
    prompt = words(8 * BLOCK + 1)
    engine.generate([prompt], 12)
    engine.reset_prefix_cache()
    page = next(iter(connector.worker.host.values()))[0].view(-1).view(torch.uint8)
    page[64:128] ^= 0xFF
    record = engine.generate([prompt], 12)[0]
    assert record.tokens_loaded == 8 * BLOCK
    assert record.output_tokens != expected(MODEL, prompt, 12)


def test_records_add_up(host_connector: Any) -> None:
    """The demo's table: every position was computed, loaded or cached, and the last token never ran."""
    ticks = iter(range(10**6))
    connector = host_connector(deferrals=2)
    engine = small_engine(connector, clock=lambda: float(next(ticks)), max_batched_tokens=16)
    records = [*engine.generate(conversations(), 5)]
    engine.reset_prefix_cache()
    records += engine.generate(conversations(), 5)
    for record in records:
        assert record.preemptions == 0
        assert record.tokens_computed + record.tokens_loaded + record.tokens_cached == record.num_prompt_tokens + 4
        assert record.arrival_s < record.first_token_s < record.finished_s
        assert record.ttft_s == record.first_token_s - record.arrival_s
        assert record.deferrals >= 2
        assert len(record.output_tokens) == 5
    assert [record.index for record in records] == list(range(14))
    assert sum(record.tokens_loaded for record in records) > 0
    assert engine.record("request-3") is records[3]


def test_progress_is_reported_after_each_step() -> None:
    """A progress bar reads it, so it must report what happened."""
    engine = small_engine(max_batched_tokens=8)
    reports: list[StepReport] = []
    records = engine.generate([words(11), words(3)], 4, reports.append)
    told: dict[str, list[int]] = {}
    for report in reports:
        for name, token in report.new_tokens.items():
            told.setdefault(name, []).append(token)
    assert told == {record.request_id: record.output_tokens for record in records}
    assert sum(len(report.finished) for report in reports) == 2
    assert (reports[0].running, reports[0].waiting) == (1, 1)
    assert sum(e.num_scheduled_tokens for r in reports for e in r.output.scheduled) == 11 + 3 + 2 * 3


def test_empty_steps_idle(host_connector: Any) -> None:
    """While all wait for loads or answers, a step must not spin; a step that computes must not wait."""
    waits: list[int] = []
    connector = host_connector(deferrals=2, load_steps=3)
    config = EngineConfig(model=MODEL, num_blocks=50, block_tokens=BLOCK)
    engine = Engine(config, connector=connector, idle=lambda: waits.append(len(connector.steps())))
    prompt = words(2 * BLOCK + 1)
    for _ in range(2):
        engine.generate([prompt], 2)
        engine.reset_prefix_cache()
    empty = [number for number, step in enumerate(connector.steps(), 1) if not step.scheduled]
    assert waits == empty
    assert len(empty) >= 2 * 2 + 3


def test_steps_go_on_while_transfers_do(host_connector: Any) -> None:
    """An engine that stops with the last token would leave stores in flight, and a finished request unreported."""
    connector = host_connector()
    connector.has_pending_work = lambda: len(connector.steps()) < 7
    engine = small_engine(connector)
    engine.generate([words(5)], 2)
    assert len(connector.steps()) == 7
    assert not engine.has_work
    alone = small_engine()
    alone.add_request(words(5), 1)
    alone.step()
    assert not alone.has_unfinished
    assert alone.has_work
    assert alone.step().output.finished == {"request-0"}
    assert not alone.has_work


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 1, "the prompt of request 'x' is empty"),
        ([1, 512], 1, r"holds token 512, outside 0\.\.511"),
        ([-1], 1, r"holds token -1, outside 0\.\.511"),
        ([1], 0, "max_new_tokens = 0 of request 'x'; use 1 or more"),
        ([1] * 30, 8, "request 'x' needs 10 blocks and the pool has 9; shorten it, or use num_blocks = 11 or more"),
    ],
)
def test_an_impossible_request_is_refused(prompt: Sequence[int], max_new_tokens: int, message: str) -> None:
    """It would end in an index error inside torch, or wait for ever; and the others must go on."""
    engine = small_engine(num_blocks=10)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, max_new_tokens, request_id="x")
    assert not engine.has_work
    engine.add_request([1] * 30, 7, request_id="x")
    engine.drain()
    assert len(engine.record("x").output_tokens) == 7


def test_ids_are_not_used_twice() -> None:
    """The connector may still have transfers under the old one in flight."""
    engine = small_engine()
    engine.add_request([1], 1, request_id="x")
    engine.drain()
    with pytest.raises(ValueError, match="request_id = 'x' was used before"):
        engine.add_request([1], 1, request_id="x")


def test_one_refused_prompt_leaves_nothing_behind() -> None:
    """generate() is all or nothing: the caller has no ids with which to take the others back."""
    engine = small_engine()
    with pytest.raises(ValueError, match="is empty"):
        engine.generate([words(5), []], 1)
    assert not engine.has_unfinished
    assert engine.generate([words(5)], 1)[0].output_tokens


def test_abort_between_steps() -> None:
    """The incremental interface: an aborted request stops at once, is marked, and its blocks come back."""
    engine = small_engine()
    name = engine.add_request(words(9), 50)
    other = engine.add_request(words(6, 1), 3)
    engine.step()
    assert engine.abort(name)
    assert not engine.abort(name)
    assert not engine.abort("nobody")
    engine.drain()
    assert engine.record(name).aborted
    assert len(engine.record(name).output_tokens) == 1
    assert not engine.record(other).aborted
    assert len(engine.record(other).output_tokens) == 3
    assert engine.block_pool.num_held == 0


def test_reset_of_the_prefix_cache(host_connector: Any) -> None:
    """The pool alone, so that the tiers are hit; or both, when weights change. Never under a running request."""
    connector = host_connector()
    engine = small_engine(connector)
    engine.generate([words(9)], 1)
    name = engine.add_request(words(9), 9)
    engine.step()
    assert not engine.reset_prefix_cache(reset_connector=True)
    assert not connector.told("reset_cache")
    engine.abort(name)
    assert engine.reset_prefix_cache()
    assert connector.worker.host
    assert engine.generate([words(9)], 1)[0].tokens_loaded == 8
    assert engine.reset_prefix_cache(reset_connector=True)
    assert engine.generate([words(9)], 1)[0].tokens_computed == 9


def test_without_prefix_caching_everything_is_computed(expected: Expected) -> None:
    """The switch that tells tierkv that two requests may load one prefix side by side."""
    engine = small_engine(prefix_caching=False)
    assert not engine.engine_spec().capabilities.prefix_caching
    for _ in range(2):
        record = engine.generate([words(9)], 3)[0]
        assert record.output_tokens == expected(MODEL, words(9), 3)
        assert record.tokens_cached == 0
