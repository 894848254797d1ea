"""Where the blocks of windowed groups stand in the tables of requests (spec, S78 and D6).

What a window has left behind the engine hands out again while the request runs, and nobody says so. A table that still
names such a block would have foreign data stored under its own key; so it is struck out as soon as somebody else gets
it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.errors import require
from tierkv.scheduler.records import GroupRecord
from tierkv.types.engine import NULL_BLOCK_ID


class WindowBlocks:
    """Places of blocks, by id. A block that several requests share has several."""

    def __init__(self) -> None:
        self._places: dict[int, set[tuple[GroupRecord, int]]] = {}

    def __len__(self) -> int:
        """Blocks that stand somewhere."""
        return len(self._places)

    def enter(self, table: GroupRecord, start: int) -> None:
        """The table has grown from ``start`` on."""
        for position in range(start, len(table.block_ids)):
            block_id = table.block_ids[position]
            if block_id != NULL_BLOCK_ID:
                self._places.setdefault(block_id, set()).add((table, position))

    def leave(self, table: GroupRecord) -> None:
        """The table is about to be emptied, or its request ends."""
        for position, block_id in enumerate(table.block_ids):
            places = self._places.get(block_id)
            if places is not None:
                places.discard((table, position))
                if not places:
                    del self._places[block_id]

    def strike(self, block_ids: Iterable[int]) -> None:
        """Somebody will overwrite these blocks: they are nobody else's any more."""
        if self._places:
            for block_id in block_ids:
                for table, position in self._places.pop(block_id, ()):
                    table.block_ids[position] = NULL_BLOCK_ID

    def validate(self) -> None:
        """Check that each place still names its block.

        Raises:
            InvariantError: one does not.
        """
        for block_id, places in self._places.items():
            for table, position in places:
                stands = position < len(table.block_ids) and table.block_ids[position] == block_id
                require(stands, f"block {block_id} is said to stand where it does not")
