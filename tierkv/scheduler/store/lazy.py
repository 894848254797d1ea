"""Store plan "lazy": store what the engine is about to overwrite.

Most blocks are found on the GPU for as long as they exist. So the host tier gets those that will be lost next: a cursor
walks the engine's queue of free blocks ahead of its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.manager.manager import OffloadManager
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store.candidates import skip_useless, storable_chunks
from tierkv.scheduler.store.stores import FreeChunk, Stores
from tierkv.types.engine import Block, FreeBlockQueue, ScheduledRequest
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key, split_key


def target_free(geometry: Geometry, max_batched_tokens: int) -> int:
    """Number of blocks that the engine can take from its queue within two steps (S119).

    Per group and step: the blocks that a batch fills, or a window's span and one more; two for a state space group.
    Assumes one block per chunk, so that a window in chunks is a window in blocks.
    """
    return 2 * sum(
        cdiv(max_batched_tokens, group.block_tokens) if group.window_chunks is None else group.window_chunks + 1
        for group in geometry.groups
    )


def check_lazy(geometry: Geometry) -> None:
    """Check that a chunk is one block: blocks of a larger chunk reach the head of the queue one by one.

    Raises:
        ConfigError: a chunk has several blocks.
    """
    if geometry.blocks_per_chunk != 1:
        raise ConfigError(
            f'store.plan = "lazy" stores single blocks, and a chunk here has {geometry.blocks_per_chunk} of them: '
            'set chunk.blocks = 1, or store.plan = "eager"'
        )


def _merge_hints(first: RequestHints, later: RequestHints) -> RequestHints:
    """Hints of a chunk that one request computed and a later one used, as if it had been stored in between.

    The tiers are those of the first request. The chunk is one-shot only if both say so, and has the longer TTL.
    """
    if first == later:
        return first
    ttl_s = None if first.ttl_s is None or later.ttl_s is None else max(first.ttl_s, later.ttl_s)
    return replace(first, one_shot=first.one_shot and later.one_shot, ttl_s=ttl_s)


class LazyPlan:
    """Remembers which block holds which storable chunk, and offers those near the head of the queue.

    Chunks excluded by hints, ``prompt_only`` or alignment are never remembered, hence never stored.
    """

    def __init__(self, manager: OffloadManager, geometry: Geometry, stores: Stores) -> None:
        check_lazy(geometry)
        self._manager = manager
        self._geometry = geometry
        self._stores = stores
        self._queue: FreeBlockQueue | None = None
        self._visits_max = 0
        self._cursor: tuple[Block, int] | None = None
        self._chunk_of_block: dict[int, FreeChunk] = {}

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Walk this queue from now on. The engine computes at most ``max_batched_tokens`` in one step."""
        self._queue = queue
        self._visits_max = target_free(self._geometry, max_batched_tokens)
        self._cursor = None

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:  # noqa: ARG002 - contract
        """Remember the chunks that this step completes."""
        self._remember(record, self._stores.storable_tokens(record, record.computed_tokens))

    def on_finished(self, record: RequestRecord) -> None:
        """Remember the last chunks: their blocks join the queue now."""
        self._remember(record, self._stores.final_tokens(record))

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Forget the content of these blocks, even if the same hash returns: it may be another group's data."""
        for block_id in block_ids:
            self._chunk_of_block.pop(block_id, None)

    def _remember(self, record: RequestRecord, tokens: int) -> None:
        record.extend_keys(self._geometry)
        skip_useless(record, self._geometry, tokens)
        request = record.request if self._stores.describes_chunks else None
        for group, table in zip(self._geometry.groups, record.groups, strict=True):
            for i in storable_chunks(group, table, 1, tokens):
                block_id, key = table.block_ids[i], table.keys[i]
                known = self._chunk_of_block.get(block_id)
                hints = record.ctx.hints
                if known is not None and known.key == key:
                    hints = _merge_hints(known.hints, hints)
                self._chunk_of_block[block_id] = FreeChunk(key, group.index, i, block_id, request, hints)
                table.next_stored = i + 1

    def reset(self) -> None:
        """Restart at the head: stored chunks are gone."""
        self._cursor = None

    def hold(self, record: RequestRecord) -> bool:  # noqa: ARG002 - contract
        """Hold nothing: chunks must be remembered before the engine reuses their blocks."""
        return False

    @property
    def holds_chunks(self) -> bool:
        """Whether chunks are held: never."""
        return False

    def on_preempted(self, record: RequestRecord) -> None:
        """Nothing to do: its blocks join the queue."""

    def end_step(self, *, rests: bool = False) -> None:  # noqa: ARG002 - contract
        """Walk on, and offer the chunks found. The cursor stops at the last block that needs no second visit.

        Raises:
            EngineProtocolError: no queue was registered.
        """
        if self._queue is None:
            raise EngineProtocolError(
                'store.plan = "lazy" needs the free blocks: call register_free_queue once, before the first step'
            )
        visited, chunks = self._walk_queue(self._queue)
        stop = len(visited)
        if chunks:
            taken = self._stores.offer_free_chunks([chunk for _, chunk in chunks])
            if taken < len(chunks):
                stop = chunks[taken][0]  # the host tier is full: the cursor stops before the refused chunk
        if stop:
            self._cursor = visited[stop - 1]

    def _walk_queue(self, queue: FreeBlockQueue) -> tuple[list[tuple[Block, int]], list[tuple[int, FreeChunk]]]:
        """Blocks behind the cursor with their queue entries, and the chunks to store by position; each chunk once."""
        visited: list[tuple[Block, int]] = []
        chunks: list[tuple[int, FreeChunk]] = []
        seen: set[Key] = set()
        block = self._next_block(queue)
        while block is not None and len(visited) < self._visits_max and len(chunks) < self._stores.chunks_max:
            entry = queue.entry(block)
            if entry is None:
                break  # a faulty queue must not be walked forever
            chunk = self._chunk_to_store(block)
            if chunk is not None and chunk.key not in seen:
                seen.add(chunk.key)
                chunks.append((len(visited), chunk))
            visited.append((block, entry))
            block = queue.after(block)
        return visited, chunks

    def _next_block(self, queue: FreeBlockQueue) -> Block | None:
        """Block behind the cursor; the head, if the block at the cursor was taken or joined the queue again."""
        if self._cursor is not None:
            block, entry = self._cursor
            if queue.entry(block) == entry:
                return queue.after(block)
        return queue.head()

    def _chunk_to_store(self, block: Block) -> FreeChunk | None:
        """Chunk in a block, if it is still there, storable, and not in the host tier."""
        if block.is_null or block.block_hash is None:
            return None
        chunk = self._chunk_of_block.get(block.block_id)
        if chunk is None or split_key(chunk.key)[0] != block.block_hash:
            return None
        return None if self._manager.resident_prefix([chunk.key], 0, 1) else chunk
