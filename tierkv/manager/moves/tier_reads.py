"""Reads from one tier: chunks that are to be read, those on their way, and the speed at which they come. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.manager.lower.read_speed import TierSpeed, magnitude
from tierkv.types.geometry import batches

FRONT_CHUNKS = 255
"""Chunks at the front of a long load that are read as those of a load of that length. Other requests may share them."""


def turns(count: int, ahead: int, lacking: int) -> Iterator[tuple[range, int]]:
    """Parts of ``count`` chunks of a load that follow each other, each with the :func:`magnitude` of its turn.

    ahead: chunks of the load before them that are on their way; lacking: chunks that are not there yet, in all.
    """
    front = min(count, max(0, FRONT_CHUNKS - ahead)) if lacking > FRONT_CHUNKS else 0
    if front:
        yield range(front), magnitude(FRONT_CHUNKS)
    if front < count:
        yield range(front, count), magnitude(lacking)


class TierReads:
    """Reads from one tier, those of short loads, and the fronts of long ones, first.

    The manager knows what a request needs, so it decides the order; the queue of dispatch keeps it. Reads that dispatch
    would refuse, because too many wait there, wait here.

    Args:
        ops_max: reads in flight.
    """

    __slots__ = ("_in_flight", "_ops_max", "_waiting", "speed")

    def __init__(self, ops_max: int) -> None:
        self.speed = TierSpeed()
        """Speed of the reads."""
        self._ops_max = ops_max
        self._in_flight = 0
        self._waiting: dict[int, list[int]] = {}  # slots by the magnitude of their turn

    def __len__(self) -> int:
        """Number of chunks whose reads are not issued."""
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        """Whether there are such chunks. O(1)."""
        return bool(self._waiting)

    def put(self, slots: Sequence[int], size: int, num_bytes: int, now: float) -> None:
        """Add chunks to be read, ``num_bytes`` in all. size: magnitude of their turn."""
        self._waiting.setdefault(size, []).extend(slots)
        self.speed.promised(num_bytes, size, now)

    def take(self, keys_max: int, *, refused_max: int | None = None) -> list[tuple[Sequence[int], int]]:
        """Take the slots of the reads to issue now, of ``keys_max`` keys at most, each with the chunks of its turn.

        refused_max: keys of a tier out of service, whose reads dispatch refuses at once, so that none waits for room;
            None: the tier is in service.
        """
        reads: list[tuple[Sequence[int], int]] = []
        room = self._ops_max - self._in_flight if refused_max is None else max(1, refused_max // keys_max)
        for size in sorted(self._waiting):
            if room <= 0:
                break
            slots = self._waiting.pop(size)
            shares = batches(slots, keys_max)
            reads += [(share, (1 << size) - 1) for share in shares[:room]]
            self._in_flight += min(room, len(shares))
            if len(shares) > room:
                self._waiting[size] = [slot for share in shares[room:] for slot in share]
            room -= len(shares)
        return reads

    def ended(self, num_bytes: int, turn_chunks: int, *, whole: bool = True, delivered: bool = True) -> None:
        """Remove chunks of a read that was taken.

        whole: all that were left of it. delivered: they came or failed; False: they were not read, as unwanted.
        """
        self._in_flight -= whole
        self.speed.ended(num_bytes, magnitude(turn_chunks), delivered=delivered)
