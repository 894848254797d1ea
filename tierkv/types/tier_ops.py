"""What travels between manager and dispatch: operations on lower tiers, and their completions.

The manager decides and never waits; dispatch performs and never decides. Every operation is answered by exactly one
completion with ``ended=True``; a completion with ``ended=False`` may come before it, when the deadline passed and the
I/O still holds its slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef


class Verb(Enum):
    """What a tier is asked to do."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    PROBE = "probe"
    READ = "read"
    WRITE = "write"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class TierOp:
    """One batch for one tier.

    ``tier`` counts from 0, the first tier below the host. ``slots`` has one entry per key for READ (filled) and WRITE
    (read), and is empty otherwise. ``deadline_s`` is on the stack's clock.
    """

    op_id: int
    tier: int
    verb: Verb
    keys: tuple[Key, ...]
    slots: tuple[SlotRef, ...]
    deadline_s: float


class OutcomeKind(Enum):
    """How it went for one key."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    OK = "ok"
    ABSENT = "absent"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """A frame is there and whole, but not to be read here: no codec, no key, or an approximation."""
    FAILED = "failed"
    NO_SPACE = "no_space"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    """Not tried: queue full, breaker open, the stack is closing, or a chunk that is not for this tier."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result for one key. ``frame_bytes``: bytes at rest that were written or read and verified (0 unless OK)."""

    kind: OutcomeKind
    frame_bytes: int = 0
    error: str = ""


OK = Outcome(OutcomeKind.OK)
ABSENT = Outcome(OutcomeKind.ABSENT)


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a :class:`TierOp`: one outcome per key, in its order.

    ended: the I/O no longer touches any slot. False announces a missed deadline only.
    elapsed_s: seconds from submission to the end of the I/O, or to the missed deadline that this announces.
    """

    op_id: int
    outcomes: tuple[Outcome, ...]
    ended: bool = True
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierHealth:
    """A tier's breaker changed its mind. While not ``usable`` the tier's chunks are misses and writes are dropped."""

    tier: int
    usable: bool
    reason: str = ""
