"""What an engine tells tierkv: its shape once, its requests and its steps as they come.

The shapes follow what a vLLM-like engine has at hand, so that an adapter copies references and computes nothing.
All of it is used on the engine's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

NULL_BLOCK_ID = 0
"""The placeholder block: never holds data, never copied (spec, glossary)."""


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What the engine can live with, and what it can do.

    loads_may_fail: the engine recomputes blocks reported as failed. It must: a stack does not open for one that cannot.
    loads_span_steps: a load may take several steps while the request waits. It must, too.
    prefix_caching: the engine keeps finished blocks for reuse, so two requests should not load one prefix twice.
    prefill_tokens_per_s: how fast it computes prompts; None: it does not know, and tierkv measures its steps.
    delays_free_blocks: the engine keeps the blocks of a finished request until it is told that its transfers
        have ended (``LoadReport.finished_sending`` and ``finished_recving``). Without it blocks are free at once, and
        whatever still reads one is flushed before the block is written.
    shows_free_blocks: the engine registers its :class:`FreeBlockQueue` before its first step.
    worker_processes: workers are other processes than the one that opens the stack, so the host tier's memory is shared
        with them.
    """

    loads_may_fail: bool = True
    loads_span_steps: bool = True
    prefix_caching: bool = True
    prefill_tokens_per_s: float | None = None
    delays_free_blocks: bool = False
    shows_free_blocks: bool = False
    worker_processes: bool = False


class GroupKind(Enum):
    """What a layer of a KV cache group attends to, and so which of its chunks a hit needs (spec, section 2)."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    FULL_ATTENTION = "full_attention"
    """Every token before it: a hit needs all chunks."""
    SLIDING_WINDOW = "sliding_window"
    """The last ``window_tokens`` tokens: a hit needs the chunks that cover them."""
    CHUNKED_LOCAL = "chunked_local"
    """The tokens of its own stretch of ``window_tokens``: needed like a window of that size."""
    SSM = "ssm"
    """A state (Mamba and the like): a hit needs the last chunk."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group of the engine.

    block_tokens: tokens per GPU block.
    page_bytes: bytes of one block in each tensor of one worker, in the order in which the worker registers them.
    kind: what its layers attend to.
    window_tokens: length of the window or of the local stretch; None for full attention and SSM.
    """

    block_tokens: int
    page_bytes: tuple[int, ...]
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine's shape. Everything here that changes the meaning of KV bytes is part of the namespace.

    hash_block_tokens: tokens that one entry of ``Request.block_hashes`` covers; divides every group's block_tokens.
    rank, world_size: which share of the model this engine's stack serves, where each rank opens a stack of its own.
    num_workers: workers that share one stack (tensor parallel): a chunk holds the pages of all of them, and a job has
        ended when all have reported it.
    replica: which of several engines of one description this is (data parallel), from 0. Each has a place of its own in
        tiers that one process at a time may open, and finds it again under the same number; shared tiers they share.
    """

    model: str
    dtype: str
    groups: tuple[GroupSpec, ...]
    hash_block_tokens: int
    revision: str = ""
    layout: str = "page"
    rank: int = 0
    world_size: int = 1
    num_workers: int = 1
    replica: int = 0
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)


class Request(Protocol):
    """What the scheduler reads of a request."""

    @property
    def request_id(self) -> str:
        """Unique among requests that are alive or have transfers in flight."""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Only ever grows; entry i is chained over the first ``(i + 1) * hash_block_tokens`` tokens."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the engine's user attached to the request."""


class ScopedRequest(Request, Protocol):
    """What keeps caches apart within a model; optional for an engine, and harmless where its hashes hold it already."""

    @property
    def cache_salt(self) -> str | None:
        """Given by a user, or for one: chunks of other salts are never theirs. Names the tenant for quotas."""

    @property
    def lora_name(self) -> str | None:
        """The adapter's name, if the request uses one: its KV bytes are not those of the plain model."""


class TokenizedRequest(Request, Protocol):
    """What events that describe themselves need beside that (``events.self_describing``); optional for an engine."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and generated tokens so far."""

    @property
    def lora_id(self) -> int | None:
        """The adapter's number, if the request uses one."""

    @property
    def lora_name(self) -> str | None:
        """The adapter's name, if the request uses one."""


class Block(Protocol):
    """What the scheduler reads of a GPU block."""

    @property
    def block_id(self) -> int:
        """Index in the engine's KV tensors."""

    @property
    def block_hash(self) -> bytes | None:
        """Set on blocks whose content is already computed."""

    @property
    def is_null(self) -> bool:
        """Whether it is the placeholder."""


BlockTables = Sequence[Sequence[Block]]
"""Per group, the blocks of one request in order."""


class FreeBlockQueue(Protocol):
    """The engine's blocks that nobody uses, in the order in which it will hand them out (``store.plan = "lazy"``).

    Read while instructions are built; never changed. ``block_hash`` of a block in it, unless None, is the entry of
    ``Request.block_hashes`` at which its content ends.
    """

    def __len__(self) -> int:
        """Blocks in the queue."""

    def head(self) -> Block | None:
        """The block that is handed out next."""

    def after(self, block: Block) -> Block | None:
        """The one behind a block that is in the queue."""

    def entry(self, block: Block) -> int | None:
        """A number that is another one each time the block joins the queue; None while it is not in it."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request in this step.

    num_computed_tokens: computed or loaded before this step.
    num_scheduled_tokens: computed in this step.
    block_ids: per group, the ids appended since the last step, or the whole table if ``replaces_table`` (a request
        scheduled for the first time, or again after preemption).
    num_placeholder_tokens: how many of ``num_computed_tokens`` are still being computed by an earlier step
        (asynchronous scheduling).
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    replaces_table: bool = False
    num_placeholder_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the engine decided for one step."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    preempted: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of transfers, told by ``update_connector_output``.

    finished: requests whose load ended, with all of its jobs; they may be scheduled again.
    invalid_block_ids: GPU blocks of theirs that hold no valid data: the engine computes from the first of them on.
        Where a group has a window, a load that failed in part is reported whole: the engine goes on from what it had
        before the load, or from the start if its windows have no blocks there.
    finished_sending: finished requests whose last store ended: their blocks are free now. Told once, and only to an
        engine with ``delays_free_blocks``.
    """

    finished: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    finished_sending: frozenset[str] = frozenset()

    @property
    def finished_recving(self) -> frozenset[str]:
        """``finished`` under the name it has in engines that count by request ids."""
        return self.finished
