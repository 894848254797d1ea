"""Block tables of requests, as the engine changes them, and the jobs to flush before a block is overwritten.

A window passes blocks on while its request still runs. The engine gives such a block to another request without notice;
:class:`WindowBlocks` then replaces it in the first table by the null block, so that no chunk is stored from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from tierkv.errors import require
from tierkv.scheduler.jobs.jobs import Fences
from tierkv.scheduler.requests.record import GroupRecord, RequestRecord
from tierkv.scheduler.requests.rules import refused
from tierkv.types.engine import NULL_BLOCK_ID, ScheduledRequest
from tierkv.types.geometry import Geometry, cdiv


class WindowBlocks:
    """Positions of blocks in the tables of groups with a window, by block id. A shared block has several.

    A table is removed at once, however long it is. Its positions are forgotten while others are added.
    """

    def __init__(self) -> None:
        self._positions: dict[int, set[tuple[int, int]]] = {}  # by block id; each the number of a table, and a position
        self._tables: dict[int, list[int]] = {}  # by number, which is never reused
        self._numbers: dict[GroupRecord, int] = {}
        self._next_number = count()
        self._removed: deque[tuple[int, list[int]]] = deque()

    def __len__(self) -> int:
        """Number of tables."""
        return len(self._tables)

    def add_table(self, table: GroupRecord, start: int) -> None:
        """Add the blocks of a table from position ``start`` on."""
        number = self._numbers.get(table)
        if number is None:
            number = self._numbers[table] = next(self._next_number)
            self._tables[number] = table.block_ids
        for position in range(start, len(table.block_ids)):
            block_id = table.block_ids[position]
            if block_id != NULL_BLOCK_ID:
                self._positions.setdefault(block_id, set()).add((number, position))
        if self._removed:
            self._forget_some(2 * (len(table.block_ids) - start))

    def remove_table(self, table: GroupRecord) -> None:
        """Remove all blocks of a table, whose list gets another owner, and no further block. O(1)."""
        number = self._numbers.pop(table, None)
        if number is not None:
            self._removed.append((number, self._tables.pop(number)))

    def _forget_some(self, blocks_max: int) -> None:
        """Forget up to ``blocks_max`` positions in removed tables: twice as many as are added, so none stays long."""
        while self._removed and blocks_max > 0:
            number, block_ids = self._removed[0]
            for _ in range(min(len(block_ids), blocks_max)):
                block_id = block_ids.pop()
                positions = self._positions.get(block_id)
                if positions is not None:
                    positions.discard((number, len(block_ids)))
                    if not positions:
                        del self._positions[block_id]
                blocks_max -= 1
            if not block_ids:
                self._removed.popleft()

    def null_blocks(self, block_ids: Iterable[int]) -> None:
        """Replace these blocks by the null block in every table: another request will overwrite them."""
        if self._positions:
            for block_id in block_ids:
                for number, position in self._positions.pop(block_id, ()):
                    if (table := self._tables.get(number)) is not None:
                        table[position] = NULL_BLOCK_ID

    def validate(self) -> None:
        """Check that the table at each position holds the block.

        Raises:
            InvariantError: one does not.
        """
        for table, number in self._numbers.items():
            require(self._tables[number] is table.block_ids, f"table {number} of a window is not that of its request")
        for block_id, positions in self._positions.items():
            for number, position in positions:
                ids = self._tables.get(number)
                found = ids is None or (position < len(ids) and ids[position] == block_id)
                require(found, f"block {block_id} is not at its noted position {position}")


class RequestTables:
    """Updates the block tables in request records. Sans-IO; O(1) per block that changes hands.

    Args:
        geometry: sizes of groups and blocks.
        fences: on blocks that jobs in flight use.
        on_overwritten: called with blocks that are about to be overwritten.
    """

    def __init__(self, geometry: Geometry, fences: Fences, on_overwritten: Callable[[Sequence[int]], None]) -> None:
        self.num_blocks = 0
        """Number of blocks of the engine's pool, as far as their numbers show."""
        self._geometry = geometry
        self._on_overwritten = on_overwritten
        self._fences = fences
        self._windows = WindowBlocks()
        self._windowed = [group.index for group in geometry.groups if group.window_chunks is not None]
        self._full = [(group.index, group.block_tokens) for group in geometry.groups if group.window_chunks is None]

    def overwrite_blocks(self, block_ids: Sequence[int]) -> set[int]:
        """Note that these blocks are about to be written. Returns the jobs that must end before that."""
        if not block_ids:
            return set()
        self.num_blocks = max(self.num_blocks, max(block_ids) + 1)
        self._windows.null_blocks(block_ids)
        self._on_overwritten(block_ids)
        return self._fences.jobs_fencing(block_ids)

    def check_numbers(self, scheduled: ScheduledRequest) -> None:
        """Check the numbers of an entry by themselves.

        Raises:
            EngineProtocolError: the number of groups differs, a number of tokens is negative, or a block id is no
                number from 0.
        """
        ids, name = scheduled.block_ids, scheduled.request_id
        if len(ids) != len(self._geometry.groups):
            raise refused(name, f": block ids of {len(ids)} groups, the engine has {len(self._geometry.groups)}")
        if scheduled.num_computed_tokens < 0 or scheduled.num_scheduled_tokens < 0:
            raise refused(
                name,
                f": {scheduled.num_computed_tokens} tokens computed, {scheduled.num_scheduled_tokens} scheduled: "
                "neither can be negative",
            )
        for group, table in enumerate(ids):
            wrong = [i for i in table if (type(i) is not int and not hasattr(i, "__index__")) or i < 0]
            if wrong:
                raise refused(name, f", group {group}: block id {wrong[0]!r}: give integers from 0")

    def check_table(self, record: RequestRecord, scheduled: ScheduledRequest, *, is_preempted: bool = False) -> None:
        """Check that the table will hold all tokens; otherwise chunks would be stored from the wrong blocks.

        is_preempted: the step preempts the request as well, so that its table is unknown.

        Raises:
            EngineProtocolError: only the new blocks are given of a request whose table is unknown (first time, loaded,
                preempted, asked about again); the request begins again with a second table; or blocks are missing.
        """
        ids, whole, name = scheduled.block_ids, scheduled.replaces_table, scheduled.request_id
        adds = not whole and scheduled.num_computed_tokens
        if adds and (is_preempted or not _has_blocks(record)):
            raise refused(
                name,
                f" was scheduled with {scheduled.num_computed_tokens} computed tokens and only its new blocks, "
                "but it is new, was preempted, or was asked about again: give its whole table with replaces_table=True",
            )
        stop = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        if not (whole or adds or is_preempted) and self._begins_again(record, scheduled, stop):
            raise refused(
                name,
                f" had {record.computed_tokens} tokens, and was scheduled from its first one, with blocks for all of "
                "them and without replaces_table=True: its old blocks would count as its front. If it was preempted, "
                "name it in StepOutput.preempted, or give its whole table with replaces_table=True",
            )
        for index, block_tokens in self._full:
            held = len(ids[index]) + (0 if whole or is_preempted else len(record.groups[index].block_ids))
            if held * block_tokens < stop:
                needed = cdiv(stop, block_tokens)
                raise refused(name, f", group {index}: {held} blocks for {stop} tokens, {needed} are needed")

    def _begins_again(self, record: RequestRecord, scheduled: ScheduledRequest, stop: int) -> bool:
        """Whether a request with blocks is scheduled from its first token, with new blocks for all of its tokens.

        A request whose load failed elsewhere is scheduled so as well, but keeps its blocks and gets none, or a few.
        """
        return bool(self._full and stop and record.computed_tokens and _has_blocks(record)) and all(
            len(scheduled.block_ids[index]) * block_tokens >= stop for index, block_tokens in self._full
        )

    def room_tokens(self, record: RequestRecord) -> int | None:
        """Tokens for which the table of a request has blocks; None: any number, because all groups have windows."""
        rooms = [len(record.groups[index].block_ids) * block_tokens for index, block_tokens in self._full]
        return min(rooms, default=None)

    def update_table(self, record: RequestRecord, scheduled: ScheduledRequest) -> set[int]:
        """Update the table of a scheduled request. Returns the jobs that must end before this step writes."""
        if scheduled.replaces_table:
            self._remove_windows(record)
        elif not any(scheduled.block_ids):  # as in most steps of a request that decodes
            return set()
        starts = [0 if scheduled.replaces_table else len(group.block_ids) for group in record.groups]
        record.replace_blocks(scheduled.block_ids, whole_table=scheduled.replaces_table)
        jobs = self.overwrite_blocks(self.written_ids(scheduled))
        for group in self._windowed:
            self._windows.add_table(record.groups[group], starts[group])
        return jobs

    def written_ids(self, scheduled: ScheduledRequest) -> list[int]:
        """Blocks new to the request, which it will write. The computed front of a whole table is only read."""
        written: list[int] = []
        for group, ids in zip(self._geometry.groups, scheduled.block_ids, strict=True):
            read = scheduled.num_computed_tokens // group.block_tokens if scheduled.replaces_table else 0
            written += ids[read:]
        return written

    def clear_table(self, record: RequestRecord) -> None:
        """Empty the table of a request that has lost its blocks, or has ended."""
        self._remove_windows(record)
        for group in record.groups:
            group.block_ids = []

    def _remove_windows(self, record: RequestRecord) -> None:
        for group in self._windowed:
            self._windows.remove_table(record.groups[group])

    def validate(self) -> None:
        """Check the positions of window blocks, and the fences.

        Raises:
            InvariantError: one of them is out of step.
        """
        self._windows.validate()
        self._fences.validate()


def _has_blocks(record: RequestRecord) -> bool:
    """Whether a block of the request is known."""
    for group in record.groups:  # noqa: SIM110 - asked per request and step: any() makes a generator
        if group.block_ids:
            return True
    return False
