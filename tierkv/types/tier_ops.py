"""Operations on lower tiers and their completions: the values exchanged by manager and dispatch.

The manager decides and never waits. Dispatch performs and never decides. Every operation gets exactly one completion
with ``ended=True``. A completion with ``ended=False`` may precede it, when the deadline passed while the I/O still
uses its slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import compress
from typing import ClassVar, TypeAlias

from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef


class Verb(Enum):
    """Kind of operation on a tier."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    PROBE = "probe"
    READ = "read"
    WRITE = "write"
    DELETE = "delete"


def always() -> bool:
    """Return True: the operation stays wanted whatever happens."""
    return True


@dataclass(frozen=True, slots=True)
class TierOp:
    """One batch for one tier."""

    op_id: int
    """Number of the operation."""
    tier: int
    """Index of the tier; 0 is the first tier below the host tier."""
    verb: Verb
    """Kind of the operation."""
    keys: tuple[Key, ...]
    """Keys of the chunks."""
    slots: tuple[SlotRef, ...]
    """One slot per key for READ (filled) and WRITE (read); empty otherwise, and of a READ that only tries the tier."""
    timeout_s: float
    """Seconds that its call may take. The time until the call begins counts only while no call of the tier ends."""
    ranks: tuple[int, ...] = ()
    """Of a WRITE to a tier that keeps ranks: place of each chunk in its prompt, 0 if unknown; empty otherwise."""
    turn_chunks: int = 0
    """Of a READ: chunks that the tier may read before its turn, roughly, these included; 0: those of the operation."""
    is_wanted: Callable[[], bool] = field(default=always, compare=False, repr=False)
    """Of a READ: whether anything waits for one of its chunks. Any thread. Asked when its turn comes."""


class OutcomeKind(Enum):
    """Outcome of an operation for one key."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    OK = "ok"
    ABSENT = "absent"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """The frame is whole, but cannot be read here: codec or key is missing, or lossy frames are not allowed."""
    FAILED = "failed"
    NO_SPACE = "no_space"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    """Not attempted: the queue is full, the breaker is open, the stack closes, or the chunk may not be stored there."""
    UNWANTED = "unwanted"
    """Not attempted: nothing waited for the chunk any more when the turn of the read came."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome for one key."""

    kind: OutcomeKind
    """Kind of the outcome."""
    frame_bytes: int = 0
    """Bytes of the frame that was written, or read and verified; 0 unless OK."""
    error: str = ""
    """Text of the error, or empty."""
    is_clear: bool = False
    """Whether a frame was read in the clear from a tier whose codec conceals. Such a frame is OK or CORRUPT."""
    is_of_part: bool = False
    """Whether it failed at a part of the tier that cannot be reached, while others serve."""


OK = Outcome(OutcomeKind.OK)
ABSENT = Outcome(OutcomeKind.ABSENT)
UNWANTED = Outcome(OutcomeKind.UNWANTED)


OP_KEYS = 16
"""Key operations that the end of an operation costs, beside those of its keys: measured, as 70 to 90 microseconds."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of a :class:`TierOp`."""

    op_id: int
    """Number of the operation."""
    outcomes: tuple[Outcome, ...]
    """One outcome per key, in the order of the operation."""
    ended: bool = True
    """Whether the I/O no longer uses any slot. False only reports a missed deadline."""
    elapsed_s: float = 0.0
    """Seconds from submission to the end of the I/O, or to the missed deadline."""
    queued_s: float = 0.0
    """Of these, the seconds before a call took it."""

    @property
    def num_keys(self) -> int:
        """Key operations that it counts as."""
        return len(self.outcomes) + OP_KEYS


@dataclass(frozen=True, slots=True)
class TierHealth:
    """Change of a tier's circuit breaker. The chunks of an unusable tier are misses, and writes to it are dropped."""

    tier: int
    """Index of the tier."""
    usable: bool
    """Whether the tier may be used."""
    reason: str = ""
    """Text of the cause, or empty."""
    num_keys: ClassVar[int] = OP_KEYS
    """Key operations that it counts as."""


LISTED_PER_KEY = 4
"""Listed chunks for the cost of one key operation: they are accounted in one batch, and no request waits for them."""


@dataclass(frozen=True, slots=True)
class TierContent:
    """Chunks at rest in a tier, by column, in the order in which they are to be evicted.

    Columns, because there may be millions: garbage collections would visit an object per chunk.
    """

    keys: Sequence[Key] = ()
    frame_bytes: array[int] = field(default_factory=partial(array, "Q"))
    """Bytes of the frame of each; of type "Q"."""
    ranks: array[int] = field(default_factory=partial(array, "Q"))
    """Written rank of each, of type "Q"; empty if none is known."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.keys)

    def part(self, first: int, stop: int) -> TierContent:
        """Chunks from one place to before another."""
        return TierContent(self.keys[first:stop], self.frame_bytes[first:stop], self.ranks[first:stop])

    def only(self, chosen: Sequence[bool]) -> TierContent:
        """The chosen chunks. chosen: one per chunk."""
        return TierContent(
            tuple(compress(self.keys, chosen)),
            array("Q", compress(self.frame_bytes, chosen)),
            array("Q", compress(self.ranks, chosen)),
        )


@dataclass(frozen=True, slots=True)
class TierListing:
    """Part of the content of a tier that could not list it when the stack opened.

    The tier is unusable until a :class:`TierHealth` follows the last part.
    """

    tier: int
    """Index of the tier."""
    content: TierContent = field(repr=False)
    """The next chunks."""
    is_last: bool
    """Whether the content is complete."""

    @property
    def num_keys(self) -> int:
        """Key operations that it counts as; at least 1."""
        return cdiv(len(self.content), LISTED_PER_KEY) or 1


TierReport: TypeAlias = Completion | TierHealth | TierListing
"""Report of dispatch to the manager."""
