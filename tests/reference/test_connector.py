"""The engine keeps the connector's protocol: every call, in order, with true arguments, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tierkv.reference import Engine, EngineConfig, KVConnector, ModelConfig
from tierkv.types.transfers import WorkerOutput

MODEL = ModelConfig(layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=64, vocab=512)
BLOCK = 4
Expected = Callable[..., list[int]]


def engine_with(connector: KVConnector, **config: Any) -> Engine:
    """A small engine that never sleeps."""
    config = {"model": MODEL, "num_blocks": 60, "block_tokens": BLOCK, **config}
    return Engine(EngineConfig(**config), connector=connector, clock=lambda: 0.0, idle=lambda: None)


def words(count: int, seed: object = 0) -> list[int]:
    """A prompt; the same for the same seed."""
    rng = random.Random(f"words {seed}")
    return [rng.randrange(MODEL.vocab) for _ in range(count)]


def names(connector: Any) -> list[str]:
    """Calls, in order."""
    return [call[0] for call in connector.calls]


STEP = [
    "build_connector_meta",
    "start_step",
    "queue_stores",
    "get_finished",
    "update_connector_output",
    "events.take",
]


def test_the_story_of_a_request(host_connector: Any) -> None:
    """One prompt, one token: each call of the protocol, in the order in which a vLLM-like engine makes them."""
    connector = host_connector()
    engine = engine_with(connector)
    assert names(connector) == ["register_kv_caches"]
    assert [len(group) for group in connector.worker.caches] == [2]
    connector.calls.clear()
    name = engine.add_request(words(BLOCK + 1), 1)
    engine.step()
    step, meta = connector.told("build_connector_meta")[0][1], connector.told("start_step")[0][1]
    (entry,) = step.scheduled
    ids = entry.block_ids
    output = connector.told("update_connector_output")[0][1]
    assert connector.calls == [
        ("on_new_request", name),
        ("get_num_new_matched_tokens", name, 0, 0),
        ("update_state_after_alloc", name, 0),
        ("build_connector_meta", step),
        ("start_step", meta),
        ("queue_stores", meta),
        ("request_finished", name, ids),
        ("get_finished",),
        ("update_connector_output", output),
        ("events.take",),
    ]
    assert output == WorkerOutput()
    assert engine.has_work, "the store has not been made yet"
    connector.calls.clear()
    engine.step()
    assert names(connector) == STEP
    assert connector.steps()[0].finished == {name}
    assert not engine.has_work


def test_the_story_of_a_load(host_connector: Any) -> None:
    """Deferred, then offered, then loading for three steps, then computed: one full set of step calls in each."""
    connector = host_connector(deferrals=2, load_steps=3)
    engine = engine_with(connector)
    engine.generate([words(2 * BLOCK + 1)], 1)
    engine.reset_prefix_cache()
    connector.calls.clear()
    name = engine.add_request(words(2 * BLOCK + 1), 1)
    ask = "get_num_new_matched_tokens"
    for _ in range(2):
        engine.step()
    assert connector.told(ask) == [(ask, name, 0, None)] * 2
    for _ in range(3):
        assert engine.step().loading == (1 if len(connector.steps()) < 5 else 0)
    assert connector.told(ask, "update_state_after_alloc")[2:] == [
        (ask, name, 0, 2 * BLOCK),
        ("update_state_after_alloc", name, 2 * BLOCK),
    ]
    assert not any(step.scheduled for step in connector.steps())
    engine.step()
    (entry,) = connector.steps()[-1].scheduled
    assert entry.replaces_table
    assert (entry.num_computed_tokens, entry.num_scheduled_tokens) == (2 * BLOCK, 1)
    assert [len(ids) for ids in entry.block_ids] == [3]
    assert [call for call in names(connector) if call in STEP] == STEP * 6


def test_nothing_is_stored_twice_or_loaded_for_nothing(host_connector: Any) -> None:
    """A second turn: the pool has the first, so the connector is asked with what is local and offers nothing."""
    connector = host_connector()
    engine = engine_with(connector)
    prompt = words(3 * BLOCK)
    answer = engine.generate([prompt], 5)[0].output_tokens
    stored = set(connector.worker.host)
    engine.generate([prompt + answer + words(2, "more")], 1)
    assert connector.told("get_num_new_matched_tokens")[-1][2:] == (4 * BLOCK, 0)
    assert len(stored) == 4
    assert len(set(connector.worker.host)) == 4, "two more tokens do not fill a block"


def test_aborted_loads_keep_their_blocks(expected: Expected, host_connector: Any) -> None:
    """The load of an aborted request writes into its blocks until it ends: a new owner would read wrong bytes."""
    connector = host_connector(load_steps=6)
    engine = engine_with(connector, num_blocks=9)
    prompt = words(4 * BLOCK + 1)
    engine.generate([prompt], 1)
    engine.reset_prefix_cache()
    name = engine.add_request(prompt, 5)
    engine.step()
    assert engine.abort(name)
    assert connector.told("request_finished")[-1][1] == name
    assert engine.block_pool.num_free == 4
    assert engine.has_work
    prompt = words(19, "other")
    other = engine.add_request(prompt, 6)
    engine.drain()
    assert engine.record(other).output_tokens == expected(MODEL, prompt, 6)
    assert engine.block_pool.num_held == 0


def test_preempted_requests_are_told(host_connector: Any) -> None:
    """The connector must stop reading their blocks; HostConnector checks the tables when they come back."""
    connector = host_connector()
    engine = engine_with(connector, num_blocks=11)
    records = engine.generate([words(12, 1), words(12, 2), words(9, 3)], 12)
    assert len(connector.preempted) == sum(record.preemptions for record in records) >= 1


@pytest.mark.parametrize("number", range(4))
def test_any_weather(expected: Expected, host_connector: Any, rng: random.Random, shape: Any, number: int) -> None:
    """Deferrals, slow and failing loads, aborts, preemption and shared prefixes, all at once.

    No token may differ, every call must be in order (HostConnector asserts), and in the end every block must be back.
    """
    fail_rate = rng.choice([0.0, 0.2])
    connector = host_connector(
        deferrals=rng.randrange(3),
        load_steps=rng.randint(1, 5),
        fails=lambda key: rng.random() < fail_rate,
        windows=shape.group_windows,
    )
    engine = engine_with(
        connector,
        num_blocks=1 + shape.num_groups * rng.randint(12, 24),
        **shape.config(),
        max_batched_tokens=rng.randint(3, 40),
        max_running=rng.randint(1, 6),
    )
    heads = [words(rng.randint(1, 14), ("head", i)) for i in range(3)]
    wanted: dict[str, tuple[list[int], int]] = {}
    for _ in range(150):
        if rng.random() < 0.3 and len(wanted) < 30:
            prompt = rng.choice(heads) + words(rng.randint(1, 16), rng.randrange(6))
            count = rng.randint(1, 12)
            wanted[engine.add_request(prompt, count)] = (prompt, count)
        if wanted and rng.random() < 0.05:
            engine.abort(rng.choice(list(wanted)))
        if rng.random() < 0.05:
            engine.reset_prefix_cache()
        engine.step()
    for _ in range(5000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work, "a request is stuck"
    aborted = 0
    for name, (prompt, count) in wanted.items():
        record = engine.record(name)
        tokens = expected(shape.model(), prompt, count)
        assert record.output_tokens == tokens[: len(record.output_tokens)]
        assert record.aborted or len(record.output_tokens) == count
        aborted += record.aborted
        if not record.preemptions and not record.aborted:
            whole = record.tokens_computed + record.tokens_loaded + record.tokens_cached
            assert whole == len(prompt) + count - 1
    assert aborted < len(wanted)
    assert engine.block_pool.num_held == 0
    assert all(block.ref_cnt == 0 for block in engine.block_pool._blocks)
    assert not connector._requests
    assert [call for call in names(connector) if call in STEP] == STEP * len(connector.steps())
