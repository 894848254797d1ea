"""The life of a chunk in the host tier, as a table. Everything that may change a chunk's state stands here.

Absent is not a state: an absent chunk has no record and costs nothing. GONE is the end: its slot is free again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from tierkv.errors import IllegalTransitionError
from tierkv.types.keys import Key

STORY_EVENTS_MAX = 4096
"""Events kept, over all chunks; a batch that begins within them is kept whole."""


class TransitionLog:
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


class ChunkState(Enum):
    """Where a chunk with a slot stands."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    STORING = "storing"
    """A store job is filling its slot from the GPU."""
    PROMOTING = "promoting"
    """A lower tier is being read into its slot."""
    READY = "ready"
    """Readable. Evictable while nobody holds it."""
    DOOMED = "doomed"
    """Invisible. Its slot is still touched or held by somebody, so it may not be reused yet."""
    GONE = "gone"
    """No record any more; the slot is free."""


class ChunkEvent(Enum):
    """What can happen to a chunk."""

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
    # News of I/O that ended after the chunk was given up: the slot's content no longer matters to anybody.
    (_S.DOOMED, _E.STORED): _S.DOOMED,
    (_S.DOOMED, _E.ARRIVED): _S.DOOMED,
    (_S.DOOMED, _E.FAILED): _S.DOOMED,
    (_S.DOOMED, _E.DROPPED): _S.DOOMED,
    (_S.DOOMED, _E.RELEASED): _S.GONE,
}


STATES: tuple[ChunkState, ...] = (_S.GONE, _S.STORING, _S.PROMOTING, _S.READY, _S.DOOMED)
"""Every state by its code, the number that stands in a column of states; 0 is a slot without a chunk."""

CODES: dict[ChunkState, int] = {state: code for code, state in enumerate(STATES)}


def next_state(state: ChunkState, event: ChunkEvent, story: Callable[[], str]) -> ChunkState:
    """The state after ``event``.

    Raises:
        IllegalTransitionError: the table has no such row; carries the story.
    """
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise IllegalTransitionError(f"a chunk that is {state.value} cannot be {event.value}. Its story: {story()}")
    return after
