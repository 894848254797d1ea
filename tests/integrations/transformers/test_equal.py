"""Equal KV, equal logits, equal tokens: with a prefix from the tiers as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import GREEDY, computed_in_pieces, contents, greedy, logits_behind, make_prompt

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Largest difference of logits to the one-shot pass, as a share of the largest logit."""

ALL = ["llama", "gemma3", "mistral", "deepseek", "gpt2"]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral"])
def test_restored_kv_is_bit_exact_in_another_process_image(
    kind: str, dtype: torch.dtype, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """The first promise: K and V that were on the disk are those of a run with the same pieces, to the last bit,
    and so are the logits behind them."""
    served, tokens = model(kind, dtype), make_prompt(200)
    with open_cache(served) as cache:
        cache.prefill(tokens)
    hit = open_cache(served).load(tokens)
    assert hit.tokens == 192
    assert hit.prompts[0].by_tier == {"disk": 192}
    plain = computed_in_pieces(served, tokens, (64, 128, 192))
    for restored, computed in zip(contents(hit.past_key_values), contents(plain), strict=True):
        assert torch.equal(restored, computed)
    behind = tokens[192:]
    assert torch.equal(logits_behind(served, hit.past_key_values, behind), logits_behind(served, plain, behind))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral"])
def test_logits_are_those_of_one_pass(
    kind: str, dtype: torch.dtype, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """A user compares with a plain forward pass over everything; only rounding may differ."""
    served, tokens = model(kind, dtype), make_prompt(150, seed=1)
    cache = open_cache(served)
    cache.prefill(tokens[:140])
    hit = cache.load(tokens)
    assert hit.tokens == 128
    with torch.no_grad():
        whole = served(input_ids=torch.tensor([tokens])).logits[0, 128:].float()
    ours = logits_behind(served, hit.past_key_values, tokens[128:]).float()
    assert (ours - whole).abs().max() <= TOLERANCE[dtype] * whole.abs().max()


@pytest.mark.parametrize("kind", ALL)
def test_generate_gives_the_same_tokens_cold_warm_and_restarted(
    kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """The text is the same with the prefix in no tier, in the host tier, or on the disk."""
    served, tokens = model(kind), make_prompt(170, seed=2)
    ids = torch.tensor([tokens])
    expected = greedy(served, ids)
    with open_cache(served) as cache:
        for loaded in (0, 160):
            assert torch.equal(cache.generate(ids, **GREEDY), expected)
            assert cache.last_prompts[0].loaded_tokens == loaded
            assert cache.last_prompts[0].computed_tokens == 169 - loaded
    again = open_cache(served)
    assert torch.equal(again.generate(ids, **GREEDY), expected)
    assert again.last_prompts[0].by_tier == {"disk": 160}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_wrong_kv_would_be_noticed(kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """The negative control of every test here: with other bytes in the cache the tokens do differ."""
    served, tokens = model(kind), make_prompt(170, seed=2)
    ids = torch.tensor([tokens])
    cache = open_cache(served)
    cache.prefill(tokens)
    hit = cache.load(ids)
    for layer in hit.past_key_values.layers:
        layer.values[:, :, -16:] = layer.values[:, :, -32:-16].clone()  # one chunk for another
    assert not torch.equal(greedy(served, ids, **hit.arguments), greedy(served, ids))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40, 41, 63, 64, 65, 128, 129])
def test_every_length_around_a_boundary(
    kind: str, length: int, model: Callable[..., Any], open_cache: Callable[..., Any], stack: dict[str, Any]
) -> None:
    """Blocks, pieces and windows end at different places, and a prompt may end at any of them or beside it."""
    served, tokens = model(kind), make_prompt(length, seed=length)
    ids = torch.tensor([tokens])
    expected = greedy(served, ids, max_new_tokens=40)
    cache = open_cache(served, {"host": stack["host"]})
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **{**GREEDY, "max_new_tokens": 40}), expected)
    assert torch.equal(cache.generate(expected, **GREEDY), greedy(served, expected))
    # The answer's last token was never run through the model.
    assert cache.last_prompts[0].loaded_tokens == (length + 40 - 1) // 16 * 16


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral"])
def test_chunks_of_several_blocks(
    kind: str, model: Callable[..., Any], open_cache: Callable[..., Any], stack: dict[str, Any]
) -> None:
    """The stack's `[chunk]` joins blocks; a prefix then ends with a chunk, and windows cover parts of chunks."""
    served, tokens = model(kind), make_prompt(250, seed=3)
    ids = torch.tensor([tokens])
    expected = greedy(served, ids)
    config = {**stack, "chunk": {"tokens": 48}}
    with open_cache(served, config) as cache:
        assert torch.equal(cache.generate(ids, **GREEDY), expected)
    again = open_cache(served, config)
    assert torch.equal(again.generate(ids, **GREEDY), expected)
    assert again.last_prompts[0].by_tier == {"disk": 240}


def test_a_prefix_may_be_longer_than_the_host_tier(
    model: Callable[..., Any], open_cache: Callable[..., Any], stack: dict[str, Any]
) -> None:
    """A document's KV passes through a host tier of any size, part by part, both ways."""
    served, tokens = model("gemma3"), make_prompt(1200, seed=4)
    small = {**stack, "host": {"capacity": "384KiB"}}
    with open_cache(served, small) as cache:
        cache.prefill(tokens)
        slots = 384 * 1024 // (4096 + max(group.payload_bytes for group in cache.stack.geometry.groups))
        assert slots < 1200 // 16
    again = open_cache(served, small)
    hit = again.load(tokens)
    assert hit.tokens == 1199
    plain = computed_in_pieces(served, tokens, [*range(64, 1200, 64), 1200])
    for ours, theirs in zip(contents(hit.past_key_values), contents(plain), strict=True):
        shared = min(ours.shape[2], theirs.shape[2] - 1)
        assert torch.equal(ours[:, :, -shared:], theirs[:, :, -1 - shared : -1])


def test_keys_are_chained_over_all_tokens(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """A block behind another beginning is another block, however equal its own tokens are."""
    served, shared = model("llama"), make_prompt(64, seed=5)
    cache = open_cache(served)
    cache.prefill([5] * 16 + shared)
    assert cache.load([6] * 16 + shared + [7]).tokens == 0
    assert cache.load([5] * 16 + shared + [7]).tokens == 80
