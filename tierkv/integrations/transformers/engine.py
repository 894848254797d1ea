"""Small engine over a stack: its requests load prefixes into pages, or store pages that a model has filled.

All work is done on the caller's thread and has ended when a call returns, except writes to lower tiers, which the stack
does by itself. A failing tier shortens a load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tierkv.config import StackConfig
from tierkv.frames.frame import frame_bytes
from tierkv.integrations.transformers.identity import Prompt
from tierkv.integrations.transformers.pages import CachedRow, Pages
from tierkv.integrations.transformers.results import PromptReport
from tierkv.stack.stack import Stack
from tierkv.types.engine import NULL_BLOCK_ID, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.geometry import GroupGeometry, cdiv
from tierkv.types.hints import HINTS
from tierkv.types.transfers import WorkerOutput

_POLL_S = 0.0005
_LOAD_FAILURES_MAX = 2
FLUSH_TIMEOUT_S = 30.0


@dataclass(slots=True)
class PrefixRequest:
    """Request with the attributes that a stack reads (``tierkv.types.engine``: all three protocols)."""

    request_id: str
    prompt: Prompt
    num_tokens: int
    num_prompt_tokens: int
    lora_id: int | None = None

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """Hashes of all blocks of the prompt."""
        return self.prompt.hashes

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        """Token ids, for described events."""
        return self.prompt.tokens

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Hints of the prompt."""
        hints = self.prompt.options.hints
        return None if hints is None else {HINTS: hints}

    @property
    def cache_salt(self) -> str | None:
        """Salt that separates tenants."""
        return self.prompt.options.cache_salt

    @property
    def lora_name(self) -> str | None:
        """Names of the active adapters."""
        return self.prompt.adapter


@dataclass(frozen=True, slots=True)
class PageBlock:
    """Block with the attributes that a stack reads."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


_NULL = PageBlock(NULL_BLOCK_ID, None, is_null=True)


@dataclass(slots=True)
class StackEngine:
    """Engine that drives a stack. One thread at a time."""

    stack: Stack
    """An open stack."""
    config: StackConfig
    """Description of the stack."""
    block_tokens: int
    """Tokens per page."""
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    _ids: Iterator[int] = field(default_factory=count)
    _bytes_unflushed: int = 0
    _paces: bool = True

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self.block_tokens * self.stack.geometry.blocks_per_chunk

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self, output: StepOutput | None = None) -> LoadReport:
        """Run one step that computes nothing."""
        meta = self.stack.build_connector_meta(output or StepOutput())
        self.stack.worker.start_step(meta)
        self.stack.worker.queue_stores(meta)
        return self.stack.update_connector_output(self.stack.worker.get_finished())

    def drain(self) -> None:
        """Run steps until no copy between pages and the host tier is in flight, so that the pages are free."""
        while self.stack.has_pending_work():
            self._step()
            self.sleep(_POLL_S)

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, prompt: Prompt, tokens_max: int, pages: Pages, report: PromptReport) -> int:
        """Load the longest prefix of at most ``tokens_max`` tokens into blocks 1, 2, ... of every group.

        Returns:
            Number of usable tokens. In a group with a window, only the pages within the window are filled.
        """
        self.drain()
        started_s = self.clock()
        self.stack.worker.register_kv_caches(pages.tensors)
        done = failures = 0
        while done < tokens_max and failures < _LOAD_FAILURES_MAX:
            asked, usable = self._load_once(prompt, done, tokens_max, report)
            done += usable
            failures += usable < asked
            if usable == asked and not self._was_cut_by_host(prompt, asked):
                break
        report.loaded_tokens = done
        report.load_s += self.clock() - started_s
        return done

    def _load_once(self, prompt: Prompt, done: int, tokens_max: int, report: PromptReport) -> tuple[int, int]:
        """Load beyond ``done`` tokens with one request. Return the numbers of offered and of loaded tokens."""
        # The stack leaves one token to compute where a group has a window: add one that is not needed.
        num_tokens = tokens_max + self.stack.geometry.has_windows
        request = PrefixRequest(f"prefix-{next(self._ids)}", prompt, num_tokens, num_tokens)
        self.stack.on_new_request(request)
        try:
            tokens = self._look_up(request, done)
            if not tokens:
                return 0, 0
            tables = self._load_tables(prompt, done, done + tokens)
            self.stack.update_state_after_alloc(request, tables, tokens)
            return tokens, self._await_load(request, done, tokens)
        finally:
            self.stack.request_finished(request, [[] for _ in self.stack.geometry.groups])
            self.drain()
            account = self.stack.request_account(request.request_id)
            if account is not None:
                report.by_tier.update(account.loaded_tokens)
                report.shortened_tokens += account.shortened_tokens

    def _look_up(self, request: PrefixRequest, done: int) -> int:
        """Wait for the answer of a lookup. The lookup deadline of the stack bounds the wait."""
        while True:
            tokens, _ = self.stack.get_num_new_matched_tokens(request, done)
            if tokens is not None:
                return tokens
            self._step()
            self.sleep(_POLL_S)

    def _load_tables(self, prompt: Prompt, done: int, end: int) -> list[list[PageBlock]]:
        """Block tables for the tokens up to ``end``: filled before ``done``, and null before a window."""
        size = self.block_tokens
        stop, first_new = cdiv(end, size), cdiv(done, size)
        tables = []
        for group in self.stack.geometry.groups:
            first = max(first_new, self._first_wanted(group, end))
            table = [
                PageBlock(1 + i, None if i >= first else prompt.hashes[i]) if i >= first or i < first_new else _NULL
                for i in range(stop)
            ]
            tables.append(table)
        return tables

    @staticmethod
    def _first_wanted(group: GroupGeometry, end: int) -> int:
        """First block of the chunks that a hit up to ``end`` needs."""
        if group.window_chunks is None:
            return 0
        blocks_per_chunk = group.chunk_tokens // group.block_tokens
        return max(0, cdiv(end, group.chunk_tokens) - group.window_chunks) * blocks_per_chunk

    def _await_load(self, request: PrefixRequest, done: int, tokens: int) -> int:
        finished: frozenset[str] = frozenset()
        invalid: set[int] = set()
        while request.request_id not in finished:
            report = self._step()
            finished |= report.finished
            invalid |= report.invalid_block_ids
            if not finished:
                self.sleep(_POLL_S)
        if not invalid:
            return tokens
        return max(0, min(tokens, (min(invalid) - 1) * self.block_tokens - done))

    def _was_cut_by_host(self, prompt: Prompt, tokens: int) -> bool:
        """Whether a hit may have been cut, because a request may reserve only a share of the host tier's slots."""
        if not tokens or (prompt.options.hints or {}).get("max_load_tokens") is not None:
            return False
        geometry = self.stack.geometry
        slots = self.config.host.capacity // frame_bytes(geometry.payload_bytes_max)
        chunks = sum(
            min(cdiv(tokens, group.chunk_tokens), group.window_chunks or cdiv(tokens, group.chunk_tokens))
            for group in geometry.groups
        )
        return chunks + len(geometry.groups) >= int(slots * self.config.host.reserved_share)

    # -- storing -----------------------------------------------------------------------------------------------------

    def begin_storing(self, pages: Pages) -> None:
        """Register the pages that the next steps store from."""
        self.drain()
        self.stack.worker.register_kv_caches(pages.tensors)

    @contextmanager
    def storing(self, prompt: Prompt, span: range, first_page: int) -> Iterator[None]:
        """Step that computes the tokens ``span`` of a prompt and stores the chunks that end within them.

        In the body, the caller runs the model and fills pages from ``first_page`` on with the whole blocks of ``span``.
        The pages are free when the body starts. If the body raises, nothing of the step is stored.

        Args:
            prompt: the prompt.
            span: tokens of the step, from the start of a chunk.
            first_page: page of the first block, in every group.
        """
        request = PrefixRequest(f"prefix-{next(self._ids)}", prompt, len(prompt.tokens), len(prompt.tokens))
        before, blocks = span.start // self.block_tokens, cdiv(len(span), self.block_tokens)
        table = (*[NULL_BLOCK_ID] * before, *range(first_page, first_page + blocks))
        tables = [table] * len(self.stack.geometry.groups)
        self.stack.on_new_request(request)
        self.stack.update_state_after_alloc(request, [[_NULL] * (before + blocks) for _ in tables], 0)
        scheduled = ScheduledRequest(request.request_id, span.start, len(span), tuple(tables), replaces_table=True)
        meta = self.stack.build_connector_meta(StepOutput((scheduled,)))
        self.stack.worker.start_step(meta)
        try:
            yield
        except BaseException:
            failed = {job.job_id: frozenset(job.keys) for job in meta.stores}
            self.stack.update_connector_output(WorkerOutput(dict.fromkeys(failed, 1), failed))
            raise
        else:
            self.stack.worker.queue_stores(meta)
            self.stack.update_connector_output(self.stack.worker.get_finished())
        finally:
            self.stack.request_finished(request, [])
        self._pace(blocks)

    def store(self, prompt: Prompt, source: CachedRow, span: range, pages: Pages, missing: list[int]) -> None:
        """Store whole chunks of a cache that a model filled earlier.

        Args:
            prompt: tokens of the row, and possibly more.
            source: the row.
            span: tokens from the start of a chunk to the end of a chunk.
            pages: pages to copy through, at least for one chunk.
            missing: per group, number of first tokens that the row no longer has.
        """
        self.begin_storing(pages)
        round_tokens = pages.num_blocks * self.block_tokens // self.chunk_tokens * self.chunk_tokens
        for start in range(span.start, span.stop, round_tokens):
            part = range(start, min(start + round_tokens, span.stop))
            self._store_part(prompt, source, part, pages, missing)

    def _store_part(self, prompt: Prompt, source: CachedRow, part: range, pages: Pages, missing: list[int]) -> None:
        pages.take(source, part, 1, missing)
        end = len(prompt.tokens)
        request = PrefixRequest(f"prefix-{next(self._ids)}", prompt, end, end)
        before, blocks = part.start // self.block_tokens, len(part) // self.block_tokens
        tables = []
        for lost in missing:
            first = cdiv(lost, self.block_tokens)
            ids = (1 + i if before + i >= first else NULL_BLOCK_ID for i in range(blocks))
            behind = cdiv(end, self.block_tokens) - before - blocks
            tables.append((*[NULL_BLOCK_ID] * before, *ids, *[NULL_BLOCK_ID] * behind))
        self.stack.on_new_request(request)
        self.stack.update_state_after_alloc(request, [[_NULL] * len(table) for table in tables], 0)
        # All tokens count as computed before, so that copying is not measured as a very fast prefill.
        scheduled = ScheduledRequest(request.request_id, end, 0, tuple(tables), replaces_table=True)
        self._step(StepOutput((scheduled,)))
        self.stack.request_finished(request, [])
        self.drain()
        self._pace(blocks)

    # -- removal -----------------------------------------------------------------------------------------------------

    def forget(self, prompts: Sequence[Prompt], timeout_s: float) -> bool:
        """Remove prompts from every tier (:meth:`tierkv.Stack.forget`). Returns whether they are gone in time."""
        self.drain()
        for prompt in prompts:
            request = PrefixRequest(f"prefix-{next(self._ids)}", prompt, len(prompt.tokens), len(prompt.tokens))
            self.stack.forget(request)
        give_up_s = self.clock() + timeout_s
        while self.stack.num_forgetting:
            if self.clock() > give_up_s:
                return False
            self._step()
            self.sleep(_POLL_S)
        return True

    # -- lower tiers -------------------------------------------------------------------------------------------------

    def _pace(self, blocks: int) -> None:
        """Flush before the queues of lower tiers are full and chunks would be dropped."""
        queues = [tier.queue_bytes_max for tier in self.config.tiers if tier.write == "through"]
        if not queues or not self._paces:
            return
        page_bytes = sum(sum(group.page_bytes) for group in self.stack.geometry.groups)
        self._bytes_unflushed += blocks * page_bytes
        if self._bytes_unflushed >= min(self.config.host.capacity // 4, min(queues) // 2):
            self.flush()

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Write stored chunks to all tiers that take writes (:meth:`tierkv.Stack.flush`)."""
        self._bytes_unflushed = 0
        started_s = self.clock()
        flushed = self.stack.flush(timeout_s)
        # Wait once for a tier that hangs, not after every piece.
        self._paces = flushed or self.clock() - started_s < timeout_s
        return flushed
