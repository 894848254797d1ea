"""Effect of a lossy codec on a model's output: it reads the rest of a text after the restored KV of its beginning.

What it expects next is compared with what it expects after the exact KV, at each token of the rest. The limit beside
that is the divergence where the beginning is forgotten altogether. What stands below it as "read in one piece" happens
without any codec: reading a text in two pieces rounds otherwise than reading it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.models.codecs import Subject
from benchmarks.models.kv_pages import PageLayout, PromptKv
from benchmarks.models.pressing import Press
from benchmarks.models.real_model import RealModel
from benchmarks.rows import Row


@dataclass(frozen=True, slots=True)
class EffectSizes:
    """Sizes in tokens. beginning: its KV is restored. rest: read after it. greedy: generated after the beginning."""

    beginning: int
    rest: int
    greedy: int


def effects(  # noqa: PLR0913, PLR0917 - a text, what was made of it, and what is to be done with it
    model: RealModel,
    lossy: Sequence[Subject],
    text: str,
    tokens: Sequence[int],
    kv: PromptKv,
    groups: Mapping[str, Sequence[Sequence[int]]],
    layout: PageLayout,
    sizes: EffectSizes,
) -> Iterator[Row]:
    """Yield a row per codec: distance of the model's next-token distribution from that after the exact KV."""
    rest = tokens[sizes.beginning :]
    # The last token of the beginning is computed in any case: engines need what is said after it.
    prefix, last = kv.first(sizes.beginning - 1), tokens[sizes.beginning - 1]
    exact = model.logits([last, *rest], len(rest), prefix)
    at_once = model.logits(tokens, len(rest))
    alone = model.logits([tokens[0], *rest], len(rest))
    said = model.greedy([last], sizes.greedy, prefix)
    forgotten = divergence(exact, alone)
    for subject in lossy:
        restored = restore(subject, kv, groups, layout).first(sizes.beginning - 1)
        found = model.logits([last, *rest], len(rest), restored)
        written = equal_front(said, model.greedy([last], sizes.greedy, restored))
        extra = {
            "of tokens the same is the likeliest, %": 100 * agreement(exact, found),
            "largest difference of logits": float((exact - found).abs().max()),
            f"of {sizes.greedy} tokens written, equal before the first difference": float(written),
            "read in one piece: nats": divergence(exact, at_once),
            "read in one piece: of tokens the same is the likeliest, %": 100 * agreement(exact, at_once),
            "read in one piece: largest difference of logits": float((exact - at_once).abs().max()),
        }
        what = f"{subject.name}, divergence of the next token, {text}"
        yield Row(what, "nats", divergence(exact, found), "the beginning is forgotten", forgotten, extra=extra)


def restore(
    subject: Subject, kv: PromptKv, groups: Mapping[str, Sequence[Sequence[int]]], layout: PageLayout
) -> PromptKv:
    """KV as read from a tier with this codec, without the tokens behind the last whole chunk."""
    press = Press(subject.codec)
    tokens = kv.num_tokens // layout.chunk_tokens * layout.chunk_tokens
    keys, values = kv.keys[:, :tokens].copy(), kv.values[:, :tokens].copy()
    for of_kind in groups.values():
        for layers in of_kind:
            chunks = np.stack([press.restored(payload)[1] for payload in layout.cut(kv, layers)])
            back = layout.join(chunks, len(layers))
            keys[layers], values[layers] = back.keys, back.values
    return PromptKv(keys, values)


def divergence(truth: Any, found: Any) -> float:  # noqa: ANN401 - torch
    """Kullback-Leibler divergence of ``found`` from ``truth``, the mean over tokens, in nats."""
    truth, found = truth.log_softmax(-1), found.log_softmax(-1)
    return max(0.0, float((truth.exp() * (truth - found)).sum(-1).mean()))


def agreement(truth: Any, found: Any) -> float:  # noqa: ANN401 - torch
    """Share of tokens at which both have the same most likely next token."""
    return float((truth.argmax(-1) == found.argmax(-1)).float().mean())


def equal_front(truth: Sequence[int], found: Sequence[int]) -> int:
    """Number of equal tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(truth, found, strict=True)) if a != b), len(truth))
