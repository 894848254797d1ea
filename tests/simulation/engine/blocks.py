"""GPU blocks of the simulated engine: held or free, and findable by content until they are handed out again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tierkv.types.engine import NULL_BLOCK_ID, Block


@dataclass(frozen=True, slots=True)
class SimBlock:
    """A block as tierkv sees it; satisfies :class:`tierkv.types.engine.Block`."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


NULL_BLOCK = SimBlock(NULL_BLOCK_ID, is_null=True)


class BlockPool:
    """Reference counts, a free queue in eviction order, and an index by content. Block 0 is never handed out."""

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self._caching = caching
        self._holders = dict.fromkeys(range(1, num_blocks), 0)
        self._free = OrderedDict.fromkeys(self._holders)
        self._by_content: dict[tuple[int, bytes], int] = {}
        self._content: dict[int, tuple[int, bytes]] = {}
        self._entries = dict.fromkeys(self._holders, 0)
        self._joined = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_blocks(self) -> int:
        """Blocks in all, without the placeholder."""
        return len(self._holders)

    def find(self, group: int, block_hash: bytes) -> int | None:
        """A block with this content."""
        return self._by_content.get((group, block_hash))

    def view(self, block_id: int) -> SimBlock:
        """The block as tierkv sees it."""
        if block_id == NULL_BLOCK_ID:
            return NULL_BLOCK
        content = self._content.get(block_id)
        return SimBlock(block_id, None if content is None else content[1])

    def hold(self, block_id: int) -> None:
        """Count one more holder."""
        if block_id != NULL_BLOCK_ID:
            self._free.pop(block_id, None)
            self._holders[block_id] += 1

    def take(self) -> int:
        """Hand out the next free block. Its content can be found no more."""
        block_id, _ = self._free.popitem(last=False)
        content = self._content.pop(block_id, None)
        if content is not None:
            del self._by_content[content]
        self._holders[block_id] = 1
        return block_id

    def release(self, block_id: int) -> None:
        """Count one holder less."""
        if block_id != NULL_BLOCK_ID:
            self._holders[block_id] -= 1
            if not self._holders[block_id]:
                self._free[block_id] = None
                self._joined += 1
                self._entries[block_id] = self._joined

    # -- the queue of free blocks, as tierkv sees it: :class:`tierkv.types.engine.FreeBlockQueue` --------------------

    def __len__(self) -> int:
        """Blocks in the queue."""
        return len(self._free)

    def head(self) -> SimBlock | None:
        """The block that is handed out next."""
        return self.view(next(iter(self._free))) if self._free else None

    def after(self, block: Block) -> SimBlock | None:
        """The one behind a block that is in the queue."""
        behind = iter(self._free)
        for block_id in behind:
            if block_id == block.block_id:
                break
        after = next(behind, None)
        return None if after is None else self.view(after)

    def entry(self, block: Block) -> int | None:
        """When it joined the queue."""
        return self._entries[block.block_id] if block.block_id in self._free else None

    # ----------------------------------------------------------------------------------------------------------------

    def register(self, group: int, block_hash: bytes, block_id: int) -> None:
        """The block is full and computed: it may be found from now on."""
        taken = block_id == NULL_BLOCK_ID or block_id in self._content or (group, block_hash) in self._by_content
        if self._caching and not taken:
            self._by_content[group, block_hash] = block_id
            self._content[block_id] = (group, block_hash)
