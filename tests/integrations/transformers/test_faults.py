"""Tiers that hang, raise, lie or lose bytes while a model is served: shorter prefixes, never wrong ones or errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import GREEDY, greedy, make_prompt
from stack_bed import Faults

from tierkv.frames.frame import MAGIC
from tierkv.integrations.transformers import TieredPrefixCache
from tierkv.testing.faults import hang_until, raise_error

PROMPT = make_prompt(180)
IDS = torch.tensor([PROMPT])


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, stack: dict[str, Any]) -> Faults:
    """The disk of the stack, wrapped, and open to rules."""
    found = Faults()
    registry = found.registry()
    monkeypatch.setattr("tierkv.stack.opening.load_plugins", lambda: registry)
    stack["tiers"][0]["backend"] = "faulty"
    return found


def damage(place: Path, spared: float) -> int:
    """Flip a bit in each used page of a disk tier behind the first ``spared`` of them; how many frames that hit."""
    frames = 0
    for path in place.rglob("segment-*.dat"):
        data = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 4096).copy()
        used = np.flatnonzero(data.any(axis=1))
        hit = used[int(spared * len(used)) :]
        begins = np.flatnonzero([bytes(page[: len(MAGIC)]) == MAGIC for page in data])
        frames += len(set(np.searchsorted(begins, hit, side="right")))
        data[hit, 1000] ^= 0x10
        path.write_bytes(data.tobytes())
    return frames


def rest(cache: TieredPrefixCache) -> None:
    """Until every read and write of the tiers has ended."""
    while cache.stack._core.wiring.manager._tier_io.in_flight:
        cache._engine._step()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("spared", [0.0, 0.6])
def test_damage_at_rest(kind: str, spared: float, model: Callable[..., Any], open_cache: Any, tmp_path: Path) -> None:
    """Flipped bits on the disk are refused by their checksum, each bad frame once: what is found is shorter, the text
    the same, and the chunk is stored anew. A chunk whose bad frame is still being read while it is computed finds its
    place in the host tier taken, so it is stored by the next prompt."""
    served = model(kind)
    expected = greedy(served, IDS)
    with open_cache(served) as cache:
        cache.prefill(PROMPT)
    damaged = damage(tmp_path / "disk", spared)
    cache = open_cache(served)
    refused = cache.stack.metrics.counters.chunks_corrupt
    # With an empty host tier, until no bad frame is met any more: then nothing is missing.
    for _ in range(damaged + 1):
        before, loaded = refused["disk"], []
        for _ in range(3):
            assert torch.equal(cache.generate(IDS, **GREEDY), expected)
            loaded.append(cache.last_prompts[0].loaded_tokens)
            rest(cache)
        assert loaded[2] == 176, "stored anew, by the second prompt at the latest"
        assert cache.flush()
        if refused["disk"] == before:
            assert loaded[0] == 176, "a chunk was not stored anew"
            break
        assert loaded[0] < (176 if spared or before else 1)
        cache.stack.reset_cache()
    else:
        pytest.fail("bad frames are met for ever")
    assert 0 < refused["disk"] <= damaged
    if kind == "llama":  # with a window some frames are never wanted
        assert refused["disk"] == damaged
    cache.close()
    cache = open_cache(served)
    assert torch.equal(cache.generate(IDS, **GREEDY), expected)
    assert cache.last_prompts[0].by_tier == {"disk": 176}
    assert not cache.stack.metrics.counters.chunks_corrupt


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_damage_in_host_memory(kind: str, model: Callable[..., Any], open_cache: Any) -> None:
    """A chunk that does not check out on its way to the model's memory is no part of the prefix; one that the disk
    still has comes from there."""
    served = model(kind)
    expected = greedy(served, IDS)
    cache = open_cache(served)
    cache.prefill(PROMPT)
    arena = cache.stack._core.wiring.arena
    for slot in range(arena.num_slots):
        payload = arena.payload(slot)
        if payload[:64].any():
            payload[:64] ^= 0xFF
    assert torch.equal(cache.generate(IDS, **GREEDY), expected)
    assert cache.stack.metrics.counters.loads_failed > 0
    assert torch.equal(cache.generate(IDS, **GREEDY), expected)
    assert cache.last_prompts[0].loaded_tokens == 176


@pytest.mark.parametrize("verb", ["read_into", "write"])
def test_a_tier_that_raises(verb: Any, faults: Faults, model: Callable[..., Any], open_cache: Any) -> None:
    """A full disk, a cable that was pulled: the model is served, as if the tier were not there."""
    served = model("gemma3")
    expected = greedy(served, IDS)
    cache = open_cache(served)
    faults.last.add(verb, raise_error(OSError("no such luck")))
    cache.prefill(PROMPT)
    cache.stack.reset_cache()
    assert torch.equal(cache.generate(IDS, **GREEDY), expected)
    assert cache.last_prompts[0].loaded_tokens == 0
    assert torch.equal(cache.generate(IDS, **GREEDY), expected)
    assert cache.last_prompts[0].loaded_tokens == 176


def test_a_tier_that_hangs(faults: Faults, model: Callable[..., Any], open_cache: Any, stack: dict[str, Any]) -> None:
    """It is waited for as long as the stack's description says, and then left alone."""
    served = model("gemma3")
    expected = greedy(served, IDS)
    tier = {**stack["tiers"][0], "read_deadline_s": 0.2, "write_deadline_s": 0.2, "breaker_failures": 1}
    cache = open_cache(served, {**stack, "tiers": [tier], "lookup": {"deadline_s": 0.5}})
    cache.prefill(PROMPT)
    cache.stack.reset_cache()
    go_on = threading.Event()
    try:
        for verb in ("read_into", "write"):
            faults.last.add(verb, hang_until(go_on))
        assert torch.equal(cache.generate(IDS, **GREEDY), expected)
        assert cache.last_prompts[0].loaded_tokens == 0
        assert torch.equal(cache.generate(IDS, **GREEDY), expected)
        assert cache.last_prompts[0].loaded_tokens == 176
    finally:
        go_on.set()


def test_a_model_that_fails_in_the_middle(model: Callable[..., Any], open_cache: Any) -> None:
    """Out of memory in a forward pass: the error is the user's, nothing of that pass is stored, what was stored before
    it is found, and the cache goes on serving."""
    served = model("gemma3")
    expected = greedy(served, IDS)
    cache = open_cache(served)

    def fail_late(module: Any, args: Any, kwargs: Any) -> None:
        if (kwargs.get("cache") or kwargs["past_key_values"]).get_seq_length() >= 128:
            raise MemoryError("the model's own")

    hook = served.register_forward_pre_hook(fail_late, with_kwargs=True)
    with pytest.raises(MemoryError, match="the model's own"):
        cache.generate(IDS, **GREEDY)
    hook.remove()
    assert cache.load(IDS).tokens == 128
    assert not cache.stack.has_pending_work()
    assert torch.equal(cache.generate(IDS, **GREEDY), expected)
    assert cache.last_prompts[0].loaded_tokens == 128


def test_a_host_tier_that_holds_next_to_nothing(
    model: Callable[..., Any], open_cache: Any, stack: dict[str, Any]
) -> None:
    """Too small for one window: nothing can be loaded, and nothing breaks."""
    served = model("gemma3")
    cache = open_cache(served, {**stack, "host": {"capacity": "16KiB"}})
    for _ in range(2):
        assert torch.equal(cache.generate(IDS, **GREEDY), greedy(served, IDS))
