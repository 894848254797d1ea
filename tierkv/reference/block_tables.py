"""The block tables of requests: per KV group one list of blocks, all drawn from one pool.

All groups hold full attention with the same block size, so the tables of a request have equal length and the block at
index i of each covers the same tokens.
"""

from __future__ import annotations

from tierkv.reference.block_pool import Block, BlockPool
from tierkv.reference.request import Request


class TableKeeper:
    """Finds, grows, registers and frees the tables of requests. Used on the engine's thread."""

    def __init__(self, pool: BlockPool, *, num_groups: int, block_tokens: int, prefix_caching: bool = True) -> None:
        self._pool = pool
        self._num_groups = num_groups
        self._block_tokens = block_tokens
        self._prefix_caching = prefix_caching

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that so many tokens of one request need."""
        return -(-num_tokens // self._block_tokens) * self._num_groups

    def find_prefix(self, request: Request) -> list[list[Block]]:
        """Per group, the computed blocks of the longest prefix that every group has. Nothing is taken.

        At least one token is left to compute, because the model must give the next one.
        """
        tables: list[list[Block]] = [[] for _ in range(self._num_groups)]
        if not self._prefix_caching:
            return tables
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self._block_tokens]:
            found = [self._pool.find(block_hash, group) for group in range(self._num_groups)]
            hits = [block for block in found if block is not None]
            if len(hits) < self._num_groups:
                break
            for table, block in zip(tables, hits, strict=True):
                table.append(block)
        return tables

    def open(self, request: Request, prefix: list[list[Block]], num_tokens: int) -> bool:
        """Give a request that holds nothing the blocks of a found prefix and new ones up to ``num_tokens``.

        Returns:
            False if the pool has too few; then nothing changed.
        """
        taken_from_queue = sum(block.ref_cnt == 0 for table in prefix for block in table)
        new = self.blocks_for(num_tokens) - sum(len(table) for table in prefix)
        if taken_from_queue + new > self._pool.num_free:
            return False
        for table in prefix:
            self._pool.hold(table)
        request.tables = [list(table) for table in prefix]
        return self.extend(request, num_tokens)

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Grow every table of a request to ``num_tokens``; False, and nothing changed, if the pool has too few."""
        length = -(-num_tokens // self._block_tokens)
        if sum(length - len(table) for table in request.tables if length > len(table)) > self._pool.num_free:
            return False
        for table in request.tables:
            table.extend(self._pool.allocate(max(0, length - len(table))))
        return True

    def register_computed(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks within its first ``num_tokens`` findable. Those tokens are computed."""
        if not self._prefix_caching:
            return
        full = num_tokens // self._block_tokens
        for group, table in enumerate(request.tables):
            # From the back, because the tables of a long request are registered up to its last few blocks already.
            for index in range(full - 1, -1, -1):
                if table[index].block_hash is not None:
                    break
                self._pool.register(table[index], request.block_hashes[index], group)

    def close(self, request: Request) -> None:
        """Give a request's blocks back, tail first over all groups, so that the groups' heads are evicted last."""
        for row in reversed(list(zip(*request.tables, strict=True))):
            self._pool.release(reversed(row))
        request.tables = [[] for _ in request.tables]
