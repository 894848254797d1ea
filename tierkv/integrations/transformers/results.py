"""Results of a :class:`~tierkv.integrations.transformers.TieredPrefixCache`: per prompt, sums, and progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from transformers.utils import logging

from tierkv.integrations.transformers.restored import PrefixCache
from tierkv.metrics.watched import TierContent
from tierkv.stack.stack import Stack


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
class TierUse:
    """Content of one tier. None: the tier has no index that knows it, or no such limit."""

    chunks: int | None
    """Chunks that it holds, of this model."""
    held_bytes: int | None
    """Their bytes."""
    capacity_bytes: int | None
    """Its capacity."""
    usable: bool
    """Whether it is in service."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Sums of a cache since it was opened, and the content of its tiers."""

    model: str
    """Name of the model in the namespace."""
    prompts: int
    """Prompts of all calls."""
    prompt_tokens: int
    """Their tokens."""
    loaded_tokens: int
    """Tokens loaded, which were not computed."""
    computed_tokens: int
    """Tokens computed, without generated ones."""
    by_tier: Mapping[str, int]
    """Loaded tokens by the tier whose bytes were read."""
    tiers: Mapping[str, TierUse]
    """Content of each tier, the host tier first."""

    @property
    def hit_rate(self) -> float:
        """Loaded tokens as a share of the tokens of all prompts; 0 without any."""
        return self.loaded_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PromptSums:
    """Sums over the reports of all calls. The reports of the latest call may still change."""

    def __init__(self) -> None:
        self._ended: list[PromptReport] = [PromptReport(0)]
        self._count = 0
        self._latest: tuple[PromptReport, ...] = ()

    def begin(self, reports: tuple[PromptReport, ...]) -> None:
        """Note the reports of a call, and add those of the previous one to the sums."""
        self._ended = [_sum([*self._ended, *self._latest])]
        self._count += len(self._latest)
        self._latest = reports

    def stats(self, stack: Stack) -> CacheStats:
        """Return the sums, with the content of the tiers of a stack."""
        whole, health = _sum([*self._ended, *self._latest]), stack.tiers.health()
        contents = stack.tiers.content()
        unknown = TierContent(None, None, None, None)
        return CacheStats(
            stack.namespace.model,
            self._count + len(self._latest),
            whole.prompt_tokens,
            whole.loaded_tokens,
            whole.computed_tokens,
            dict(whole.by_tier),
            {
                name: TierUse(*contents.get(name, unknown)[:3], usable=name not in health or health[name].usable)
                for name in [*contents, *(health.keys() - contents.keys())]
            },
        )


def _sum(reports: Sequence[PromptReport]) -> PromptReport:
    return PromptReport(
        sum(report.prompt_tokens for report in reports),
        sum(report.loaded_tokens for report in reports),
        sum((report.by_tier for report in reports), Counter()),
        sum(report.computed_tokens for report in reports),
    )


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV of a batch of prefixes, ready for the model."""

    past_key_values: PrefixCache
    """Cache of the prefixes. It belongs to the caller and grows as the model runs."""
    arguments: Mapping[str, PrefixCache]
    """The cache as an argument of the model and of ``generate``, by the name that this version of transformers has."""
    tokens: int
    """Columns of ``input_ids`` that the cache covers, padding included. The model must compute ``input_ids[:,
    tokens:]``."""
    prompts: tuple[PromptReport, ...]
    """Report on each row."""


# -- progress ----------------------------------------------------------------------------------------------------------

Progress = Callable[[int, int], object]
"""Called with the number of tokens done and the number of all tokens."""

BAR_AFTER_S = 1.0


@contextmanager
def reporting(*, progress: Progress | bool | None, tokens: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes numbers of further tokens that are done.

    Args:
        progress: a function; True, a bar; False, nothing; None, a bar on a terminal if it takes a while.
        tokens: number of all tokens.
    """
    if callable(progress):
        yield _counted(progress, tokens)
        return
    hidden = {True: False, False: True, None: None}[progress]  # None: tqdm looks for a terminal
    delay_s = 0.0 if progress else BAR_AFTER_S
    with logging.tqdm(total=tokens, desc="prefill", unit=" tokens", disable=hidden, delay=delay_s) as bar:
        yield bar.update


def _counted(progress: Progress, tokens: int) -> Callable[[int], object]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, tokens)

    return advance
