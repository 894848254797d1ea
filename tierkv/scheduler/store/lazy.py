"""Store what the engine is about to hand out again (spec, section 17).

Most blocks are found on the GPU for as long as they live, so the host tier gets those that will be lost next: a cursor
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
    """Blocks that the engine can take from its queue within two steps (S119).

    Per group and step: all that a batch fills, or what a window spans and one more; a state space group takes two.
    Expects one block per chunk, so that a window in chunks is one in blocks.
    """
    return 2 * sum(
        cdiv(max_batched_tokens, group.block_tokens) if group.window_chunks is None else group.window_chunks + 1
        for group in geometry.groups
    )


def check_lazy(geometry: Geometry) -> None:
    """Make sure that a chunk is one block: the blocks of a larger one come near the queue's head one by one.

    Raises:
        ConfigError: it is not.
    """
    if geometry.blocks_per_chunk != 1:
        raise ConfigError(
            f'store.plan = "lazy" stores single blocks, and a chunk here has {geometry.blocks_per_chunk} of them: '
            'set chunk.blocks = 1, or store.plan = "eager"'
        )


def _merge_hints(first: RequestHints, later: RequestHints) -> RequestHints:
    """What counts for a chunk that one request computed and a later one used, as if it had been stored in between.

    It goes where the first one lets it. It stays unless both say that it may go, for as long as the longer one says.
    """
    if first == later:
        return first
    ends = first.ttl_s, later.ttl_s
    ttl_s = None if ends[0] is None or ends[1] is None else max(ends[0], ends[1])
    return replace(first, one_shot=first.one_shot and later.one_shot, ttl_s=ttl_s)


class LazyPlan:
    """Remembers which block holds which chunk that may be stored, and offers those near the head of the queue.

    What a request's user, ``prompt_only`` or the alignment filter leave out is never remembered, hence never stored.
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
        """Walk this queue from now on; ``max_batched_tokens`` is what the engine computes in one step at most."""
        self._queue = queue
        self._visits_max = target_free(self._geometry, max_batched_tokens)
        self._cursor = None

    def on_scheduled(self, record: RequestRecord, scheduled: ScheduledRequest) -> None:  # noqa: ARG002 - contract
        """Remember the chunks that this step completes."""
        self._remember(record, self._stores.storable_tokens(record, record.computed_tokens))

    def on_finished(self, record: RequestRecord) -> None:
        """Remember the last ones: the blocks go to the queue now."""
        self._remember(record, self._stores.final_tokens(record))

    def on_overwritten(self, block_ids: Sequence[int]) -> None:
        """Forget what these blocks held, also where the same hash comes back: it may be another group's data."""
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
        """What was stored is gone: begin at the head."""
        self._cursor = None

    def end_step(self) -> None:
        """Walk on, and offer what was found. The cursor ends at the last block that needs no other visit.

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
                stop = chunks[taken][0]  # the host tier is full: the cursor stops before what it refused
        if stop:
            self._cursor = visited[stop - 1]

    def _walk_queue(self, queue: FreeBlockQueue) -> tuple[list[tuple[Block, int]], list[tuple[int, FreeChunk]]]:
        """The blocks behind the cursor with their entries, and those worth storing by place; each chunk once."""
        visited: list[tuple[Block, int]] = []
        chunks: list[tuple[int, FreeChunk]] = []
        seen: set[Key] = set()
        block = self._next_block(queue)
        while block is not None and len(visited) < self._visits_max and len(chunks) < self._stores.chunks_max:
            entry = queue.entry(block)
            if entry is None:
                break  # a queue that gives out what is not in it must not be walked for ever
            chunk = self._chunk_to_store(block)
            if chunk is not None and chunk.key not in seen:
                seen.add(chunk.key)
                chunks.append((len(visited), chunk))
            visited.append((block, entry))
            block = queue.after(block)
        return visited, chunks

    def _next_block(self, queue: FreeBlockQueue) -> Block | None:
        """The block behind the cursor; the head, if the cursor's block was taken or has joined the queue anew."""
        if self._cursor is not None:
            block, entry = self._cursor
            if queue.entry(block) == entry:
                return queue.after(block)
        return queue.head()

    def _chunk_to_store(self, block: Block) -> FreeChunk | None:
        """The chunk in a block, if it is still there, may be stored, and is not in the host tier."""
        if block.is_null or block.block_hash is None:
            return None
        chunk = self._chunk_of_block.get(block.block_id)
        if chunk is None or split_key(chunk.key)[0] != block.block_hash:
            return None
        return None if self._manager.resident_prefix([chunk.key], 0, 1) else chunk
