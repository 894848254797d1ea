"""GPU blocks of the bed's engine: held or free, and findable by content until they are handed out again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.types.engine import NULL_BLOCK_ID, Block


@dataclass(frozen=True, slots=True)
class BedBlock:
    """What a core sees of a block; satisfies :class:`tierkv.types.engine.Block`."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


def blocks(ids: Sequence[int], filled: int = 0) -> list[BedBlock]:
    """A table of blocks, the first ``filled`` of them computed; id 0 is the null block."""
    return [BedBlock(block_id, b"computed" if i < filled else None, block_id == 0) for i, block_id in enumerate(ids)]


class BedPool:
    """Reference counts, a first-in-first-out free queue, and a content index. Block 0 is never handed out.

    Groups share the blocks; a group with small blocks uses the front of one.
    """

    def __init__(self, block_bytes: int, num_blocks: int, *, caching: bool) -> None:
        self.memory: dict[int, bytearray] = {i: bytearray(block_bytes) for i in range(1, num_blocks + 1)}
        self._caching = caching
        self._holders = dict.fromkeys(self.memory, 0)
        self._free = OrderedDict.fromkeys(self.memory)
        self._entries = {block_id: block_id for block_id in self.memory}
        self._joined = num_blocks
        self._by_content: dict[tuple[int, bytes], int] = {}
        self._content: dict[int, tuple[int, bytes]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    # -- the queue of free blocks, as a core sees it: :class:`tierkv.types.engine.FreeBlockQueue` --------------------

    def __len__(self) -> int:
        """Blocks in the queue."""
        return len(self._free)

    def head(self) -> BedBlock | None:
        """The block that is handed out next."""
        return self.view(next(iter(self._free))) if self._free else None

    def after(self, block: Block) -> BedBlock | None:
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

    def find(self, group: int, block_hash: bytes) -> int | None:
        """A block with this content."""
        return self._by_content.get((group, block_hash))

    def view(self, block_id: int) -> BedBlock:
        """The block as a core sees it."""
        if block_id == NULL_BLOCK_ID:
            return BedBlock(block_id, is_null=True)
        content = self._content.get(block_id)
        return BedBlock(block_id, None if content is None else content[1])

    def hold(self, block_id: int) -> None:
        """Count one more holder."""
        self._free.pop(block_id, None)
        self._holders[block_id] += 1

    def take(self) -> int:
        """Hand out the oldest free block; its content is forgotten, not erased."""
        block_id, _ = self._free.popitem(last=False)
        content = self._content.pop(block_id, None)
        if content is not None:
            del self._by_content[content]
        self._holders[block_id] = 1
        return block_id

    def release(self, block_id: int) -> None:
        """Count one holder less."""
        self._holders[block_id] -= 1
        if not self._holders[block_id]:
            self._free[block_id] = None
            self._joined += 1
            self._entries[block_id] = self._joined

    def register(self, group: int, block_hash: bytes, block_id: int) -> None:
        """The block is full and computed: it may be found from now on."""
        if self._caching and block_id not in self._content and (group, block_hash) not in self._by_content:
            self._by_content[group, block_hash] = block_id
            self._content[block_id] = (group, block_hash)
