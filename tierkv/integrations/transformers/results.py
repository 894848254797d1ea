"""What :class:`~tierkv.integrations.transformers.TieredPrefixCache` tells of each prompt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tierkv.integrations.transformers.restored import PrefixCache


@dataclass(slots=True)
class PromptReport:
    """One prompt in one call.

    prompt_tokens: its length without padding.
    loaded_tokens: tokens that came from tiers and need not be computed.
    by_tier: where they lay: tokens per tier whose bytes were read. The last chunk may hold tokens that were not needed.
    computed_tokens: tokens that this call ran through the model, generated ones not among them.
    offered_tokens: tokens whose KV this call handed to the stack.
    shortened_tokens: tokens that were there and were not loaded, because computing them was expected to be faster.
    load_s, compute_s, store_s: seconds that these took.
    """

    prompt_tokens: int
    loaded_tokens: int = 0
    by_tier: Counter[str] = field(default_factory=Counter)
    computed_tokens: int = 0
    offered_tokens: int = 0
    shortened_tokens: int = 0
    load_s: float = 0.0
    compute_s: float = 0.0
    store_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV that is ready for the model.

    past_key_values: pass it to the model or to ``generate``; it is the caller's own and grows as the model runs.
    tokens: columns of ``input_ids`` that it covers, padding included: ``input_ids[:, tokens:]`` is left to compute.
    prompts: what was done for each row.
    """

    past_key_values: PrefixCache
    tokens: int
    prompts: tuple[PromptReport, ...]
