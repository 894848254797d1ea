"""``TieredPrefixCache``: what users of transformers hold."""

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

from tierkv.config import StackConfig, load_config, parse_config
from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.integrations.transformers.batches import Inputs, answered, batch_of, check_arguments, expansion
from tierkv.integrations.transformers.engine import FLUSH_TIMEOUT_S, StackEngine
from tierkv.integrations.transformers.identity import Identity, Terms, prompt_tokens_max
from tierkv.integrations.transformers.layers import Model, ModelCache, check_evaluates, kv_shape
from tierkv.integrations.transformers.restored import PrefixCache, RecordingSlidingLayer
from tierkv.integrations.transformers.results import Prefix, PromptReport
from tierkv.integrations.transformers.work import PromptWork
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack
from tierkv.types.engine import EngineSpec
from tierkv.types.geometry import cdiv

BLOCK_TOKENS = 64
PIECE_TOKENS = 1024
DEFAULT_STACK: Mapping[str, Any] = {
    "host": {"capacity": "1GiB"},
    "tiers": ({"backend": "disk", "capacity": "64GiB"},),
}
"""A stack for those who only name a folder."""

_FILES = (".toml", ".yaml", ".yml", ".json")
_SERVED = (DynamicLayer, DynamicSlidingWindowLayer, RecordingSlidingLayer)


class TieredPrefixCache:
    """KV of prompts, kept in a stack of tiers, for ``generate`` and forward passes of one model.

    Belongs to one thread at a time; a call from a second one meanwhile is refused. A tier that fails is a shorter
    prefix, never an exception. Close it, or use it as a context manager: that writes what is still under way. If it is
    forgotten, it is closed when the interpreter ends.

    Args:
        model: of transformers, with a language head, in evaluation mode; may be wrapped by PEFT.
        stack: a path to the description of a stack (TOML, YAML or JSON), the description as a mapping, or a folder for
            a stack of 1 GiB of memory over 64 GiB of disk.
        block_tokens: tokens per block; the stack's ``[chunk]`` joins several. Prefixes are found in whole chunks.
        piece_tokens: prompts are computed in pieces that end at multiples of this, or of the chunk if that is larger.
        name: the model's name in the namespace; left out: the one that it was loaded under.

    Raises:
        ConfigError: the model cannot be served, or the description is wrong.
        PluginError, BackendError: see :func:`tierkv.open_stack`.
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
        for key, value in (("block_tokens", block_tokens), ("piece_tokens", piece_tokens)):
            if value < 1:
                raise ConfigError(f"{key} = {value}: give 1 or more")
        config = _stack_config(stack)
        self._model = model
        self._shape = kv_shape(model)
        self._block_tokens = block_tokens
        opened = open_stack(config, self._engine_spec(name))
        self._engine = StackEngine(opened, config, block_tokens)
        piece_tokens = cdiv(piece_tokens, self._engine.chunk_tokens) * self._engine.chunk_tokens
        tokens_max = prompt_tokens_max(model)
        self._work = PromptWork(model, self._shape, self._engine, Identity(model), piece_tokens, tokens_max)
        self._lock = threading.Lock()
        self._close_at_end = weakref.finalize(self, opened.close)
        self.last_prompts: tuple[PromptReport, ...] = ()
        """What the last call did, per prompt."""

    def _engine_spec(self, name: str | None) -> EngineSpec:
        config = self._model.config
        return EngineSpec(
            model=name or getattr(config, "_name_or_path", "") or type(self._model).__name__,
            revision=getattr(config, "_commit_hash", None) or "",
            dtype=str(self._shape.dtype).removeprefix("torch."),
            layout="transformers",
            groups=self._shape.group_specs(self._block_tokens),
            hash_block_tokens=self._block_tokens,
        )

    @property
    def stack(self) -> Stack:
        """The stack underneath: its counters, its tiers, ``reset_cache``. Same thread."""
        return self._engine.stack

    # -- what users call ---------------------------------------------------------------------------------------------

    def load(
        self,
        input_ids: Inputs,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> Prefix:
        """Bring what the tiers have of these prompts; nothing is computed.

        At least the last token of each prompt is left to compute, for its logits. A batch has one number of columns to
        skip: that of the row which has least. With sliding-window layers the rows of a batch must be of one length, or
        differ by whole chunks; else nothing is loaded, and :meth:`prefill` or :meth:`generate` serve each row alone.

        Args:
            input_ids: [batch, columns] left-padded, [columns], or lists of ids.
            attention_mask: [batch, columns], where there is padding.
            cache_salt: prompts with another salt share nothing with these (tenants).
            hints: see docs/how-to/give-hints.md.

        Raises:
            ValueError: the prompts cannot be used so; says why.
            EngineProtocolError: the cache is closed, or another thread is using it.
        """
        with self._mine():
            batch = batch_of(self._model, input_ids, attention_mask)
            prompts = self._work.prompts_of(batch.rows, Terms(cache_salt, hints))
            reports = tuple(PromptReport(len(row)) for row in batch.rows)
            caches, columns = self._work.load_rows(batch, prompts, reports)
            past = self._work.joined(caches, batch.pads, columns)
            self.last_prompts = reports
            return Prefix(past, columns, reports)

    def prefill(
        self,
        input_ids: Inputs,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> Prefix:
        """Load what the tiers have of these prompts, compute the rest, store it, and wait until tiers have written it.

        For a document that many prompts will begin with. Arguments and errors as for :meth:`load`. The result covers
        all columns.
        """
        with self._mine():
            batch = batch_of(self._model, input_ids, attention_mask)
            past, reports = self._work.prefilled(batch, self._work.prompts_of(batch.rows, Terms(cache_salt, hints)), 0)
            self._engine.flush()
            self.last_prompts = reports
            return Prefix(past, past.get_seq_length(), reports)

    def generate(
        self,
        input_ids: Inputs,
        attention_mask: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        hints: Mapping[str, Any] | None = None,
        store_answer: bool = True,
        **arguments: Any,  # noqa: ANN401 - whatever generate takes
    ) -> Any:  # noqa: ANN401 - whatever generate gives
        """``model.generate`` with the KV of the prompts from the tiers, as far as they have it; the rest is stored.

        Each prompt of a batch uses its own prefix, however long. What was done is in :attr:`last_prompts`.

        Args:
            input_ids: [batch, columns] left-padded, [columns], or lists of ids, which are padded here.
            attention_mask: [batch, columns], where there is padding.
            cache_salt: prompts with another salt share nothing with these (tenants).
            hints: see docs/how-to/give-hints.md.
            store_answer: store what is generated, too, so that the next turn of a conversation finds it. Not with beam
                search or several sequences per prompt.
            **arguments: of ``model.generate``.

        Returns:
            What ``model.generate`` returns.

        Raises:
            ValueError: the prompts or arguments cannot be used so; says why.
            EngineProtocolError: the cache is closed, or another thread is using it.
        """
        check_arguments(self._model, arguments)
        with self._mine():
            batch = batch_of(self._model, input_ids, attention_mask)
            past, reports = self._work.prefilled(batch, self._work.prompts_of(batch.rows, Terms(cache_salt, hints)), 1)
            self.last_prompts = reports
            rows_each = expansion(self._model, arguments)
            if rows_each > 1 and past.get_seq_length():
                past.batch_repeat_interleave(rows_each)
            out = self._model.generate(
                batch.input_ids, attention_mask=batch.attention_mask, past_key_values=past, **arguments
            )
            if store_answer and rows_each == 1 and not self._engine.config.store.prompt_only:
                rows = answered(self._model, batch, out, arguments)
                self._work.store_batch(rows, batch.pads, past, Terms(cache_salt, hints), reports)
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
        """Store the KV of tokens that the model has computed elsewhere, for example in ``model.generate``.

        A cache that came from :meth:`load` has everything since. Of another ``DynamicCache`` sliding-window layers have
        forgotten all but the last window, and without chunks of theirs no prefix that ends earlier can be found.

        Args:
            input_ids: the tokens that the cache is of, or the first of them, such as the prompt alone.
            past_key_values: a ``DynamicCache``; it stays the caller's. Not after beam search, which mixes up its rows.
            attention_mask: of ``input_ids``, where there is padding.
            cache_salt: as in :meth:`load`.
            hints: as in :meth:`load`.

        Raises:
            TypeError: the cache is of another kind.
            ValueError: it is not of these tokens, or not of this model.
            EngineProtocolError: the cache is closed, or another thread is using it.
        """
        with self._mine():
            batch = batch_of(self._model, input_ids, attention_mask)
            _check_cache(past_key_values, len(self._shape.layers), len(batch.rows))
            reports = tuple(PromptReport(len(row)) for row in batch.rows)
            self._work.store_batch(batch.rows, batch.pads, past_key_values, Terms(cache_salt, hints), reports)
            self.last_prompts = reports
            return reports

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until lower tiers have written what was stored; False: not all of it, or not in time."""
        with self._mine():
            return self._engine.flush(timeout_s)

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Write what is under way and close the stack. Idempotent.

        Returns:
            Whether everything stored reached its tiers.
        """
        with self._lock:  # a call of another thread comes to its end
            self._close_at_end.detach()
            return self._engine.stack.close(timeout_s)

    def __enter__(self) -> Self:
        """The open cache."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # -- prompts -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _mine(self) -> Iterator[None]:
        """Refuse what would corrupt: a second thread, a closed stack, a model in training."""
        if not self._close_at_end.alive:
            raise EngineProtocolError("this TieredPrefixCache is closed; make another one")
        if not self._lock.acquire(blocking=False):
            raise EngineProtocolError("another thread is using this TieredPrefixCache; give each thread its own turn")
        try:
            check_evaluates(self._model)
            with torch.no_grad():
                yield
        finally:
            self._lock.release()


def _check_cache(cache: ModelCache, num_layers: int, num_rows: int) -> None:
    if not isinstance(cache, DynamicCache) or not all(type(layer) in _SERVED for layer in cache.layers):
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
        raise ValueError("past_key_values went through beam search, which mixes up its rows: it cannot be stored")
    rows = {layer.keys.shape[0] for layer in cache.layers if layer.keys is not None and layer.keys.numel()}
    if rows - {num_rows}:
        raise ValueError(f"past_key_values has {sorted(rows)} rows and input_ids {num_rows}: one for each is needed")


def _stack_config(stack: StackConfig | Mapping[str, Any] | str | Path) -> StackConfig:
    if isinstance(stack, StackConfig):
        return stack
    if isinstance(stack, Mapping):
        return parse_config(stack)
    path = Path(stack)
    if path.suffix.lower() in _FILES:
        return load_config(path)
    (disk,) = DEFAULT_STACK["tiers"]
    return parse_config({**DEFAULT_STACK, "tiers": [{**disk, "path": str(path)}]})
