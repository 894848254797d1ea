"""States of a chunk in the host tier, as a table: everything that may change a chunk's state.

Absent is not a state: an absent chunk has no record and costs nothing. GONE is the end: its slot is free again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

from tierkv.types.keys import Key
from tierkv.types.state_machine import StateMachine, describe_transitions


class ChunkState(Enum):
    """State of a chunk that owns a slot."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    STORING = "storing"
    """A store job is filling its slot from the GPU."""
    PROMOTING = "promoting"
    """A lower tier is being read into its slot."""
    READY = "ready"
    """Readable. Evictable while it has no pins."""
    DOOMED = "doomed"
    """Invisible. I/O or a pin still uses its slot, so the slot may not be reused yet."""
    GONE = "gone"
    """The chunk has no record any more; the slot is free."""


class ChunkEvent(Enum):
    """Inputs of the chunk machine."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    STORED = "stored"
    ARRIVED = "arrived"
    FAILED = "failed"
    DROPPED = "dropped"
    EVICTED = "evicted"
    RELEASED = "released"


_S, _E = ChunkState, ChunkEvent

TRANSITIONS: dict[tuple[ChunkState, ChunkEvent], ChunkState] = {
    (_S.STORING, _E.STORED): _S.READY,
    (_S.STORING, _E.FAILED): _S.DOOMED,
    (_S.STORING, _E.DROPPED): _S.DOOMED,
    (_S.PROMOTING, _E.ARRIVED): _S.READY,
    (_S.PROMOTING, _E.FAILED): _S.DOOMED,
    (_S.PROMOTING, _E.DROPPED): _S.DOOMED,
    (_S.READY, _E.EVICTED): _S.GONE,
    (_S.READY, _E.DROPPED): _S.DOOMED,
    # Completions of I/O that ended after the chunk was dropped: the content of the slot is not used any more.
    (_S.DOOMED, _E.STORED): _S.DOOMED,
    (_S.DOOMED, _E.ARRIVED): _S.DOOMED,
    (_S.DOOMED, _E.FAILED): _S.DOOMED,
    (_S.DOOMED, _E.DROPPED): _S.DOOMED,
    (_S.DOOMED, _E.RELEASED): _S.GONE,
}


STATES: tuple[ChunkState, ...] = (_S.GONE, _S.STORING, _S.PROMOTING, _S.READY, _S.DOOMED)
"""Every state by its code, the number in a column of states; 0 is a slot without a chunk."""

CODES: dict[ChunkState, int] = {state: code for code, state in enumerate(STATES)}

FILLING = {ChunkEvent.STORED: ChunkState.STORING, ChunkEvent.ARRIVED: ChunkState.PROMOTING}
"""Event that ends the I/O that fills a slot, to the state of the chunk until then."""

CHUNK_STATES = StateMachine("chunk", TRANSITIONS)
"""Lookup in the table above."""

TRANSITIONS_KEPT = 4096
"""Transitions kept, over all chunks. A batch that begins within them is kept whole."""


class ChunkTransitionLog:
    """Latest transitions of all chunks, in batches: one entry per transition and not per chunk."""

    def __init__(self) -> None:
        self._batches: deque[tuple[ChunkEvent | None, ChunkState, Sequence[Key]]] = deque()
        self._size = 0

    def __len__(self) -> int:
        """Number of transitions kept."""
        return self._size

    def note(self, event: ChunkEvent | None, state: ChunkState, keys: Sequence[Key]) -> None:
        """Log that all of ``keys`` moved to ``state`` by ``event`` (None: they were admitted).

        The caller must not change ``keys`` afterwards.
        """
        if not keys:
            return
        batches = self._batches
        batches.append((event, state, keys))
        self._size += len(keys)
        while self._size - len(batches[0][2]) >= TRANSITIONS_KEPT:
            self._size -= len(batches.popleft()[2])

    def describe(self, key: Key) -> str:
        """Transitions of one key, oldest first, as text for error messages."""
        known = ((event, state) for event, state, keys in self._batches for logged in keys if logged == key)
        return describe_transitions(known) or "none kept"
