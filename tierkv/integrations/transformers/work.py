"""Processing of prompts, row by row: load from the tiers, compute the rest, store new chunks.

Arguments are checked by the caller. Rows are computed one by one, each behind its own prefix, and joined into a batch
at the end. So no row waits for the prefix of another, and a window ends where its row ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tierkv.integrations.transformers.batches import Batch
from tierkv.integrations.transformers.engine import StackEngine
from tierkv.integrations.transformers.identity import Identity, Prompt, PromptOptions, adapter_name, block_hashes
from tierkv.integrations.transformers.layers import (
    KvShape,
    Model,
    ModelCache,
    cache_option,
    forward_options,
    input_device,
)
from tierkv.integrations.transformers.pages import CachedRow, Pages
from tierkv.integrations.transformers.restored import PrefixCache, RecordingSlidingLayer, Row, joined
from tierkv.integrations.transformers.results import PromptReport
from tierkv.types.geometry import cdiv


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Processing with one model and one stack."""

    model: Model
    """The model."""
    shape: KvShape
    """Shape of its KV cache."""
    engine: StackEngine
    """Engine over the stack."""
    identity: Identity
    """Identity of the model."""
    piece_tokens: int
    """Prompts are computed in pieces that end at multiples of this; a multiple of a chunk."""
    tokens_max: int | None
    """Longer texts are not cached (:func:`~.identity.prompt_tokens_max`); None: no limit."""

    def prompts_of(self, rows: Sequence[tuple[int, ...]], options: PromptOptions) -> list[Prompt]:
        """Hash rows of tokens under the model's present state."""
        root, adapter = self.identity.root(), adapter_name(self.model)
        return [Prompt(row, block_hashes(root, row, self.engine.block_tokens), adapter, options) for row in rows]

    def _can_be_cached(self, num_tokens: int) -> bool:
        return self.tokens_max is None or num_tokens <= self.tokens_max

    # -- loading and computing ---------------------------------------------------------------------------------------

    def prefilled(
        self, batch: Batch, prompts: Sequence[Prompt], left_out: int, advanced: Callable[[int], object] = lambda _: None
    ) -> tuple[PrefixCache, tuple[PromptReport, ...]]:
        """Load and compute KV of all but the last ``left_out`` tokens of each row.

        advanced: called with the number of tokens that were loaded, or computed in one piece.
        """
        reports = tuple(PromptReport(len(row)) for row in batch.rows)
        if not self._can_be_cached(batch.columns):  # long texts must not be computed in pieces
            return self._empty(batch.pads), reports
        caches = []
        for prompt, report in zip(prompts, reports, strict=True):
            tokens = len(prompt.tokens) - left_out
            cache = self._restored(prompt, tokens, report)
            advanced(cache.get_seq_length())
            self._compute(prompt, tokens, cache, report, advanced)
            caches.append(cache)
        return self.joined(caches, batch.pads, batch.columns - left_out), reports

    def _empty(self, pads: Sequence[int]) -> PrefixCache:
        return PrefixCache(self.model.config, [Row(pad) for pad in pads])

    def joined(self, caches: Sequence[PrefixCache], pads: Sequence[int], columns: int) -> PrefixCache:
        """Join caches of one row each to one of ``columns`` columns, padding included."""
        if not columns:
            return self._empty(pads)
        if len(caches) == 1 and not pads[0]:
            return caches[0]
        return joined(self.model.config, self.shape, caches, pads, columns)

    def load_rows(
        self, batch: Batch, prompts: Sequence[Prompt], reports: Sequence[PromptReport]
    ) -> tuple[list[PrefixCache], int]:
        """Load each row from the tiers, cut to a common number of columns."""
        columns = batch.columns - 1
        apart = len({pad % self.engine.chunk_tokens for pad in batch.pads}) > 1 and self.shape.has_windows
        if apart or not self._can_be_cached(batch.columns):
            return [self._empty((0,)) for _ in prompts], 0
        caches = [
            self._restored(prompt, columns - pad, report)
            for prompt, pad, report in zip(prompts, batch.pads, reports, strict=True)
        ]
        while True:
            ends = [
                pad + cache.get_seq_length() for cache, pad in zip(caches, batch.pads, strict=True) if pad < columns
            ]
            if min(ends, default=columns) == columns:
                break
            columns = min(ends)
            for row, pad in enumerate(batch.pads):
                if pad + caches[row].get_seq_length() > columns:
                    caches[row] = self._shortened(caches[row], prompts[row], columns - pad, reports[row])
        return caches, columns if any(cache.get_seq_length() for cache in caches) else 0

    def _shortened(self, cache: PrefixCache, prompt: Prompt, tokens: int, report: PromptReport) -> PrefixCache:
        """Cut a row to fewer tokens. With windows it is loaded again, because another part is needed."""
        if self.shape.has_windows or tokens < 1:
            return self._restored(prompt, tokens, report)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
        report.loaded_tokens = tokens
        return cache

    def _restored(self, prompt: Prompt, tokens_max: int, report: PromptReport) -> PrefixCache:
        """Load a cache from the tiers, up to ``tokens_max`` tokens."""
        cache = self._empty((0,))
        report.loaded_tokens, report.by_tier = 0, Counter()
        if tokens_max < 1:
            return cache
        pages = Pages(self.shape, self.engine.block_tokens, cdiv(tokens_max, self.engine.block_tokens))
        tokens = self.engine.load(prompt, tokens_max, pages, report)
        if tokens:
            pages.restore(cache, tokens)
            self._note_stored(cache, 0, prompt, cdiv(tokens, self.engine.chunk_tokens) * self.engine.chunk_tokens)
        return cache

    def _compute(
        self,
        prompt: Prompt,
        tokens: int,
        cache: PrefixCache,
        report: PromptReport,
        advanced: Callable[[int], object],
    ) -> None:
        """Run the model up to ``tokens`` tokens, piece by piece, and store each piece while the next one runs."""
        piece_blocks = self.piece_tokens // self.engine.block_tokens
        pages: Pages | None = None
        position, number = cache.get_seq_length(), 0
        while position < tokens:
            end = min(tokens, (position // self.piece_tokens + 1) * self.piece_tokens)
            span = range(cache.rows[0].stored, end // self.engine.chunk_tokens * self.engine.chunk_tokens)
            if not span:
                self._forward(prompt.tokens[position:end], cache, report)
            else:
                if pages is None:
                    pages = Pages(
                        self.shape, self.engine.block_tokens, min(2, cdiv(tokens, self.piece_tokens)) * piece_blocks
                    )
                    self.engine.begin_storing(pages)
                first_page = 1 + number % 2 * piece_blocks
                with self.engine.storing(prompt, range(span.start, end), first_page):
                    self._forward(prompt.tokens[position:end], cache, report)
                    started_s = time.perf_counter()
                    pages.take(CachedRow(cache), span, first_page)
                    report.store_s += time.perf_counter() - started_s
                self._note_stored(cache, 0, prompt, span.stop)
                report.offered_tokens += len(span)
                number += 1
            advanced(end - position)
            position = end
        self.engine.drain()

    def _forward(self, tokens: Sequence[int], cache: PrefixCache, report: PromptReport) -> None:
        started_s = time.perf_counter()
        ids = torch.tensor([tokens], device=input_device(self.model))
        options = {**cache_option(self.model, cache), **forward_options(self.model)}
        self.model(input_ids=ids, use_cache=True, **options)
        report.computed_tokens += len(tokens)
        report.compute_s += time.perf_counter() - started_s

    # -- storing -----------------------------------------------------------------------------------------------------

    def _note_stored(self, cache: ModelCache, row: int, prompt: Prompt, stored: int) -> None:
        """Note that the first ``stored`` tokens of a row are in the stack."""
        at_stored = prompt.hashes[stored // self.engine.block_tokens - 1]
        rows = list(cache.rows)
        rows[row] = replace(rows[row], stored=stored, at_stored=at_stored)
        cache.rows = tuple(rows)
        kept = max(max(0, cache.get_seq_length() - one.pad - one.stored) for one in rows)
        for layer in cache.layers:
            if isinstance(layer, RecordingSlidingLayer):
                layer.forget(kept)

    def store_batch(
        self,
        rows: Sequence[tuple[int, ...]],
        pads: Sequence[int],
        cache: ModelCache,
        options: PromptOptions,
        reports: Sequence[PromptReport],
    ) -> None:
        """Store the new chunks of each row of a cache.

        Args:
            rows: tokens of each row without padding. Tokens that the cache does not have yet are skipped.
            pads: columns of padding at the left of each row.
            cache: a ``DynamicCache`` of attention layers.
            options: options of all rows.
            reports: one report per row.

        Raises:
            ValueError: the cache does not belong to these rows.
        """
        columns = cache.get_seq_length()
        prompts = self.prompts_of([row[: columns - pad] for row, pad in zip(rows, pads, strict=True)], options)
        known = cache.rows if isinstance(cache, PrefixCache) else [Row(pad) for pad in pads]
        self._check_rows(prompts, pads, known)
        pages: Pages | None = None
        for number, (prompt, row, report) in enumerate(zip(prompts, known, reports, strict=True)):
            span = range(row.stored, len(prompt.tokens) // self.engine.chunk_tokens * self.engine.chunk_tokens)
            if not span or not self._can_be_cached(cache.get_seq_length()):
                continue
            started_s = time.perf_counter()
            pages = pages or Pages(self.shape, self.engine.block_tokens, self.piece_tokens // self.engine.block_tokens)
            source = CachedRow(cache, number, row.pad)
            self.engine.store(prompt, source, span, pages, source.missing_tokens(self.shape))
            if isinstance(cache, PrefixCache):
                self._note_stored(cache, number, prompt, span.stop)
            report.offered_tokens += len(span)
            report.store_s += time.perf_counter() - started_s

    def _check_rows(self, prompts: Sequence[Prompt], pads: Sequence[int], known: Sequence[Row]) -> None:
        for number, (prompt, pad, row) in enumerate(zip(prompts, pads, known, strict=True)):
            place = row.stored // self.engine.block_tokens - 1
            if row.pad != pad:
                raise ValueError(
                    f"prompt {number} has {pad} columns of padding here and had {row.pad} when it was loaded"
                )
            if 0 <= place < len(prompt.hashes) and prompt.hashes[place] != row.at_stored:
                raise ValueError(
                    f"prompt {number} is not what this cache was loaded for: its first {row.stored} tokens differ, or "
                    "the model's weights or adapters have changed since"
                )
