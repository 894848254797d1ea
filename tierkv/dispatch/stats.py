"""Counters of the I/O shell: plain numbers, written by the engine's thread alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tierkv.metrics.definitions import READ_SECONDS, WRITE_SECONDS
from tierkv.metrics.histogram import Histogram
from tierkv.types.tier_ops import Outcome, OutcomeKind, Verb


@dataclass(slots=True)
class TierStats:
    """Counters of one tier; all only grow.

    ops, keys: operations whose I/O has ended (or was given up before it began), and their keys.
    bytes_read, bytes_written: bytes of frames that the backend moved, also for operations whose deadline had passed.
    bytes_verified: bytes of frames that were read, checked and accepted.
    corrupt, unreadable, failed, no_space, timed_out, refused: keys with that outcome.
    retries: further tries of a key.
    breaker_opens: how often the tier was found unusable.
    """

    ops: int = 0
    keys: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_verified: int = 0
    corrupt: int = 0
    unreadable: int = 0
    failed: int = 0
    no_space: int = 0
    timed_out: int = 0
    refused: int = 0
    retries: int = 0
    breaker_opens: int = 0

    def as_dict(self) -> dict[str, int]:
        """A copy, field by field."""
        return {name: getattr(self, name) for name in self.__slots__}

    def count_io(self, verb: Verb, tally: Tally, retries: int) -> None:
        """Count what was done, whether or not anybody still wants it."""
        self.retries += retries
        if verb is Verb.READ:
            self.bytes_read += tally.frame_bytes
        elif verb is Verb.WRITE:
            self.bytes_written += tally.frame_bytes

    def count_outcomes(self, verb: Verb, tally: Tally) -> None:
        """Count what the manager is told."""
        self.corrupt += tally.corrupt
        self.unreadable += tally.unreadable
        self.failed += tally.failed
        self.no_space += tally.no_space
        self.timed_out += tally.timed_out
        self.refused += tally.refused
        if verb is Verb.READ:
            self.bytes_verified += tally.frame_bytes


@dataclass(slots=True)
class DispatchStats:
    """Counters of all lower tiers, by their numbers.

    seconds: per tier, how long its reads and writes took from their submission on.
    """

    tiers: dict[int, TierStats] = field(default_factory=dict)
    seconds: dict[int, dict[Verb, Histogram]] = field(default_factory=dict)


def io_histograms() -> dict[Verb, Histogram]:
    """Empty ones, for one tier."""
    return {Verb.READ: Histogram(READ_SECONDS.buckets), Verb.WRITE: Histogram(WRITE_SECONDS.buckets)}


class Tally(NamedTuple):
    """Outcomes of one operation, counted. Made on I/O threads, so that the engine's thread adds a few numbers only.

    answered: whether the tier did its part for at least one key. Absent, corrupt and full are answers.
    """

    answered: bool
    frame_bytes: int
    corrupt: int
    unreadable: int
    failed: int
    no_space: int
    timed_out: int
    refused: int

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Tally:
        """Count."""
        counts = dict.fromkeys(OutcomeKind, 0)
        frame_bytes = 0
        for outcome in outcomes:
            counts[outcome.kind] += 1
            frame_bytes += outcome.frame_bytes
        answered = sum(counts.values()) > counts[OutcomeKind.FAILED] + counts[OutcomeKind.TIMED_OUT]
        return cls(
            answered,
            frame_bytes,
            counts[OutcomeKind.CORRUPT],
            counts[OutcomeKind.UNREADABLE],
            counts[OutcomeKind.FAILED],
            counts[OutcomeKind.NO_SPACE],
            counts[OutcomeKind.TIMED_OUT],
            counts[OutcomeKind.REFUSED],
        )
