"""Counters of dispatch: plain numbers, written by the engine's thread alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from tierkv.metrics.definitions import READ_SECONDS, WRITE_SECONDS
from tierkv.metrics.histogram import Histogram
from tierkv.types.tier_ops import Outcome, OutcomeKind, Verb


@dataclass(slots=True)
class TierStats:
    """Counters of one tier; none ever decreases."""

    ops: int = 0
    """Operations whose I/O has ended, or whose deadline passed before it began."""
    keys: int = 0
    """Keys of these operations."""
    bytes_read: int = 0
    """Bytes of frames that the backend read, including operations whose deadline had passed."""
    bytes_written: int = 0
    """Bytes of frames that the backend wrote, including operations whose deadline had passed."""
    bytes_verified: int = 0
    """Bytes of frames that were read, checked and accepted."""
    corrupt: int = 0
    """Keys whose frame was damaged."""
    clear: int = 0
    """Keys whose frame was in the clear although the codec conceals; corrupt unless ``accept_clear`` is set."""
    unreadable: int = 0
    """Keys whose frame is intact but cannot be decoded here."""
    failed: int = 0
    """Keys whose operation failed."""
    no_space: int = 0
    """Keys that the backend had no space for."""
    timed_out: int = 0
    """Keys whose deadline passed."""
    refused: int = 0
    """Keys that were refused without I/O."""
    unwanted: int = 0
    """Keys that were not read, because nothing waited for them any more."""
    retries: int = 0
    """Tries of a key after its first one."""
    breaker_opens: int = 0
    """Number of times the tier became unusable."""
    quarantined: int = 0
    """Damaged frames that the backend was asked to set aside."""

    def as_dict(self) -> dict[str, int]:
        """Return a copy as a dictionary."""
        return dict(zip(self.__slots__, _all_fields(self), strict=True))

    def count_op(self, keys: int) -> None:
        """Count an operation that has ended."""
        self.ops += 1
        self.keys += keys

    def count_io(self, verb: Verb, tally: Tally, retries: int) -> None:
        """Count the I/O that was done, whether or not its result is still used."""
        self.retries += retries
        if verb is Verb.READ:
            self.bytes_read += tally.frame_bytes
        elif verb is Verb.WRITE:
            self.bytes_written += tally.frame_bytes

    def count_outcomes(self, verb: Verb, tally: Tally) -> None:
        """Count the outcomes that are reported to the manager."""
        self.corrupt += tally.corrupt
        self.clear += tally.clear
        self.unreadable += tally.unreadable
        self.failed += tally.failed
        self.no_space += tally.no_space
        self.timed_out += tally.timed_out
        self.refused += tally.refused
        self.unwanted += tally.unwanted
        if verb is Verb.READ:
            self.bytes_verified += tally.frame_bytes


_all_fields = attrgetter(*TierStats.__slots__)


@dataclass(slots=True)
class DispatchStats:
    """Counters of all lower tiers, by tier number."""

    tiers: dict[int, TierStats] = field(default_factory=dict)
    """Counters of each tier."""


def io_histograms() -> dict[Verb, Histogram]:
    """Return empty histograms of seconds for one tier."""
    return {Verb.READ: Histogram(READ_SECONDS.buckets), Verb.WRITE: Histogram(WRITE_SECONDS.buckets)}


FAULTS = frozenset(
    {OutcomeKind.CORRUPT, OutcomeKind.UNREADABLE, OutcomeKind.FAILED, OutcomeKind.NO_SPACE, OutcomeKind.TIMED_OUT}
)
"""Outcomes that are logged. A refusal was decided here, and its cause is logged."""

_NO_ANSWERS = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT, OutcomeKind.UNWANTED)

NO_FAULTS: Mapping[OutcomeKind, tuple[int, str]] = MappingProxyType({})
"""Faults of an operation without any."""


class Tally(NamedTuple):
    """Counts of the outcomes of one operation. Made on I/O threads: the engine's thread only adds a few numbers."""

    answered: bool
    """Whether the backend answered for at least one key. Absent, corrupt and no space are answers."""
    frame_bytes: int
    """Bytes of all frames."""
    corrupt: int
    clear: int
    unreadable: int
    failed: int
    no_space: int
    timed_out: int
    refused: int
    unwanted: int
    faults: Mapping[OutcomeKind, tuple[int, str]] = NO_FAULTS
    """Per kind of fault: number of keys and the first error. Frames in the clear are not among them."""
    clear_reason: str = ""
    """First error of a frame in the clear; empty if there was none, or if such frames are accepted."""
    is_of_part: bool = False
    """Whether every key failed at a part of the tier that cannot be reached, while others serve."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Tally:
        """Count the outcomes of one operation."""
        counts = dict.fromkeys(OutcomeKind, 0)
        frame_bytes = clear = of_part = 0
        faults: dict[OutcomeKind, tuple[int, str]] = {}
        clear_reason = ""
        # Chunks of one length share one outcome: a batch without faults is one group.
        for _, group in groupby(outcomes, id):
            outcome, *others = group
            keys = 1 + len(others)
            counts[outcome.kind] += keys
            if outcome.is_clear:
                clear_reason = clear_reason or outcome.error
            elif outcome.kind in FAULTS:
                count, reason = faults.get(outcome.kind, (0, outcome.error))
                faults[outcome.kind] = (count + keys, reason)
            frame_bytes += keys * outcome.frame_bytes
            clear += keys * outcome.is_clear
            of_part += keys * outcome.is_of_part
        total = sum(counts.values())
        answered = total > sum(map(counts.__getitem__, _NO_ANSWERS))
        return cls(
            answered,
            frame_bytes,
            counts[OutcomeKind.CORRUPT],
            clear,
            counts[OutcomeKind.UNREADABLE],
            counts[OutcomeKind.FAILED],
            counts[OutcomeKind.NO_SPACE],
            counts[OutcomeKind.TIMED_OUT],
            counts[OutcomeKind.REFUSED],
            counts[OutcomeKind.UNWANTED],
            faults or NO_FAULTS,
            clear_reason,
            is_of_part=0 < total == of_part,
        )
