"""Requests in the simulated engine and the blocks that they hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tierkv.testing.simulation.blocks import BlockPool, SimBlock
from tierkv.testing.simulation.setup import Setup
from tierkv.testing.simulation.truth import SimRequest
from tierkv.types.geometry import cdiv


@dataclass(eq=False, slots=True)
class Seat:
    """One request in the engine.

    arrival: counts requests. born_step: when it came. tables: per group, its blocks. told: how many of them the stack
    knows of. computed: tokens whose KV is there. load_end: end of the tokens being loaded. fresh: (group, block) handed
    out since its last forward pass. deferred_since_s: since when its lookup is unanswered.
    """

    request: SimRequest
    new_tokens: int
    arrival: int
    born_step: int
    tables: list[list[int]] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    computed: int = 0
    generated: int = 0
    load_end: int = 0
    fresh: list[tuple[int, int]] = field(default_factory=list)
    deferred_since_s: float | None = None


class TableKeeper:
    """Hands blocks to seats and takes them back."""

    def __init__(self, setup: Setup) -> None:
        self.pool = BlockPool(setup.gpu_blocks, caching=setup.caching)
        self.align_tokens = math.lcm(*(group.block_tokens for group in setup.engine.groups))
        self._groups = setup.engine.groups
        self._hash_block_tokens = setup.engine.hash_block_tokens

    def local_prefix(self, request: SimRequest) -> tuple[list[list[int]], int]:
        """Blocks that the GPU still has, and the tokens they cover in all groups. At least one token is computed."""
        tokens = request.num_tokens - 1
        found: list[list[int]] = []
        for group, spec in enumerate(self._groups):
            table: list[int] = []
            for i in range(tokens // spec.block_tokens):
                block_id = self.pool.find(group, self._block_hash(request, group, i))
                if block_id is None:
                    break
                table.append(block_id)
            tokens = min(tokens, len(table) * spec.block_tokens)
            found.append(table)
        tokens = tokens // self.align_tokens * self.align_tokens
        sizes = [spec.block_tokens for spec in self._groups]
        return [table[: tokens // size] for table, size in zip(found, sizes, strict=True)], tokens

    def _block_hash(self, request: SimRequest, group: int, index: int) -> bytes:
        per_block = self._groups[group].block_tokens // self._hash_block_tokens
        return request.block_hashes[per_block * (index + 1) - 1]

    def open(self, seat: Seat, prefix: list[list[int]], tokens: int, *, is_load: bool) -> bool:
        """Blocks for ``tokens`` tokens behind a prefix that was found; False if there are too few."""
        for table in prefix:
            for block_id in table:
                self.pool.hold(block_id)
        seat.tables = [list(table) for table in prefix]
        seat.told = [0] * len(prefix)
        if not self.extend(seat, tokens):
            self.free(seat)
            return False
        if is_load:
            seat.fresh.clear()
        return True

    def extend(self, seat: Seat, tokens: int) -> bool:
        """More blocks, up to ``tokens`` tokens; False if there are too few, and then nothing is taken."""
        needs = [cdiv(tokens, spec.block_tokens) for spec in self._groups]
        missing = [max(0, need - len(table)) for need, table in zip(needs, seat.tables, strict=True)]
        if sum(missing) > self.pool.num_free:
            return False
        for group, count in enumerate(missing):
            new = [self.pool.take() for _ in range(count)]
            seat.tables[group] += new
            seat.fresh += [(group, block_id) for block_id in new]
        return True

    def free(self, seat: Seat) -> None:
        """Give all blocks back, the tail first."""
        for table in seat.tables:
            for block_id in reversed(table):
                self.pool.release(block_id)
        seat.tables, seat.told, seat.fresh = [], [], []

    def register(self, seat: Seat, tokens: int) -> None:
        """Whole blocks within ``tokens`` may be found by others."""
        for group, table in enumerate(seat.tables):
            for i in range(tokens // self._groups[group].block_tokens):
                self.pool.register(group, self._block_hash(seat.request, group, i), table[i])

    def views(self, seat: Seat) -> list[list[SimBlock]]:
        """The tables as tierkv sees them."""
        return [[self.pool.view(block_id) for block_id in table] for table in seat.tables]

    def valid_tokens(self, seat: Seat, tokens: int, invalid: frozenset[int]) -> int:
        """How many of ``tokens`` come before the first block that holds no valid data, in any group."""
        for spec, table in zip(self._groups, seat.tables, strict=True):
            bad = (i for i, block_id in enumerate(table) if block_id in invalid)
            tokens = min(tokens, next(bad, len(table)) * spec.block_tokens)
        return tokens
