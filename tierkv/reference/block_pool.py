"""GPU block pool: reference counts, prefix caching by content, and a free queue in eviction order.

A block is *held* (``ref_cnt`` > 0) or in the free queue, never both. The block at the front of the queue is handed out
next. A block in the queue keeps its hash: a later request can find it and take it back out. It loses the hash when it
is handed out for new content. A finished request releases its blocks tail first, so the tail of a prefix is evicted
before its head.

All groups share one space of block ids; a block belongs to one group at a time. Used on the engine's thread. The demo,
the simulation and the tests of the core share this pool.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import xxhash

from tierkv.types.engine import NULL_BLOCK_ID
from tierkv.types.engine import Block as EngineBlock


def root_hash(salt: str) -> bytes:
    """Parent hash of every first block; prefixes under different salts share nothing."""
    return xxhash.xxh3_128_digest(salt.encode())


def chained_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of 16 bytes over these tokens and, through ``parent``, over all tokens before them."""
    return xxhash.xxh3_128_digest(parent + struct.pack(f"<{len(tokens)}q", *tokens))


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool; satisfies :class:`tierkv.types.engine.Block`."""

    block_id: int
    """Index in the engine's KV tensors."""
    is_null: bool = False
    """Whether it is the placeholder, which no request holds."""
    ref_cnt: int = 0
    """Number of requests that hold it."""
    block_hash: bytes | None = None
    """None until the block is full and computed."""
    group: int = 0
    """KV group of its content; meaningless while ``block_hash`` is None."""


class FreeQueue:
    """Free blocks in eviction order; satisfies :class:`tierkv.types.engine.FreeBlockQueue`. Every call is O(1)."""

    def __init__(self) -> None:
        self._links: dict[int, tuple[Block | None, Block | None]] = {}
        self._entries: dict[int, int] = {}
        self._head: Block | None = None
        self._tail: Block | None = None
        self._joined = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Block]:
        block = self._head
        while block is not None:
            yield block
            block = self.after(block)

    def head(self) -> Block | None:
        """The block that is handed out next."""
        return self._head

    def after(self, block: EngineBlock) -> Block | None:
        """The block behind one in the queue.

        Raises:
            KeyError: ``block`` is not in the queue.
        """
        return self._links[block.block_id][1]

    def entry(self, block: EngineBlock) -> int | None:
        """Number of the block's entry into the queue, unique per entry; None while it is not in the queue."""
        return self._entries.get(block.block_id)

    def append(self, block: Block) -> None:
        """Queue a block behind all others."""
        self._joined += 1
        self._entries[block.block_id] = self._joined
        self._link(self._tail, block)
        self._link(block, None)

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it is in the queue.

        Raises:
            KeyError: ``block`` is not in the queue.
        """
        del self._entries[block.block_id]
        before, behind = self._links[block.block_id]
        self._link(before, behind)
        del self._links[block.block_id]

    def _link(self, before: Block | None, behind: Block | None) -> None:
        """Make two blocks neighbours; None is the end of the queue."""
        if before is None:
            self._head = behind
        else:
            self._links[before.block_id] = (self._links.get(before.block_id, (None, None))[0], behind)
        if behind is None:
            self._tail = before
        else:
            self._links[behind.block_id] = (before, self._links.get(behind.block_id, (None, None))[1])


class BlockPool:
    """All blocks of an engine, with prefix caching. ``pool[block_id]`` is a block.

    Attributes:
        free_queue: the free blocks, as ``Stack.register_free_queue`` takes them.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make ``num_blocks`` blocks; block 0 is the null block and is never handed out."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks} is too small; the null block alone is one")
        self._blocks = [Block(i, is_null=i == NULL_BLOCK_ID) for i in range(num_blocks)]
        self.free_queue = FreeQueue()
        for block in self._blocks:
            if not block.is_null:
                self.free_queue.append(block)
        # Two requests may compute the same block side by side; then one hash has several blocks, oldest first.
        self._cached: dict[tuple[bytes, int], dict[int, Block]] = {}

    def __getitem__(self, block_id: int) -> Block:
        return self._blocks[block_id]

    @property
    def null_block(self) -> Block:
        """The placeholder block."""
        return self._blocks[NULL_BLOCK_ID]

    @property
    def num_free(self) -> int:
        """Number of blocks that can be handed out."""
        return len(self.free_queue)

    @property
    def num_held(self) -> int:
        """Number of blocks that requests hold; the null block does not count."""
        return len(self._blocks) - 1 - len(self.free_queue)

    def find(self, block_hash: bytes, group: int) -> Block | None:
        """A block of this group with this content, held or free. Nothing is taken."""
        blocks = self._cached.get((block_hash, group))
        return next(iter(blocks.values())) if blocks else None

    def hold(self, blocks: Iterable[Block]) -> None:
        """Take blocks that were found: one more reference each. Null blocks are passed over."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def allocate(self, count: int) -> list[Block]:
        """Hand out ``count`` blocks from the front of the free queue; their previous content is no longer found.

        Raises:
            ValueError: fewer are free. Ask ``num_free`` first; nothing was handed out.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks were asked for and {self.num_free} are free")
        taken = list(islice(self.free_queue, count))
        for block in taken:
            self.free_queue.remove(block)
            self._forget(block)
            block.ref_cnt = 1
        return taken

    def release(self, blocks: Iterable[Block]) -> None:
        """Give back one reference each. Blocks without a holder join the free queue in the order given.

        Null blocks are passed over.

        Raises:
            ValueError: a block is not held.
        """
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} was released and no request holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_queue.append(block)

    def register(self, block: Block, block_hash: bytes, group: int) -> None:
        """Make a held block findable: it is full and computed. Registering it again changes nothing.

        Raises:
            ValueError: the block is null or free, or is known under another hash.
        """
        if block.is_null or block.ref_cnt == 0:
            raise ValueError(f"block {block.block_id} is not held, so its content is not known to be computed")
        if block.block_hash is not None:
            if (block.block_hash, block.group) != (block_hash, group):
                raise ValueError(f"block {block.block_id} holds other content already")
            return
        block.block_hash, block.group = block_hash, group
        self._cached.setdefault((block_hash, group), {})[block.block_id] = block

    def reset_prefix_cache(self) -> bool:
        """Forget all content. Returns False, and changes nothing, while any block is held."""
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
