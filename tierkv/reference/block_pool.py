"""The GPU block pool: who holds which block, which computed block can be found again, and which goes next.

A block is *held* (``ref_cnt`` > 0) or in the free queue, never both. The free queue is in eviction order: the block at
its front is handed out next. A block in the queue keeps its hash, so that a later request can still find it and take it
back out; it loses the hash only when it is handed out for something new. A finished request gives its blocks back tail
first, so that among them the tail of the prefix is evicted before its head.

All groups share one space of block ids; a block belongs to one group at a time. Used on the engine's thread.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from tierkv.types.engine import NULL_BLOCK_ID


def root_hash(salt: str) -> bytes:
    """The parent of every first block: prefixes under different salts have nothing in common."""
    return xxhash.xxh3_128_digest(salt.encode())


def chained_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Sixteen bytes that stand for these tokens and, through ``parent``, for all tokens before them."""
    return xxhash.xxh3_128_digest(parent + struct.pack(f"<{len(tokens)}q", *tokens))


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool.

    block_hash: None until the block is full and computed.
    group: the KV group of its content; meaningless while ``block_hash`` is None.
    """

    block_id: int
    is_null: bool = False
    ref_cnt: int = 0
    block_hash: bytes | None = None
    group: int = 0


class BlockPool:
    """All blocks of the engine, with prefix caching."""

    def __init__(self, num_blocks: int) -> None:
        """Make ``num_blocks`` blocks; block 0 is the null block and is never handed out."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks} is too small; the null block alone is one")
        self._blocks = [Block(i, is_null=i == NULL_BLOCK_ID) for i in range(num_blocks)]
        self._free = OrderedDict((block.block_id, block) for block in self._blocks if not block.is_null)
        # Two requests may compute the same block side by side; then one hash has several blocks, oldest first.
        self._cached: dict[tuple[bytes, int], dict[int, Block]] = {}

    @property
    def null_block(self) -> Block:
        """The placeholder block."""
        return self._blocks[NULL_BLOCK_ID]

    @property
    def num_free(self) -> int:
        """How many blocks can be handed out."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many blocks somebody holds; the null block does not count."""
        return len(self._blocks) - 1 - len(self._free)

    def find(self, block_hash: bytes, group: int) -> Block | None:
        """A block of this group with this content, held or free. Nothing is taken."""
        blocks = self._cached.get((block_hash, group))
        return next(iter(blocks.values())) if blocks else None

    def hold(self, blocks: Iterable[Block]) -> None:
        """Take blocks that were found: one more reference each."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def allocate(self, count: int) -> list[Block]:
        """Hand out ``count`` blocks from the front of the free queue; what they held can be found no more.

        Raises:
            ValueError: fewer are free. Ask ``num_free`` first; nothing was handed out.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks were asked for and {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._forget(block)
            block.ref_cnt = 1
        return taken

    def release(self, blocks: Iterable[Block]) -> None:
        """Give back one reference each. Blocks that nobody holds any more queue up in the order given.

        Raises:
            ValueError: a block is not held.
        """
        for block in blocks:
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} was released and nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                self._free[block.block_id] = block

    def register(self, block: Block, block_hash: bytes, group: int) -> None:
        """Make a held block findable: it is full and computed. Registering it again changes nothing.

        Raises:
            ValueError: the block is null or free, or is known under another hash.
        """
        if block.is_null or block.ref_cnt == 0:
            raise ValueError(f"block {block.block_id} is not held, so its content cannot be vouched for")
        if block.block_hash is not None:
            if (block.block_hash, block.group) != (block_hash, group):
                raise ValueError(f"block {block.block_id} holds other content already")
            return
        block.block_hash, block.group = block_hash, group
        self._cached.setdefault((block_hash, group), {})[block.block_id] = block

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Refused (False, and nothing changes) while any block is held."""
        if self.num_held:
            return False
        for block in self._blocks:
            self._forget(block)
        return True

    def _forget(self, block: Block) -> None:
        if block.block_hash is None:
            return
        key = (block.block_hash, block.group)
        blocks = self._cached[key]
        del blocks[block.block_id]
        if not blocks:
            del self._cached[key]
        block.block_hash = None
