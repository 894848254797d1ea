"""Sliding layers: dropped tokens are recorded until they are stored, at every chunk, and never in part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import GREEDY, WINDOW, computed_in_pieces, contents, greedy, make_prompt
from transformers import DynamicCache

from tierkv.integrations.transformers.layers import cache_option
from tierkv.integrations.transformers.restored import PrefixCache, RecordingSlidingLayer

KINDS = ["gemma3", "mistral"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [32, 48, 112, 144])
def test_a_hit_may_end_at_any_chunk_of_what_was_stored(
    kind: str, shared: int, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """Two prompts part wherever they like: the window before that place must be there, though the first prompt's
    layers had long forgotten it."""
    served, document = model(kind), make_prompt(180)
    cache = open_cache(served)
    cache.generate(document, **GREEDY)
    other = torch.tensor([document[: shared + 5] + make_prompt(30, seed=9)])
    assert torch.equal(cache.generate(other, **GREEDY), greedy(served, other))
    assert cache.last_prompts[0].loaded_tokens == shared


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_and_two_questions(kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """The very use: prepared once, asked often, each time from the document's last whole chunk on."""
    served, document = model(kind), make_prompt(150)
    with open_cache(served) as cache:
        cache.prefill(document)
    cache = open_cache(served)
    for seed in (1, 2):
        prompt = torch.tensor([document + make_prompt(12, seed=seed)])
        assert torch.equal(cache.generate(prompt, **GREEDY), greedy(served, prompt))
        assert cache.last_prompts[0].loaded_tokens == 144


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_longer_than_the_window(kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """Decoding moves the window on token by token; the chunks it passes are stored all the same."""
    served, prompt = model(kind), torch.tensor([make_prompt(30)])
    cache = open_cache(served)
    longer = cache.generate(prompt, **{**GREEDY, "max_new_tokens": 3 * WINDOW})
    assert torch.equal(cache.generate(longer, **GREEDY), greedy(served, longer))
    assert cache.last_prompts[0].loaded_tokens == (30 + 3 * WINDOW - 1) // 16 * 16
    earlier = torch.cat([longer[:, :70], prompt[:, :5]], dim=1)
    assert torch.equal(cache.generate(earlier, **GREEDY), greedy(served, earlier))
    assert cache.last_prompts[0].loaded_tokens == 64


def test_a_foreign_cache_is_stored_as_far_as_it_remembers(
    model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """A plain DynamicCache has one window. Its chunks are stored where they are whole; a chunk that has lost a token
    is not, since it would be found by those who need that token."""
    served, tokens = model("gemma3"), make_prompt(160)
    cache = open_cache(served)
    cache.store(torch.tensor([tokens]), computed_in_pieces(served, tokens, (160,)))
    # The window of 40 before a hit covers three chunks; transformers keeps 39 tokens, of which two chunks are whole.
    assert cache.load([*tokens, 5]).tokens == 0
    assert cache.stack.metrics.counters.chunks_stored == 160 // 16 + 2
    ids = torch.tensor([[*tokens, 5]])
    assert torch.equal(cache.generate(ids, **GREEDY), greedy(served, ids))


def test_a_foreign_cache_without_windows_is_stored_whole(
    model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """A DynamicCache made without a configuration keeps everything, in sliding layers too."""
    served, tokens = model("gemma3"), make_prompt(160)
    plain = DynamicCache()
    with torch.no_grad():
        served(input_ids=torch.tensor([tokens]), **cache_option(served, plain), use_cache=True)
    cache = open_cache(served)
    cache.store(tokens, plain)
    ids = torch.tensor([[*tokens, 5]])
    assert torch.equal(cache.generate(ids, **GREEDY), greedy(served, ids))
    assert cache.last_prompts[0].loaded_tokens == 160


class TestTheRecord:
    """Of a sliding layer: it stays in step with the window, or ends."""

    @staticmethod
    def filled(model: Any, tokens: list[int]) -> PrefixCache:
        cache = PrefixCache(model.config)
        with torch.no_grad():
            for start in range(0, len(tokens), 25):
                ids = torch.tensor([tokens[start : start + 25]])
                model(input_ids=ids, **cache_option(model, cache), use_cache=True)
        return cache

    @staticmethod
    def sliding(cache: PrefixCache) -> RecordingSlidingLayer:
        return next(layer for layer in cache.layers if isinstance(layer, RecordingSlidingLayer))

    def test_it_ends_with_the_window(self, model: Callable[..., Any]) -> None:
        """Pages are cut from it by counting from its end."""
        cache = self.filled(model("mistral"), make_prompt(100))
        layer = self.sliding(cache)
        keys, values = layer.recorded()
        assert keys.shape[2] == 100
        assert torch.equal(keys[:, :, -(WINDOW - 1) :], layer.keys)
        assert torch.equal(values[:, :, -(WINDOW - 1) :], layer.values)

    def test_what_is_stored_is_forgotten(self, model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
        """Or a long document would be in memory whole, in every layer."""
        served = model("mistral")
        past = open_cache(served).prefill(make_prompt(1000)).past_key_values
        for layer in past.layers:
            assert layer.recorded()[0].shape[2] == 1000 % 16
            assert layer.recorded()[0].untyped_storage().nbytes() == layer.recorded()[0].nbytes

    def test_crop_takes_back_the_same_tokens(self, model: Callable[..., Any]) -> None:
        """Assisted decoding takes back what was guessed wrong."""
        served = model("mistral")
        cache = self.filled(served, make_prompt(30))
        cache.crop(20 if cache.layers[0].crop.__doc__ is None else -10)
        assert cache.get_seq_length() == 20
        shorter = self.filled(served, make_prompt(30)[:20])
        assert self.sliding(cache).recorded()[0].shape[2] == 20
        for ours, theirs in zip(contents(cache), contents(shorter), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)

    @pytest.mark.parametrize(
        "change",
        [
            lambda cache: cache.reorder_cache(torch.tensor([0])),
            lambda cache: cache.batch_repeat_interleave(2),
            lambda cache: cache.batch_select_indices(torch.tensor([0])),
            lambda cache: cache.reset(),
        ],
        ids=["reorder", "repeat", "select", "reset"],
    )
    def test_it_ends_where_rows_change(self, change: Callable[[Any], None], model: Callable[..., Any]) -> None:
        """Else tokens of one row would be stored as another's."""
        cache = self.filled(model("mistral"), make_prompt(50))
        change(cache)
        assert all(layer.recorded() is None for layer in cache.layers)

    def test_a_copy_goes_its_own_way(self, model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
        """Users copy a prefix's cache for each question; what one of them records is not the other's."""
        served, document = model("gemma3"), make_prompt(100)
        cache = open_cache(served)
        prefix = cache.prefill(document)
        for seed in (1, 2):
            ids = torch.tensor([document + make_prompt(30, seed=seed)])
            past = copy.deepcopy(prefix.past_key_values)
            out = served.generate(ids, attention_mask=torch.ones_like(ids), **cache_option(served, past), **GREEDY)
            assert torch.equal(out, greedy(served, ids))
            cache.store(out, past)
            assert torch.equal(cache.generate(out, **GREEDY), greedy(served, out))
            assert cache.last_prompts[0].loaded_tokens == 144
