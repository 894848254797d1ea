"""Read speed of a tier, measured on the reads that it does anyway. Sans-IO.

The model is a queue. A read during which the tier delivers ``n`` bytes, its own included, takes ``latency_s + n *
s_per_byte``. One pair of numbers holds for one read and for hundreds at once, and includes the wait in the queue. Each
measured time is compared with the expected one. Their ratio corrects both numbers, each in proportion to its share of
the expected time: short reads correct the latency, long ones the bandwidth. The ratio is bounded, so one slow read
changes little; its root is applied, so the numbers converge.

The first numbers have nothing to be compared with. No speed is known before a few readings, and among these each faster
one is taken over in full.

A tier that is avoided as slow is read only by *samples*, of one chunk. Where one is much faster than expected, the next
one follows at once. While samples are slow, their pauses grow.
"""

from __future__ import annotations

from typing import NamedTuple

REMEASURE_S_MIN, REMEASURE_S = 1.0, 10.0
"""Seconds without a read after which a tier may be read only to measure it: at first, and while it stays slow."""

CALM_S = 60.0
"""Seconds without such a read after which the pauses begin again with the shortest."""

SLOWER_MAX, FASTER_MAX = 4.0, 16.0
"""Bounds of the ratio of one measurement. Fast readings get more weight: a read is rarely fast by accident."""

WEIGHT = 0.5
"""Power of the ratio that one measurement applies."""

READINGS_MIN = 3
"""Number of readings after which a speed is known. The first ones include opening files and starting threads."""

CHANGE_MIN = 2.0
"""Factor by which a number of the model must have changed to count as another one."""

MAGNITUDES = 32
"""Number of magnitudes of a request's chunks on their way."""

LATENCY_S_MIN, LATENCY_S_MAX = 1e-6, 3600.0
S_PER_BYTE_MIN, S_PER_BYTE_MAX = 1e-13, 1.0


def magnitude(chunks: int) -> int:
    """Magnitude of a number of chunks: 0 for none, otherwise the number of its binary digits."""
    return min(chunks.bit_length(), MAGNITUDES - 1)


class ReadTimes(NamedTuple):
    """Expected times of a new read from a tier, in seconds."""

    latency_s: float
    """To its first byte, if nothing else is on its way."""
    queue_s: float
    """Of the bytes that were promised before, and are read first."""
    s_per_byte: float


class TierSpeed:
    """Speed of reads from one tier. ``latency_s`` and ``s_per_byte`` are the model, None until the first reading."""

    __slots__ = (
        "_asked_at_s", "_is_recovering", "_noted", "_pause_s", "_promised_bytes", "_readings", "ended_bytes",
        "has_missed", "latency_s", "s_per_byte", "sampled_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.s_per_byte: float | None = None
        self._readings = 0
        self._promised_bytes = [0] * MAGNITUDES
        self.ended_bytes = 0
        """Of all reads that were performed, successful or not."""
        self._asked_at_s = float("-inf")
        self.has_missed = False
        """Whether a read has missed its deadline. It may never end, so no request is kept waiting behind it."""
        self._noted = (0.0, 0.0)  # the model when it last became another one
        self.sampled_s = float("-inf")
        """Time of the latest sample."""
        self._pause_s = REMEASURE_S_MIN  # behind it
        self._is_recovering = False  # the latest read was much faster than expected

    def promised(self, num_bytes: int, magnitude: int, now: float) -> None:
        """Add bytes that will be read, for a request of this :func:`magnitude`."""
        self._promised_bytes[magnitude] += num_bytes
        self._asked_at_s = now

    def ended(self, num_bytes: int, magnitude: int, *, delivered: bool = True) -> None:
        """Remove a read that ended. delivered: it was performed, successful or not."""
        self._promised_bytes[magnitude] -= num_bytes
        self.ended_bytes += num_bytes if delivered else 0

    def sampled(self, now: float) -> None:
        """Note that the read which has just begun only measures the tier."""
        if not self._is_recovering:
            self._pause_s = min(2 * self._pause(now), REMEASURE_S)
        self._is_recovering = False
        self._asked_at_s = self.sampled_s = now

    def measured(self, num_bytes: int, elapsed_s: float, *, is_late: bool = False) -> bool:
        """Update the model by a read that took ``elapsed_s``.

        num_bytes: that the tier delivered meanwhile, its own included; is_late: it missed its deadline and runs on.

        Returns:
            Whether it became known, or quite another one, so that decisions which rely on it should be made again.
        """
        if elapsed_s <= 0 or num_bytes <= 0:
            return False
        self._readings += 1
        self.has_missed |= is_late
        if self.latency_s is None or self.s_per_byte is None:
            latency_s, s_per_byte = elapsed_s / 2, elapsed_s / 2 / num_bytes
        else:
            expected_s = self.latency_s + num_bytes * self.s_per_byte
            ratio = elapsed_s / expected_s
            self._is_recovering = ratio * CHANGE_MIN <= 1
            if ratio < 1 and self._readings <= READINGS_MIN:
                latency_s, s_per_byte = self.latency_s * ratio, self.s_per_byte * ratio
            else:
                ratio = min(max(ratio, 1 / FASTER_MAX), SLOWER_MAX)
                share = self.latency_s / expected_s
                latency_s = self.latency_s * ratio ** (WEIGHT * share)
                s_per_byte = self.s_per_byte * ratio ** (WEIGHT * (1 - share))
        self.latency_s = min(max(latency_s, LATENCY_S_MIN), LATENCY_S_MAX)
        self.s_per_byte = min(max(s_per_byte, S_PER_BYTE_MIN), S_PER_BYTE_MAX)
        before, after = self._noted, (self.latency_s, self.s_per_byte)
        if not self.is_known or all(a / CHANGE_MIN <= b <= a * CHANGE_MIN for a, b in zip(before, after, strict=True)):
            return False
        self._noted = after
        return True

    @property
    def is_known(self) -> bool:
        """Whether there were readings enough."""
        return self._readings >= READINGS_MIN

    @property
    def promised_bytes(self) -> int:
        """Bytes on their way, or soon."""
        return sum(self._promised_bytes)

    def expected(self, chunks: int) -> ReadTimes | None:
        """Times of a new read for a request that needs this number of chunks; None until known."""
        if self.latency_s is None or self.s_per_byte is None or not self.is_known:
            return None
        ahead = sum(self._promised_bytes[: magnitude(chunks) + 1])  # longer loads give way
        return ReadTimes(self.latency_s, ahead * self.s_per_byte, self.s_per_byte)

    def as_dict(self) -> dict[str, float]:
        """``latency_s`` and ``bytes_per_s``; empty until known."""
        if self.latency_s is None or self.s_per_byte is None or not self.is_known:
            return {}
        return {"latency_s": self.latency_s, "bytes_per_s": 1 / self.s_per_byte}

    def is_stale(self, now: float) -> bool:
        """Whether nothing was read for a while, or the tier was faster than expected, so the model is out of date."""
        waits = 0.0 if self._is_recovering else self._pause(now)
        return not self.promised_bytes and now - self._asked_at_s >= waits

    def _pause(self, now: float) -> float:
        """Seconds between two samples."""
        return REMEASURE_S_MIN if now - self.sampled_s >= CALM_S else self._pause_s
