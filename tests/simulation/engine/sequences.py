"""Sequences: requests in an engine, and the blocks that they hold.

A group with a window keeps the blocks that its next token attends to; before them its table has the null block. Blocks
that a window has passed are freed when the next step is scheduled, and may be handed out again in that step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tierkv.reference.block_pool import Block, BlockPool
from tierkv.types.engine import NULL_BLOCK_ID, EngineSpec, GroupKind, GroupSpec, Request
from tierkv.types.geometry import cdiv


class EngineRequest(Request, Protocol):
    """A request that an engine computes."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append generated tokens."""

    def next_token(self) -> int:
        """The token that the model generates next."""


R = TypeVar("R", bound=EngineRequest)


@dataclass(eq=False, slots=True)
class EngineSequence(Generic[R]):
    """One request in the engine."""

    request: R
    new_tokens: int
    """Number of tokens to generate."""
    arrival: int
    """Number of the request, by arrival."""
    born_step: int
    """Step in which it arrived."""
    tables: list[list[int]] = field(default_factory=list)
    """Per group, the ids of its blocks."""
    reported: list[int] = field(default_factory=list)
    """Per group, the number of blocks that the stack has been passed."""
    computed: int = 0
    """Number of tokens whose KV is computed or loaded."""
    generated: int = 0
    """Number of tokens generated."""
    load_end: int = 0
    """End of the tokens being loaded."""
    fresh: list[tuple[int, int]] = field(default_factory=list)
    """(group, block) handed out since its last forward pass."""
    preemptions: int = 0
    """Number of times that it lost its blocks."""
    deferred_since_s: float | None = None
    """Time of the first question of a lookup that is not answered yet."""


def first_attended(group: GroupSpec, position: int) -> int:
    """First token that the one at ``position`` attends to; of a state space group, the one before it."""
    match group.kind:
        case GroupKind.FULL_ATTENTION:
            return 0
        case GroupKind.SSM:
            return max(0, position - 1)
        case GroupKind.SLIDING_WINDOW:
            return max(0, position - (group.window_tokens or 1) + 1)
        case GroupKind.CHUNKED_LOCAL:
            return position // (group.window_tokens or 1) * (group.window_tokens or 1)


class TableSetup(Protocol):
    """Fixed properties of an engine's block tables."""

    @property
    def engine(self) -> EngineSpec:
        """Its groups and hash blocks."""

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the pool, the null block included."""

    @property
    def caching(self) -> bool:
        """Whether it finds computed blocks again."""


class TableKeeper(Generic[R]):
    """Hands blocks of one pool to sequences and takes them back."""

    def __init__(self, setup: TableSetup) -> None:
        self.pool = BlockPool(setup.gpu_blocks)
        self.align_tokens = math.lcm(*(group.block_tokens for group in setup.engine.groups))
        self.groups = setup.engine.groups
        self._caching = setup.caching
        self._hash_block_tokens = setup.engine.hash_block_tokens

    def local_prefix(self, request: R) -> tuple[list[list[int]], int]:
        """Find the blocks of the longest cached prefix that can be continued, and its tokens.

        At least one token is computed. Nothing is taken.
        """
        tokens = (request.num_tokens - 1) // self.align_tokens * self.align_tokens if self._caching else 0
        while tokens:
            tables = [self._find(request, group, tokens) for group in range(len(self.groups))]
            if None not in tables:
                return [table or [] for table in tables], tokens
            tokens -= self.align_tokens
        return [[] for _ in self.groups], 0

    def _find(self, request: R, group: int, tokens: int) -> list[int] | None:
        size = self.groups[group].block_tokens
        first = self._first_block(group, tokens)
        table = [NULL_BLOCK_ID] * first
        for i in range(first, tokens // size):
            block = self.pool.find(self._block_hash(request, group, i), group)
            if block is None:
                return None
            table.append(block.block_id)
        return table

    def _first_block(self, group: int, position: int) -> int:
        return first_attended(self.groups[group], position) // self.groups[group].block_tokens

    def _block_hash(self, request: R, group: int, index: int) -> bytes:
        per_block = self.groups[group].block_tokens // self._hash_block_tokens
        return request.block_hashes[per_block * (index + 1) - 1]

    def open(self, sequence: EngineSequence[R], prefix: list[list[int]], start: int, tokens: int) -> bool:
        """Take blocks for ``tokens`` tokens, for a sequence that continues from ``start``; False if there are too few.

        Those behind the prefix that was found, up to ``start``, will be filled by a load.
        """
        start = min(start, sequence.request.num_tokens - 1)
        sequence.tables = []
        for group, found in enumerate(prefix):
            first = self._first_block(group, start)
            sequence.tables.append([NULL_BLOCK_ID] * first + found[first:])
        for table in sequence.tables:
            self.pool.hold(self._blocks(table))
        sequence.reported = [0] * len(prefix)
        if not self.extend(sequence, tokens):
            self.free(sequence)
            return False
        return True

    def extend(self, sequence: EngineSequence[R], tokens: int) -> bool:
        """Take blocks up to ``tokens`` tokens; False, and nothing is taken, if there are too few."""
        needs = [cdiv(tokens, spec.block_tokens) for spec in self.groups]
        missing = [max(0, need - len(table)) for need, table in zip(needs, sequence.tables, strict=True)]
        if sum(missing) > self.pool.num_free:
            return False
        for group, count in enumerate(missing):
            new = [block.block_id for block in self.pool.allocate(count)]
            sequence.tables[group] += new
            sequence.fresh += [(group, block_id) for block_id in new]
        return True

    def leave_behind(self, sequence: EngineSequence[R]) -> None:
        """Free the blocks that windows have passed, before the next token is computed."""
        for group, table in enumerate(sequence.tables):
            for i in range(min(self._first_block(group, sequence.computed), len(table))):
                self.pool.release([self.pool[table[i]]])
                table[i] = NULL_BLOCK_ID

    def cut(self, sequence: EngineSequence[R], tokens: int) -> None:
        """Give back all blocks behind the first ``tokens``, the tail first."""
        for spec, table in zip(self.groups, sequence.tables, strict=True):
            stop = cdiv(tokens, spec.block_tokens)
            self.pool.release(self._blocks(reversed(table[stop:])))
            del table[stop:]

    def free(self, sequence: EngineSequence[R]) -> None:
        """Give all blocks back."""
        if sequence.tables:
            self.cut(sequence, 0)
        sequence.tables, sequence.reported, sequence.fresh = [], [], []

    def register(self, sequence: EngineSequence[R], tokens: int) -> None:
        """Make whole blocks within ``tokens`` findable for other sequences."""
        for group, table in enumerate(sequence.tables):
            for i in range(tokens // self.groups[group].block_tokens):
                block, block_hash = self.pool[table[i]], self._block_hash(sequence.request, group, i)
                if not block.is_null and self._caching and self.pool.find(block_hash, group) is None:
                    self.pool.register(block, block_hash, group)

    def views(self, sequence: EngineSequence[R]) -> list[list[Block]]:
        """Block tables as tierkv reads them."""
        return [self._blocks(table) for table in sequence.tables]

    def _blocks(self, table: Iterable[int]) -> list[Block]:
        return [self.pool[block_id] for block_id in table]

    def usable_tokens(self, sequence: EngineSequence[R], tokens: int, invalid: Collection[int]) -> int:
        """Number of its first ``tokens`` after which a sequence can continue, if some of its blocks are invalid."""
        ends = [tokens, *(end for end in range(tokens - 1, -1, -1) if self._has_states(end))]
        return next(end for end in ends if self._is_usable(sequence, end, invalid))

    def _has_states(self, tokens: int) -> bool:
        """Whether every state space group can continue there: a block has the state after its last token only."""
        return not any(group.kind is GroupKind.SSM and tokens % group.block_tokens for group in self.groups)

    def _is_usable(self, sequence: EngineSequence[R], tokens: int, invalid: Collection[int]) -> bool:
        position = min(tokens, sequence.request.num_tokens - 1)
        for group, table in enumerate(sequence.tables):
            needed = table[self._first_block(group, position) : cdiv(tokens, self.groups[group].block_tokens)]
            if any(block_id == NULL_BLOCK_ID or block_id in invalid for block_id in needed):
                return False
        return True
