"""Values and protocols of the engine: its shape, given once, and its requests, blocks and steps.

The shapes follow the data of a vLLM-like engine, so that an adapter copies references and computes nothing.
All of it is used on the engine's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

NULL_BLOCK_ID = 0
"""Id of the placeholder block, which never holds data and is never copied."""


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Properties of the engine that decide how tierkv works with it."""

    loads_may_fail: bool = True
    """The engine recomputes blocks that are reported as failed. Required: a stack does not open without it."""
    loads_span_steps: bool = True
    """A load may take several steps while the request waits. Required as well."""
    prefix_caching: bool = True
    """The engine keeps finished blocks for reuse, so two requests should not load the same prefix twice."""
    prefill_tokens_per_s: float | None = None
    """Speed of prompt computation in tokens per second; None: unknown, and tierkv measures the engine's steps."""
    delays_free_blocks: bool = False
    """The engine keeps the blocks of a finished request until its transfers are reported as ended
    (``LoadReport.finished_sending`` and ``finished_recving``). Otherwise blocks are free at once, and any transfer that
    still reads a block is flushed before the block is written."""
    shows_free_blocks: bool = False
    """The engine registers its :class:`FreeBlockQueue` before its first step."""
    worker_processes: bool = False
    """Workers run in other processes than the stack, so the memory of the host tier is shared with them."""


class GroupKind(Enum):
    """Attention of the layers of a KV cache group. It decides which chunks a hit needs."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    FULL_ATTENTION = "full_attention"
    """Attends to every previous token: a hit needs all chunks."""
    SLIDING_WINDOW = "sliding_window"
    """Attends to the last ``window_tokens`` tokens: a hit needs the chunks that cover them."""
    CHUNKED_LOCAL = "chunked_local"
    """Attends to the tokens of its own section of ``window_tokens``: a hit needs as many chunks as for a window."""
    SSM = "ssm"
    """A state (Mamba and similar): a hit needs the last chunk."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group of the engine."""

    block_tokens: int
    """Tokens per GPU block."""
    page_bytes: tuple[int, ...]
    """Bytes of one block in each tensor of one worker, in the order in which the worker registers the tensors."""
    kind: GroupKind = GroupKind.FULL_ATTENTION
    """Attention of the group's layers."""
    window_tokens: int | None = None
    """Tokens of the window or local section; None for full attention and SSM."""
    copies: int = 1
    """Workers of consecutive ranks that hold equal pages of this group: all workers with latent attention, some of them
    where there are more workers than heads. One of them stores each chunk, and all of them load it."""
    heads: int = 0
    """Heads in a page of one worker, if pages can be divided by heads (``chunk.parts``). 0: they cannot."""
    head_rows: int = 1
    """Number of times that the heads follow each other in a page: 1 if each head is one run of bytes, the tokens of a
    block if the heads of a token are neighbours."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Shape of the engine. Every field that changes the meaning of KV bytes is part of the namespace."""

    model: str
    """Name of the model."""
    dtype: str
    """Type of the KV values."""
    groups: tuple[GroupSpec, ...]
    """KV cache groups."""
    hash_block_tokens: int
    """Tokens per entry of ``Request.block_hashes``. Divides ``block_tokens`` of every group."""
    revision: str = ""
    """Revision of the model."""
    layout: str = "page"
    """Name of the arrangement of values in a page."""
    rank: int = 0
    """Share of the model that this stack serves, where each rank opens its own stack."""
    world_size: int = 1
    """Number of such shares."""
    num_workers: int = 1
    """Workers that share one stack (tensor parallel). A chunk holds the pages of all of them, without the copies of a
    group. A job has ended when all workers have reported it."""
    replica: int = 0
    """Number of this engine among engines of one description (data parallel), from 0. Each has its own storage in tiers
    that only one process may open, and finds it again under the same number. Shared tiers are common to all."""
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    """Properties of the engine."""


class Request(Protocol):
    """Attributes that the scheduler reads from a request."""

    @property
    def request_id(self) -> str:
        """Id, unique among requests that are alive or have transfers in flight."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and tokens generated so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt. Constant while the request is alive, also after a preemption."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes. Entry i covers the first ``(i + 1) * hash_block_tokens`` tokens. The sequence only grows."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Parameters that the engine's user attached to the request; None if there are none. Required."""


class FullRequest(Request, Protocol):
    """Request with every attribute that tierkv reads. Those beyond :class:`Request` are optional for an engine.

    The first three keep chunks of one model apart, and do no harm where the hashes include them. The others are for
    described events (``events.self_describing``).
    """

    @property
    def cache_salt(self) -> str | None:
        """Salt given by or for a user. Requests never get chunks of another salt. It names the tenant for quotas."""

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter, or None. The KV bytes of an adapter differ from those of the plain model."""

    @property
    def adapter_digest(self) -> str:
        """Text that differs for other content of the adapter, or for other weights than the namespace names.

        Empty if unknown, and for these weights. Read when the request is new.
        """

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt tokens and tokens generated so far. Described events need them."""

    @property
    def lora_id(self) -> int | None:
        """Number of the adapter, or None. Described events repeat it, and ``lora_name``."""

    def extra_keys(self, start: int, stop: int) -> tuple[Any, ...] | None:
        """Values in the hash of a block beside its tokens, such as those of a picture; None: there are none.

        Each value is a text, a number, bytes, or a tuple of these. Called when the store of the block is granted.

        Args:
            start: first token of the block.
            stop: token behind its last one.
        """


class Block(Protocol):
    """Attributes that the scheduler reads from a GPU block."""

    @property
    def block_id(self) -> int:
        """Index in the engine's KV tensors. Ids are common to all groups: a block belongs to one group at a time."""

    @property
    def block_hash(self) -> bytes | None:
        """Hash of the content; None while the content is not computed."""

    @property
    def is_null(self) -> bool:
        """Whether the block is the placeholder."""


BlockTables = Sequence[Sequence[Block]]
"""Blocks of one request in order, per group."""


class FreeBlockQueue(Protocol):
    """The engine's free blocks, in the order in which it will reuse them (``store.plan = "lazy"``).

    Read while a step's instructions are built; never changed. ``block_hash`` of a block in the queue, unless None, is
    the entry of ``Request.block_hashes`` at which its content ends.
    """

    def __len__(self) -> int:
        """Number of blocks in the queue."""

    def head(self) -> Block | None:
        """Block that is reused next; None if the queue is empty."""

    def after(self, block: Block) -> Block | None:
        """Block behind a block of the queue; None at the end."""

    def entry(self, block: Block) -> int | None:
        """Number that changes each time the block joins the queue; None while it is not in the queue."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request in one step."""

    request_id: str
    """Id of the request."""
    num_computed_tokens: int
    """Tokens computed or loaded before this step."""
    num_scheduled_tokens: int
    """Tokens computed in this step."""
    block_ids: tuple[tuple[int, ...], ...]
    """Per group, the block ids appended since the previous step, or the whole table if ``replaces_table``."""
    replaces_table: bool = False
    """Whether ``block_ids`` is the whole table: at the first step of a request, and at the first after preemption."""
    num_placeholder_tokens: int = 0
    """Tokens of ``num_computed_tokens`` that an earlier step is still computing (asynchronous scheduling)."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Decisions of the engine for one step."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    """Requests in this step."""
    preempted: frozenset[str] = frozenset()
    """Ids of all requests whose blocks were freed since the previous step, to be scheduled again later.

    tierkv cannot see that: a request that continues with some tokens computed looks like one that was not preempted."""
    finished: frozenset[str] = frozenset()
    """Ids of finished requests."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Results of transfers, returned by ``update_connector_output``."""

    finished: frozenset[str] = frozenset()
    """Requests whose load ended with all of its jobs. They may be scheduled again."""
    invalid_block_ids: frozenset[int] = frozenset()
    """GPU blocks of these requests without valid data. The engine computes from the first of them on. Where a group has
    a window, a load that failed in part is reported as a whole. The engine then continues from the state before the
    load, or from the start if its windows have no blocks there."""
    finished_sending: frozenset[str] = frozenset()
    """Finished requests whose last store ended, so their blocks are free. Reported once, and only to an engine with
    ``delays_free_blocks``."""

    @property
    def finished_recving(self) -> frozenset[str]:
        """``finished``, under its name in engines that count by request ids."""
        return self.finished

    def joined(self, later: LoadReport) -> LoadReport:
        """Return one report with the results of both."""
        return LoadReport(
            self.finished | later.finished,
            self.invalid_block_ids | later.invalid_block_ids,
            self.finished_sending | later.finished_sending,
        )
