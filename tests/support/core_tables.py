"""The block tables of the bed's engine: found, grown, freed as windows move on, and cut after a failed load.

A group with a window keeps the blocks that its next token attends to; before them its table has the null block. What a
window has left is freed when the next step is scheduled, and may be handed out anew in that very step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from core_pool import BedPool
from core_truth import BedRequest
from group_parts import first_block

from tierkv.types.engine import NULL_BLOCK_ID, GroupKind, GroupSpec
from tierkv.types.geometry import cdiv

Table = list[int]


class BedTables:
    """Tables over one pool, one per group."""

    def __init__(self, pool: BedPool, groups: Sequence[GroupSpec], hash_block_tokens: int) -> None:
        self.groups = groups
        self.align = math.lcm(*(group.block_tokens for group in groups))
        self._pool = pool
        self._hash_block_tokens = hash_block_tokens

    def local_prefix(self, request: BedRequest) -> tuple[list[Table], int]:
        """Blocks that the GPU still has, and the tokens after which a request can go on with them.

        At least one token is computed. Nothing is taken.
        """
        tokens = (request.num_tokens - 1) // self.align * self.align
        while tokens:
            tables = [self._find(request, index, tokens) for index in range(len(self.groups))]
            if None not in tables:
                return [table or [] for table in tables], tokens
            tokens -= self.align
        return [[] for _ in self.groups], 0

    def _find(self, request: BedRequest, index: int, tokens: int) -> Table | None:
        group = self.groups[index]
        first = first_block(group, tokens)
        table = [NULL_BLOCK_ID] * first
        for i in range(first, tokens // group.block_tokens):
            block_id = self._pool.find(index, self._block_hash(request, group, i))
            if block_id is None:
                return None
            table.append(block_id)
        return table

    def _block_hash(self, request: BedRequest, group: GroupSpec, index: int) -> bytes:
        return request.block_hashes[group.block_tokens // self._hash_block_tokens * (index + 1) - 1]

    def open(self, prefix: list[Table], start: int, tokens: int) -> list[Table] | None:
        """Take a found prefix and new blocks up to ``tokens``, for a request that will go on from ``start``.

        None if the pool has too few.
        """
        tables = []
        for group, found in zip(self.groups, prefix, strict=True):
            first = first_block(group, start)
            tables.append([NULL_BLOCK_ID] * first + found[first:])
        for block_id in _real(tables):
            self._pool.hold(block_id)
        if self.extend(tables, tokens):
            return tables
        self.cut(tables, 0)
        return None

    def extend(self, tables: list[Table], tokens: int) -> bool:
        """New blocks up to ``tokens``; False if the pool has too few."""
        missing = [
            max(0, cdiv(tokens, group.block_tokens) - len(table))
            for group, table in zip(self.groups, tables, strict=True)
        ]
        if sum(missing) > self._pool.num_free:
            return False
        for count, table in zip(missing, tables, strict=True):
            table.extend(self._pool.take() for _ in range(count))
        return True

    def leave_behind(self, tables: list[Table], computed: int) -> None:
        """Free what the windows have left, now that the next token to compute is ``computed``."""
        for group, table in zip(self.groups, tables, strict=True):
            for i in range(min(first_block(group, computed), len(table))):
                if table[i] != NULL_BLOCK_ID:
                    self._pool.release(table[i])
                    table[i] = NULL_BLOCK_ID

    def cut(self, tables: list[Table], tokens: int) -> None:
        """Give back all blocks behind the first ``tokens``, tail first."""
        for group, table in zip(self.groups, tables, strict=True):
            stop = cdiv(tokens, group.block_tokens)
            for block_id in reversed(_real([table[stop:]])):
                self._pool.release(block_id)
            del table[stop:]

    def register(self, request: BedRequest, tables: list[Table], tokens: int) -> None:
        """The first ``tokens`` are computed: their full blocks can be found from now on."""
        for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            for i in range(tokens // group.block_tokens):
                if table[i] != NULL_BLOCK_ID:
                    self._pool.register(index, self._block_hash(request, group, i), table[i])

    def usable_tokens(self, tables: list[Table], loaded: int, invalid: Collection[int]) -> int:
        """After how many of its ``loaded`` tokens a request can go on, if some of its blocks are invalid."""
        ends = [loaded, *(tokens for tokens in range(loaded - 1, -1, -1) if self._has_states(tokens))]
        return next(tokens for tokens in ends if self._is_usable(tables, tokens, invalid))

    def _has_states(self, tokens: int) -> bool:
        """A block has the state after its last token only."""
        return not any(group.kind is GroupKind.SSM and tokens % group.block_tokens for group in self.groups)

    def _is_usable(self, tables: list[Table], tokens: int, invalid: Collection[int]) -> bool:
        for group, table in zip(self.groups, tables, strict=True):
            needed = table[first_block(group, tokens) : cdiv(tokens, group.block_tokens)]
            if any(block_id == NULL_BLOCK_ID or block_id in invalid for block_id in needed):
                return False
        return True


def _real(tables: Sequence[Table]) -> list[int]:
    """All blocks but the placeholder, which nobody holds."""
    return [block_id for table in tables for block_id in table if block_id != NULL_BLOCK_ID]
