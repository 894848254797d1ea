"""What happened to chunks lately, to explain an illegal transition. Bounded; one entry per batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.manager.chunk_state import ChunkEvent, ChunkState
from tierkv.types.keys import Key

STORY_EVENTS_MAX = 4096
"""Events kept, over all chunks; a batch that begins within them is kept whole."""


class Story:
    """The latest transitions of all chunks."""

    def __init__(self, events_max: int = STORY_EVENTS_MAX) -> None:
        self._events_max = events_max
        self._batches: deque[tuple[ChunkEvent | None, ChunkState, Sequence[Key]]] = deque()
        self._size = 0

    def __len__(self) -> int:
        """Events kept."""
        return self._size

    def note(self, event: ChunkEvent | None, state: ChunkState, keys: Sequence[Key]) -> None:
        """All of ``keys`` came into ``state`` by ``event`` (None: they were admitted).

        The caller leaves ``keys`` as they are from now on.
        """
        if not keys:
            return
        batches = self._batches
        batches.append((event, state, keys))
        self._size += len(keys)
        while self._size - len(batches[0][2]) >= self._events_max:
            self._size -= len(batches.popleft()[2])

    def of(self, key: Key) -> str:
        """What happened to a key, oldest first."""
        lines = [
            f"{'admitted' if event is None else event.value} -> {state.value}"
            for event, state, keys in self._batches
            for known in keys
            if known == key
        ]
        return "; ".join(lines) or "nothing remembered"
