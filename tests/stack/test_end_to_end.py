"""The promises, seen from an engine: real model, real disk, real files, one flipped bit at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stack_bed import CHUNK_TOKENS, ENGINE, SLOT_BYTES, Faults, opened, prompts_of, serve, stack_config

from tierkv.errors import BackendUnavailableError
from tierkv.reference.block_pool import chained_hash, root_hash
from tierkv.testing.faults import Inner, corrupt, hang_until, raise_error
from tierkv.types.keys import Key, make_key

pytestmark = pytest.mark.needs_torch

Expected = Callable[..., list[list[int]]]


def test_kv_outlives_the_gpu(tmp_path: Path, expected: Expected) -> None:
    """The main task: a second engine with an empty pool gives the same answers from the tiers, and computes almost
    nothing.
    """
    prompts = prompts_of(1, 4)
    with opened(stack_config(tmp_path)) as stack:
        assert serve(stack, prompts) == expected(prompts)
        assert not stack.metrics.counters.tokens_loaded
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["host"] >= 112 + 3 * 72  # the shared beginning is loaded once


def test_kv_outlives_the_process(tmp_path: Path, expected: Expected) -> None:
    """A new stack over the same storage finds the chunks that close() has written: on disk at once, in objects after a
    probe.
    """
    prompts = prompts_of(2, 4)
    with opened(stack_config(tmp_path)) as stack:
        serve(stack, prompts)
        assert stack.close()
    with opened(stack_config(tmp_path)) as stack:
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["disk"] >= 112 + 3 * 72
        assert stack.metrics.counters.promotions["objects"] == 0  # the disk knew
    config = stack_config(tmp_path)
    config["tiers"] = config["tiers"][1:]
    with opened(config) as stack:
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["objects"] >= 112 + 3 * 72
        assert stack.metrics.counters.deferrals > 0


def test_promotion_fills_the_tiers_between(tmp_path: Path, expected: Expected) -> None:
    """A chunk read from the object store is also written to the disk, for a faster second read."""
    prompts = prompts_of(3, 2)
    objects_only = stack_config(tmp_path)
    objects_only["tiers"] = objects_only["tiers"][1:]
    with opened(objects_only) as stack:
        serve(stack, prompts)
    with opened(stack_config(tmp_path)) as stack:
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["objects"] > 0
    with opened(stack_config(tmp_path)) as stack:
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["disk"] > 0
        assert "objects" not in stack.metrics.counters.tokens_loaded


def test_a_prefix_longer_than_the_host_tier_is_answered(tmp_path: Path, expected: Expected) -> None:
    """Progress (G1): 15 chunks pass a host tier of 8 slots; all are loaded, and each is read once."""
    prompts = prompts_of(4, 1, length=250)
    with opened(stack_config(tmp_path, host_slots=24)) as stack:
        serve(stack, prompts)
    with opened(stack_config(tmp_path, host_slots=8)) as stack:
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded == {"disk": 15 * CHUNK_TOKENS}
        assert stack.metrics.counters.promotions["disk"] == 15  # no chunk was read twice or without use
        assert stack.metrics.counters.loads_streamed == 1
        assert stack.metrics.counters.deadlines_expired == 0


def test_damage_at_rest_is_a_miss(tmp_path: Path, faults: Faults, expected: Expected) -> None:
    """Never wrong bytes: every frame read has one flipped bit; all are refused, counted and recomputed."""
    prompts = prompts_of(5, 3)
    config = _faulty_disk(tmp_path)
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, prompts)
    with opened(config, plugins=faults.registry()) as stack:
        faults.last.add("read_into", corrupt(offset=9000))
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.chunks_corrupt["faulty"] > 0
        assert not stack.metrics.counters.tokens_loaded
    with opened(config, plugins=faults.registry()) as stack:  # the bad frames were deleted, and written again
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["faulty"] > 0


def test_without_verification_damage_changes_tokens(tmp_path: Path, faults: Faults, expected: Expected) -> None:
    """Control of the test above: without verification the same damage changes tokens."""
    prompts = prompts_of(5, 3)
    config = _faulty_disk(tmp_path)
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, prompts)
    with opened(config, plugins=faults.registry(), verify_frames=False) as stack:
        faults.last.add("read_into", corrupt(offset=9003, flip=0x7F))
        assert serve(stack, prompts) != expected(prompts)


@pytest.mark.parametrize("verb", ["read_into", "write", "contains", "delete"])
def test_a_raising_tier_is_a_miss(tmp_path: Path, faults: Faults, expected: Expected, verb: Any) -> None:
    """Never fatal: whichever verb raises, the engine answers, and the tier is used again after it has recovered."""
    prompts = prompts_of(6, 3)
    config = _faulty_disk(tmp_path)
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, prompts)
    with opened(config, plugins=faults.registry()) as stack:
        faults.last.add(verb, raise_error(lambda: RuntimeError("a bug in a plugin")))
        faults.last.add(verb, raise_error(lambda: SystemExit(3)), times=1)
        assert serve(stack, prompts) == expected(prompts)


def test_a_hung_tier_is_a_miss(tmp_path: Path, faults: Faults, expected: Expected) -> None:
    """Never blocking, always progress: reads hang for ever, the lookup's deadline passes, the engine computes."""
    prompts = prompts_of(7, 3)
    release = threading.Event()
    config = _faulty_disk(tmp_path, read_deadline_s=0.2, lookup={"deadline_s": 0.5})
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, prompts)
    try:
        with opened(config, plugins=faults.registry()) as stack:
            faults.last.add("read_into", hang_until(release))
            assert serve(stack, prompts) == expected(prompts)
            assert stack.metrics.counters.reads_failed["faulty"] > 0
            assert not stack.metrics.counters.tokens_loaded
            release.set()
    finally:
        release.set()


def test_one_bad_key_fails_one_chunk(tmp_path: Path, faults: Faults, expected: Expected) -> None:
    """Results are per key: an error for one key of a batch costs that chunk only."""
    prompts = prompts_of(8, 1)
    config = _faulty_disk(tmp_path, retries=0)
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, prompts)
    bad = _key_of(prompts[0], 3)

    def lose(batch: Sequence[Any], inner: Inner) -> object:
        results = list(inner(batch))
        return [
            BackendUnavailableError("lost") if request.key == bad else result
            for request, result in zip(batch, results, strict=True)
        ]

    with opened(config, plugins=faults.registry()) as stack:
        faults.last.add("read_into", lose)
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["faulty"] == 3 * CHUNK_TOKENS


def _key_of(prompt: Sequence[int], number: int) -> Key:
    """Key of a chunk of a prompt, in its place: batches are read in any order."""
    found = root_hash(ENGINE.hash_salt)
    for start in range(0, (number + 1) * CHUNK_TOKENS, ENGINE.block_tokens):
        found = chained_hash(found, prompt[start : start + ENGINE.block_tokens])
    return make_key(found, 0)


def test_another_epoch_reads_nothing(tmp_path: Path) -> None:
    """Namespaces are separate: after a change of the user's epoch no stored chunk is found."""
    prompts = prompts_of(9, 2)
    with opened(stack_config(tmp_path)) as stack:
        serve(stack, prompts)
    with opened(stack_config(tmp_path, namespace={"epoch": "2"})) as stack:
        serve(stack, prompts)
        assert not stack.metrics.counters.tokens_loaded


def test_the_host_tier_alone_works(tmp_path: Path, expected: Expected) -> None:
    """A stack needs no lower tier."""
    prompts = prompts_of(10, 2)
    with opened(stack_config(tmp_path, tiers=[])) as stack:
        serve(stack, prompts)
        assert serve(stack, prompts) == expected(prompts)
        assert set(stack.metrics.counters.tokens_loaded) == {"host"}


def test_a_small_disk_keeps_its_capacity(tmp_path: Path, expected: Expected) -> None:
    """Bounded: twelve slots of disk for about thirty chunks; it evicts and keeps to its capacity."""
    prompts = prompts_of(11, 5)
    config = stack_config(tmp_path)
    config["tiers"][0]["capacity"] = 12 * SLOT_BYTES
    with opened(config) as stack:
        assert serve(stack, prompts) == expected(prompts)
        stack.flush()
        assert stack.metrics.counters.evictions["disk"] > 0
        assert stack.metrics.counters.cascades["disk"] > 12
    assert sum(f.stat().st_size for f in (tmp_path / "disk").rglob("segment-*")) <= 12 * SLOT_BYTES


def test_two_groups(tmp_path: Path, expected: Expected) -> None:
    """Any number of full-attention groups: each has its own keys, blocks and chunks."""
    engine = replace(ENGINE, num_groups=2, num_blocks=72)
    prompts = prompts_of(12, 3)
    with opened(stack_config(tmp_path, host_slots=48), engine) as stack:
        serve(stack, prompts, engine)
    with opened(stack_config(tmp_path, host_slots=48), engine) as stack:
        assert serve(stack, prompts, engine) == expected(prompts, engine) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["disk"] >= 112 + 2 * 72


def test_preemption_and_eviction_under_load(tmp_path: Path, expected: Expected) -> None:
    """A pool for two requests serves twelve: preemption, fences and eviction together change no token."""
    engine = replace(ENGINE, num_blocks=34, max_running=6)
    prompts = prompts_of(13, 12, length=110, shared=24)
    with opened(stack_config(tmp_path, host_slots=16), engine) as stack:
        first = serve(stack, prompts, engine)
        second = serve(stack, prompts, engine)
    assert first == second == expected(prompts, replace(engine, num_blocks=400))


def test_abort_in_every_state(tmp_path: Path, expected: Expected) -> None:
    """Requests abort while waiting, deferred, loading and running; nothing leaks, and other answers are right."""
    from tierkv.reference.engine import Engine  # noqa: PLC0415 - torch, where a test needs it

    prompts = prompts_of(14, 6)
    with opened(stack_config(tmp_path)) as stack:
        serve(stack, prompts)
    config = stack_config(tmp_path)
    config["tiers"] = config["tiers"][1:]  # objects only: lookups are deferred
    with opened(config) as stack:
        engine = Engine(ENGINE, connector=stack)
        for steps in range(14):
            for i, prompt in enumerate(prompts):
                engine.add_request(prompt, 8, request_id=f"{steps}-{i}")
            for _ in range(steps):
                engine.step()
            for i in range(0, 6, 2):
                engine.abort(f"{steps}-{i}")
            engine.drain()
            answers = [list(engine.record(f"{steps}-{i}").output_tokens) for i in range(1, 6, 2)]
            assert answers == expected(prompts)[1::2]
            engine.reset_prefix_cache(reset_connector=steps % 3 == 0)
        assert not stack.has_pending_work()


def test_reset_forgets_the_host_tier(tmp_path: Path, expected: Expected) -> None:
    """After reset_cache the host tier is empty, and all chunks are stored again."""
    prompts = prompts_of(15, 2)
    with opened(stack_config(tmp_path, tiers=[])) as stack:
        serve(stack, prompts)
        stack.reset_cache()
        assert serve(stack, prompts) == expected(prompts)
        assert not stack.metrics.counters.tokens_loaded
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["host"] > 0


def _faulty_disk(place: Path, **changes: Any) -> dict[str, Any]:
    tier = {"backend": "faulty", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
    for key in ("read_deadline_s", "retries"):
        if key in changes:
            tier[key] = changes.pop(key)
    return stack_config(place, tiers=[tier], **changes)
