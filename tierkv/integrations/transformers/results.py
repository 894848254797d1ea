"""Results of :class:`~tierkv.integrations.transformers.TieredPrefixCache` for each prompt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tierkv.integrations.transformers.restored import PrefixCache


@dataclass(slots=True)
class PromptReport:
    """Report on one prompt of one call."""

    prompt_tokens: int
    """Length of the prompt without padding."""
    loaded_tokens: int = 0
    """Tokens loaded from tiers, which need not be computed."""
    by_tier: Counter[str] = field(default_factory=Counter)
    """Loaded tokens by the tier whose bytes were read. The last chunk may have tokens that were not needed."""
    computed_tokens: int = 0
    """Tokens that this call computed, without generated ones."""
    offered_tokens: int = 0
    """Tokens whose KV this call passed to the stack."""
    shortened_tokens: int = 0
    """Tokens of the hit that were not loaded, because computing them was expected to be faster."""
    load_s: float = 0.0
    """Seconds spent on loading."""
    compute_s: float = 0.0
    """Seconds spent on computing."""
    store_s: float = 0.0
    """Seconds spent on storing."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV of a batch of prefixes, ready for the model."""

    past_key_values: PrefixCache
    """Cache to pass to the model or to ``generate``. It belongs to the caller and grows as the model runs."""
    tokens: int
    """Columns of ``input_ids`` that the cache covers, padding included. The model must compute ``input_ids[:,
    tokens:]``."""
    prompts: tuple[PromptReport, ...]
    """Report on each row."""
