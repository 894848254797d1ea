"""``TieredPrefixCache``: the public class of the adapter."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tierkv.config import StackConfig
from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.integrations.transformers.batches import (
    Batch,
    Inputs,
    batch_of,
    check_arguments,
    expansion,
    rows_with_answers,
)
from tierkv.integrations.transformers.defaults import model_name, stack_config
from tierkv.integrations.transformers.engine import FLUSH_TIMEOUT_S, StackEngine
from tierkv.integrations.transformers.identity import Identity, PromptOptions, prompt_tokens_max
from tierkv.integrations.transformers.layers import (
    Model,
    ModelCache,
    cache_option,
    check_evaluates,
    kv_shape,
    positions_skip_padding,
)
from tierkv.integrations.transformers.restored import PrefixCache, RecordingSlidingLayer
from tierkv.integrations.transformers.results import CacheStats, Prefix, Progress, PromptReport, PromptSums, reporting
from tierkv.integrations.transformers.work import PromptWork
from tierkv.metrics.serving import MetricsServer, serve_metrics
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack
from tierkv.types.engine import EngineSpec
from tierkv.types.geometry import cdiv

BLOCK_TOKENS = 64
PIECE_TOKENS = 1024
_LAYER_CLASSES = (DynamicLayer, DynamicSlidingWindowLayer, RecordingSlidingLayer)


class TieredPrefixCache:
    """Prefix cache of one model in a stack of tiers, for ``generate`` and forward passes.

    One thread at a time may use it; a concurrent call is refused. A failing tier shortens a prefix and never raises.
    Close the cache, or use it as a context manager, to write pending chunks. Otherwise it is closed when the
    interpreter exits.

    Args:
        model: model of transformers in evaluation mode, with a language head; may be wrapped by PEFT.
        stack: path of a stack description (TOML, YAML or JSON), the description as a mapping, or a folder for a stack
            of up to 8 GiB of disk below 64 to 512 MiB of memory, by the size of a chunk.
        block_tokens: tokens per block. The stack's ``[chunk]`` joins several blocks. Prefixes are found in whole
            chunks.
        piece_tokens: prompts are computed in pieces that end at multiples of this, or of the chunk if that is larger.
        name: name of the model in the namespace. Default: its name on the hub, the last part of its path, or its class
            and size.

    Raises:
        ConfigError: the model is not supported, or the description is wrong.
        PluginError: a plugin that the stack names is missing or broken.
        BackendError: a tier cannot be opened. A folder belongs to one cache of a model at a time.
    """

    def __init__(
        self,
        model: Model,
        stack: StackConfig | Mapping[str, Any] | str | Path,
        *,
        block_tokens: int = BLOCK_TOKENS,
        piece_tokens: int = PIECE_TOKENS,
        name: str | None = None,
    ) -> None:
        sizes: tuple[tuple[str, object], ...] = (("block_tokens", block_tokens), ("piece_tokens", piece_tokens))
        for key, value in sizes:
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{key} = {value!r:.80}: give a whole number from 1")
        self._model = model
        self._shape = kv_shape(model)
        self._takes_padding = positions_skip_padding(model)
        config = stack_config(stack, self._shape, block_tokens)
        self._block_tokens = block_tokens
        opened = open_stack(config, self._engine_spec(name))
        self._engine = StackEngine(opened, config, block_tokens)
        piece_tokens = cdiv(piece_tokens, self._engine.chunk_tokens) * self._engine.chunk_tokens
        tokens_max = prompt_tokens_max(model)
        self._work = PromptWork(model, self._shape, self._engine, Identity(model), piece_tokens, tokens_max)
        self._lock = threading.Lock()
        self._close_at_end = weakref.finalize(self, opened.close)
        self._sums = PromptSums()
        self.last_prompts: tuple[PromptReport, ...] = ()
        """Reports of the most recent call, one per prompt."""

    def _engine_spec(self, name: str | None) -> EngineSpec:
        config = self._model.config
        return EngineSpec(
            model=name or model_name(self._model),
            revision=getattr(config, "_commit_hash", None) or "",
            dtype=str(self._shape.dtype).removeprefix("torch."),
            layout="transformers",
            groups=self._shape.group_specs(self._block_tokens),
            hash_block_tokens=self._block_tokens,
        )

    @property
    def stack(self) -> Stack:
        """Stack of the cache, for its counters, its tiers and ``reset_cache``. To be used on the same thread."""
        return self._engine.stack

    def serve_metrics(self, port: int = 0, *, address: str = "127.0.0.1") -> MetricsServer:
        """Serve the metrics of the cache over HTTP, for Prometheus; see :func:`tierkv.serve_metrics`. Any thread.

        Raises:
            ConfigError: the address or the port cannot be used.
        """
        return serve_metrics(self.stack, port, address=address)

    # -- public methods ---------------------------------------------------------------------------------------------

    def load(
        self,
        input_ids: Inputs,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> Prefix:
        """Load the prefixes of prompts from the tiers. Computes nothing.

        At least the last token of each prompt remains to be computed, for its logits. A batch has one number of loaded
        columns: that of the row with the shortest prefix. With sliding-window layers, the lengths of the rows must be
        equal or differ by whole chunks. Otherwise nothing is loaded; :meth:`prefill` and :meth:`generate` load each row
        by itself.

        Args:
            input_ids: [batch, columns] left-padded, [columns], or lists of ids.
            attention_mask: [batch, columns], where there is padding.
            cache_salt: salt of the tenant. Prompts with different salts share no chunks.
            hints: hints of the prompts (docs/how-to/give-hints.md).

        Raises:
            ValueError: the prompts are not supported. The message gives the reason.
            EngineProtocolError: the cache is closed, or another thread is using it.
        """
        with self._exclusive():
            batch = self._batch(input_ids, attention_mask)
            prompts = self._work.prompts_of(batch.rows, PromptOptions(cache_salt, hints))
            reports = tuple(PromptReport(len(row)) for row in batch.rows)
            caches, columns = self._work.load_rows(batch, prompts, reports)
            past = self._work.joined(caches, batch.pads, columns)
            self._note(reports)
            return Prefix(past, cache_option(self._model, past), columns, reports)

    def prefill(
        self,
        input_ids: Inputs,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
        progress: Progress | bool | None = None,
    ) -> Prefix:
        """Load the prefixes of prompts, compute the rest, store it, and wait until the tiers have written it.

        For documents at the start of many prompts. Errors are those of :meth:`load`. The result covers all columns.

        Args:
            input_ids: as in :meth:`load`.
            attention_mask: as in :meth:`load`.
            cache_salt: as in :meth:`load`.
            hints: as in :meth:`load`.
            progress: called with the numbers of tokens done and of all, after each piece. True: a bar, also where the
                output is no terminal. False: none. Default: a bar on a terminal, from the second second on.
        """
        with self._exclusive():
            batch = self._batch(input_ids, attention_mask)
            prompts = self._work.prompts_of(batch.rows, PromptOptions(cache_salt, hints))
            with reporting(progress=progress, tokens=sum(map(len, batch.rows))) as report:
                past, reports = self._work.prefilled(batch, prompts, 0, report)
            self._engine.flush()
            self._note(reports)
            return Prefix(past, cache_option(self._model, past), past.get_seq_length(), reports)

    def generate(
        self,
        input_ids: Inputs,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
        store_answer: bool = True,
        **arguments: Any,  # noqa: ANN401 - arguments of generate
    ) -> Any:  # noqa: ANN401 - result of generate
        """Run ``model.generate`` with prefixes from the tiers, and store new chunks.

        Each prompt of a batch uses its own prefix of any length. :attr:`last_prompts` has the reports.

        Args:
            input_ids: [batch, columns] left-padded, [columns], or lists of ids, which are padded.
            attention_mask: [batch, columns], where there is padding.
            cache_salt: salt of the tenant. Prompts with different salts share no chunks.
            hints: hints of the prompts (docs/how-to/give-hints.md).
            store_answer: also store generated tokens, for the next turn of a conversation. Has no effect with beam
                search or several sequences per prompt.
            **arguments: arguments of ``model.generate``.

        Returns:
            The result of ``model.generate``.

        Raises:
            ValueError: prompts or arguments are not supported. The message gives the reason.
            EngineProtocolError: the cache is closed, or another thread is using it.
        """
        check_arguments(self._model, arguments)
        with self._exclusive():
            batch = self._batch(input_ids, attention_mask)
            past, reports = self._work.prefilled(
                batch, self._work.prompts_of(batch.rows, PromptOptions(cache_salt, hints)), 1
            )
            self._note(reports)
            rows_each = expansion(self._model, arguments)
            if rows_each > 1 and past.get_seq_length():
                past.batch_repeat_interleave(rows_each)
            out = self._model.generate(
                batch.input_ids, attention_mask=batch.attention_mask, **cache_option(self._model, past), **arguments
            )
            if store_answer and rows_each == 1 and not self._engine.config.store.prompt_only:
                rows = rows_with_answers(self._model, batch, out, arguments)
                self._work.store_batch(rows, batch.pads, past, PromptOptions(cache_salt, hints), reports)
            return out

    def store(
        self,
        input_ids: Inputs,
        past_key_values: ModelCache,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> tuple[PromptReport, ...]:
        """Store KV of tokens that the model computed elsewhere, for example in ``model.generate``.

        A cache from :meth:`load` has all tokens since then. In another ``DynamicCache``, sliding-window layers only
        have the last window. Without chunks of these layers, no prefix that ends earlier can be found.

        Args:
            input_ids: tokens of the cache, or the first of them, such as the prompt alone.
            past_key_values: a ``DynamicCache``, which belongs to the caller. Not after beam search, which mixes its
                rows.
            attention_mask: mask of ``input_ids``, where there is padding.
            cache_salt: as in :meth:`load`.
            hints: as in :meth:`load`.

        Raises:
            TypeError: the cache is of another class.
            ValueError: the cache does not belong to these tokens, or not to this model.
            EngineProtocolError: the cache is closed, or another thread is using it.
        """
        with self._exclusive():
            batch = self._batch(input_ids, attention_mask)
            _check_cache(past_key_values, len(self._shape.layers), len(batch.rows))
            reports = tuple(PromptReport(len(row)) for row in batch.rows)
            self._work.store_batch(batch.rows, batch.pads, past_key_values, PromptOptions(cache_salt, hints), reports)
            self._note(reports)
            return reports

    # -- what is kept ------------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return sums of all calls so far, and the content of each tier. Any thread."""
        return self._sums.stats(self.stack)

    def forget(
        self,
        input_ids: Inputs,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        timeout_s: float = FLUSH_TIMEOUT_S,
    ) -> bool:
        """Remove prompts from every tier, with each beginning that other prompts share with them.

        They are not loaded any more, whatever is returned. Computing them stores them again.

        Args:
            input_ids: as in :meth:`load`.
            attention_mask: as in :meth:`load`.
            cache_salt: salt that they were stored with.
            timeout_s: longest wait for the tiers.

        Returns:
            Whether all tiers have deleted them. False: a tier is slow, or out of service.

        Raises:
            EngineProtocolError: a tier is read-only, the cache is closed, or another thread is using it.
        """
        with self._exclusive():
            batch = batch_of(self._model, input_ids, attention_mask)
            return self._engine.forget(self._work.prompts_of(batch.rows, PromptOptions(cache_salt)), timeout_s)

    def clear(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Remove all prompts of this model from every tier. Returns False if some are not deleted in time.

        Raises:
            EngineProtocolError: a tier is shared or read-only, the cache is closed, or another thread is using it.
        """
        with self._exclusive():
            self._engine.drain()
            self.stack.reset_cache("all")
            return self._engine.flush(timeout_s)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until lower tiers have written all stored chunks. Return False if some are not written in time."""
        with self._exclusive():
            return self._engine.flush(timeout_s)

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Write pending chunks and close the stack. Idempotent.

        Returns:
            Whether all stored chunks were written to their tiers.
        """
        with self._lock:  # wait for the call of another thread
            self._close_at_end.detach()
            return self._engine.stack.close(timeout_s)

    def __enter__(self) -> Self:
        """Return the open cache."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the cache."""
        self.close()

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _batch(self, input_ids: Inputs, attention_mask: torch.Tensor | None) -> Batch:
        """Return prompts as a batch. Refuse padding where it would change positions, and so KV."""
        batch = batch_of(self._model, input_ids, attention_mask)
        if any(batch.pads) and not self._takes_padding:
            raise ValueError(
                f"prompts of different lengths: {type(self._model).__name__} counts padding in its positions, so KV of "
                "a padded prompt is not that of its tokens. Give prompts of one length, or one at a time"
            )
        return batch

    def _note(self, reports: tuple[PromptReport, ...]) -> None:
        """Keep the reports of a call: it may still fill them."""
        self._sums.begin(reports)
        self.last_prompts = reports

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Refuse a concurrent thread, a closed cache, and a model in training mode."""
        if not self._close_at_end.alive:
            raise EngineProtocolError("this TieredPrefixCache is closed; create another one")
        if not self._lock.acquire(blocking=False):
            raise EngineProtocolError("another thread is using this TieredPrefixCache; give each thread its own turn")
        try:
            check_evaluates(self._model)
            with torch.no_grad():
                yield
        finally:
            self._lock.release()


def _check_cache(cache: ModelCache, num_layers: int, num_rows: int) -> None:
    if not isinstance(cache, DynamicCache) or not all(type(layer) in _LAYER_CLASSES for layer in cache.layers):
        layers = sorted({type(layer).__name__ for layer in getattr(cache, "layers", ())})
        raise TypeError(
            f"past_key_values is a {type(cache).__name__} with layers {', '.join(layers) or 'unknown'}; only a "
            "DynamicCache of attention layers can be stored: call generate without cache_implementation"
        )
    if len(cache.layers) != num_layers:
        raise ValueError(
            f"past_key_values has {len(cache.layers)} layers and the model {num_layers}: is it filled, by this model?"
        )
    if isinstance(cache, PrefixCache) and not cache.rows:
        raise ValueError("past_key_values went through beam search, which mixes its rows: it cannot be stored")
    rows = {layer.keys.shape[0] for layer in cache.layers if layer.keys is not None and layer.keys.numel()}
    if rows - {num_rows}:
        raise ValueError(f"past_key_values has {sorted(rows)} rows and input_ids {num_rows}: one for each is needed")
