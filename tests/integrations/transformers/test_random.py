"""Whatever users do, in whatever order and sizes: the text is the one that the model gives without a cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import GREEDY, greedy, make_prompt, padded

from tierkv.integrations.transformers.layers import cache_option

STEPS = 6


class User:
    """Asks about a few documents, in one of the ways there are."""

    def __init__(self, model: Any, rng: random.Random) -> None:
        self._model = model
        self._rng = rng
        self._texts = [make_prompt(rng.randrange(1, 260), seed=rng.randrange(99)) for _ in range(3)]

    def prompt(self) -> list[int]:
        """A known text up to some place, and something new behind it."""
        known = self._rng.choice(self._texts)
        start = known[: self._rng.randrange(len(known) + 1)]
        return start + make_prompt(self._rng.randrange(1, 50), seed=self._rng.randrange(10_000))

    def step(self, cache: Any) -> None:
        """One call or a few, and a check of the answer."""
        rows = [self.prompt() for _ in range(self._rng.choice([1, 1, 1, 2, 3]))]
        ids, mask = padded(rows)
        settings = {**GREEDY, "max_new_tokens": self._rng.randrange(1, 60)}
        expected = greedy(self._model, ids, mask, **settings)
        match self._rng.randrange(4):
            case 0:
                cache.prefill(ids, mask)
                out = cache.generate(ids, mask, **settings)
            case 1:
                past = cache.load(ids, mask).past_key_values
                out = self._model.generate(ids, attention_mask=mask, **cache_option(self._model, past), **settings)
                cache.store(out, past, torch.cat([mask, torch.ones_like(out[:, ids.shape[1] :])], dim=1))
            case 2:
                cache.stack.reset_cache()
                out = cache.generate(rows, **settings)
            case _:
                out = cache.generate(ids, mask, **settings)
        assert torch.equal(out, expected)
        self._texts[self._rng.randrange(3)] = out[0, int((mask[0] == 0).sum()) :].tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral"])
def test_a_day_of_use(
    kind: str, model: Callable[..., Any], open_cache: Callable[..., Any], stack: dict[str, Any], rng: random.Random
) -> None:
    """Random prompts, batches and calls over random sizes of blocks, chunks, pieces and host tier, with a restart."""
    served = model(kind)
    user = User(served, rng)
    block = rng.choice([4, 16, 32])
    config = {
        **stack,
        "chunk": {"blocks": rng.choice([1, 1, 2, 3])},
        "host": {"capacity": rng.choice(["256KiB", "512KiB", "8MiB"])},
    }
    for _ in range(2):
        with open_cache(served, config, block_tokens=block, piece_tokens=rng.choice([1, 50, 64, 1000])) as cache:
            for _ in range(STEPS):
                user.step(cache)
            assert not cache.stack.has_pending_work()
