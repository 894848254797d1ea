"""Block tables of requests: one list of blocks per KV group, all from one pool.

All groups have the same block size, so the tables of a request have equal length and the block at index i of each
covers the same tokens. A group with a window holds the blocks that its next token can see; before them its table has
the null block. Blocks that a window has passed are freed when the next step is scheduled, not when they are computed.
The step that computed them is over then, so the connector has been passed them and can store them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv.reference.block_pool import Block, BlockPool
from tierkv.reference.configs import first_visible
from tierkv.reference.request import Request


class TableKeeper:
    """Finds, grows, registers and frees the tables of requests. Used on the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        windows: Sequence[int | None],
        block_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        """Keep tables of one group per entry of ``windows``: its window in tokens, None for full attention."""
        self._pool = pool
        self._windows = tuple(windows)
        self._block_tokens = block_tokens
        self._prefix_caching = prefix_caching

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        """Largest number of blocks, over all groups, of a request of ``num_tokens`` at ``step_tokens`` a step."""
        whole = -(-num_tokens // self._block_tokens)
        return sum(
            # A stretch of n tokens touches one block more than it fills, if it begins inside one.
            whole if window is None else min(whole, 1 - (2 - window - step_tokens) // self._block_tokens)
            for window in self._windows
        )

    def first_block(self, group: int, position: int) -> int:
        """Index of the first block that the token at ``position`` attends to in a group."""
        return first_visible(self._windows[group], position) // self._block_tokens

    def find_prefix(self, request: Request) -> list[list[Block]]:
        """Find the longest computed prefix that can be continued, as blocks per group. Nothing is taken.

        A prefix can be continued if every group has all blocks that the next token attends to. Full attention needs
        every block; a window needs the blocks within it, and the table has the null block before those. At least one
        token is left to compute: it yields the next token.
        """
        if not self._prefix_caching:
            return [[] for _ in self._windows]
        length = (request.num_tokens - 1) // self._block_tokens
        gap = self._first_gap(request, length)
        while gap is not None:
            # Shorter prefixes need this block too, down to the one that ends before it: their windows begin earlier.
            length = gap
            gap = self._last_gap(request, length)
        hashes = request.block_hashes
        tables = []
        for group in range(len(self._windows)):
            first = self.first_block(group, length * self._block_tokens)
            found = (self._pool.find(hashes[i], group) for i in range(first, length))
            tables.append([self._pool.null_block] * first + [block for block in found if block is not None])
        return tables

    def _first_gap(self, request: Request, length: int) -> int | None:
        """Index of the first block that a group of full attention lacks; otherwise as :meth:`_last_gap`."""
        full = [group for group, window in enumerate(self._windows) if window is None]
        for index in range(length):
            if any(self._pool.find(request.block_hashes[index], group) is None for group in full):
                return index
        return self._last_gap(request, length)

    def _last_gap(self, request: Request, length: int) -> int | None:
        """Index of the last block that a window group lacks of those that it needs behind ``length`` blocks."""
        gaps = []
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            for index in range(length - 1, self.first_block(group, length * self._block_tokens) - 1, -1):
                if self._pool.find(request.block_hashes[index], group) is None:
                    gaps.append(index)
                    break
        return min(gaps, default=None)

    def open(self, request: Request, prefix: list[list[Block]], start: int, num_tokens: int) -> bool:
        """Give a request without blocks those of a found prefix, and new ones up to ``num_tokens``.

        Tokens before ``start`` are cached or will be loaded. Of their blocks, a window group gets those that it needs
        to continue from ``start``, and the null block for the rest.

        Returns:
            False, and nothing changed, if the pool has too few blocks.
        """
        length = -(-num_tokens // self._block_tokens)
        tables = []
        for group, found in enumerate(prefix):
            first = self.first_block(group, min(start, request.num_tokens - 1))
            tables.append([self._pool.null_block] * first + found[first:])
        held = [_real(table) for table in tables]
        taken_from_queue = sum(block.ref_cnt == 0 for table in held for block in table)
        new = sum(max(0, length - len(table)) for table in tables)
        if taken_from_queue + new > self._pool.num_free:
            return False
        for table in held:
            self._pool.hold(table)
        request.tables = tables
        return self.extend(request, num_tokens)

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Grow every table to ``num_tokens``; False, and nothing changed, if the pool has too few blocks."""
        length = -(-num_tokens // self._block_tokens)
        if sum(length - len(table) for table in request.tables if length > len(table)) > self._pool.num_free:
            return False
        for table in request.tables:
            table.extend(self._pool.allocate(max(0, length - len(table))))
        return True

    def free_passed(self, request: Request) -> None:
        """Release the blocks that neither the request's next token nor any later one attends to.

        They keep their content, and can be found until the pool hands them out again.
        """
        for group, table in enumerate(request.tables):
            passed = []
            for index in range(self.first_block(group, request.num_computed_tokens) - 1, -1, -1):
                if table[index].is_null:
                    break
                passed.append(table[index])
                table[index] = self._pool.null_block
            self._pool.release(passed)

    def register_computed(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks within a request's first ``num_tokens``, which are computed, findable."""
        if not self._prefix_caching:
            return
        full = num_tokens // self._block_tokens
        for group, table in enumerate(request.tables):
            # From the back, because the tables of a long request are registered up to its last few blocks already.
            for index in range(full - 1, -1, -1):
                if table[index].is_null or table[index].block_hash is not None:
                    break
                self._pool.register(table[index], request.block_hashes[index], group)

    def usable_tokens(self, request: Request, num_tokens: int, invalid: frozenset[int]) -> int:
        """Number of its first ``num_tokens`` after which a request can continue, if some of its blocks are invalid.

        There, every group has valid blocks for all that the next token attends to. With full attention that is the
        first invalid block. A window is loaded for the end of the load only: earlier it has no blocks, so after one
        invalid block in it, everything is usually computed.
        """
        bad = [
            [block.is_null or block.block_id in invalid for block in table[: -(-num_tokens // self._block_tokens)]]
            for table in request.tables
        ]
        tokens = num_tokens
        while tokens and any(
            any(table[self.first_block(group, min(tokens, request.num_tokens - 1)) : -(-tokens // self._block_tokens)])
            for group, table in enumerate(bad)
        ):
            tokens = (tokens - 1) // self._block_tokens * self._block_tokens
        return tokens

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Release all blocks behind the first ``num_tokens``."""
        length = -(-num_tokens // self._block_tokens)
        self._release_rows([table[length:] for table in request.tables])
        request.tables = [table[:length] for table in request.tables]

    def close(self, request: Request) -> None:
        """Release all blocks of a request, tail first over all groups, so that the groups' heads are evicted last."""
        self.truncate(request, 0)

    def _release_rows(self, tables: Sequence[Sequence[Block]]) -> None:
        for row in reversed(list(zip(*tables, strict=True))):
            self._pool.release(_real(reversed(row)))


def _real(blocks: Iterable[Block]) -> list[Block]:
    """Filter out null blocks."""
    return [block for block in blocks if not block.is_null]
