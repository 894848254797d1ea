"""How fast a tier answers reads, measured on the reads that it does anyway. Sans-IO.

The model is a queue: a read that is asked for while ``n`` bytes, its own included, are on their way from the tier takes
``latency_s + n * s_per_byte``. So one pair of numbers holds for one read and for hundreds at once, and the wait in the
queue is in it. Each measured time is set against the expected one. Their ratio corrects both numbers, each as much as
its share of the expected time was: short reads teach the latency, long ones the bandwidth. The ratio is bounded, so one
hiccup changes little, and its root is taken, so the numbers settle.

The first numbers have nothing to be set against. So nothing is known before a few readings, and of these each faster
one is believed in full.
"""

from __future__ import annotations

REMEASURE_S = 10.0
"""Seconds without a read after which a tier may be read just to measure it."""

SLOWER_MAX, FASTER_MAX = 4.0, 16.0
"""One measurement counts as at most so much slower or faster than expected. A read may be slow by accident, hardly
fast: good news is believed sooner."""

WEIGHT = 0.5
"""Power of the ratio that one measurement applies."""

READINGS_MIN = 3
"""Readings from which a speed is known. The first ones find files unopened, connections unmade, threads not started."""

LATENCY_S_MIN, LATENCY_S_MAX = 1e-6, 3600.0
S_PER_BYTE_MIN, S_PER_BYTE_MAX = 1e-13, 1.0


class TierSpeed:
    """Reads of one tier. latency_s, s_per_byte: of the model, None until something was measured."""

    __slots__ = ("_asked_at_s", "_issued_bytes", "_promised_bytes", "_readings", "latency_s", "s_per_byte")

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.s_per_byte: float | None = None
        self._readings = 0
        self._promised_bytes = 0
        self._issued_bytes = 0
        self._asked_at_s = float("-inf")

    def promised(self, num_bytes: int, now: float) -> None:
        """So many bytes will be read."""
        self._promised_bytes += num_bytes
        self._asked_at_s = now

    def issued(self, num_bytes: int) -> int:
        """A read of that size goes out. Returns the bytes that are on their way from now on, its own included."""
        self._issued_bytes += num_bytes
        return self._issued_bytes

    def ended(self, num_bytes: int) -> None:
        """A read of that size is over, well or badly."""
        self._promised_bytes -= num_bytes
        self._issued_bytes -= num_bytes

    def measured(self, queue_bytes: int, elapsed_s: float) -> None:
        """A read that was the last of so many bytes on their way took so long."""
        if elapsed_s <= 0 or queue_bytes <= 0:
            return
        self._readings += 1
        if self.latency_s is None or self.s_per_byte is None:
            latency_s, s_per_byte = elapsed_s / 2, elapsed_s / 2 / queue_bytes
        else:
            expected_s = self.latency_s + queue_bytes * self.s_per_byte
            ratio = elapsed_s / expected_s
            if ratio < 1 and self._readings <= READINGS_MIN:
                latency_s, s_per_byte = self.latency_s * ratio, self.s_per_byte * ratio
            else:
                ratio = min(max(ratio, 1 / FASTER_MAX), SLOWER_MAX)
                share = self.latency_s / expected_s
                latency_s = self.latency_s * ratio ** (WEIGHT * share)
                s_per_byte = self.s_per_byte * ratio ** (WEIGHT * (1 - share))
        self.latency_s = min(max(latency_s, LATENCY_S_MIN), LATENCY_S_MAX)
        self.s_per_byte = min(max(s_per_byte, S_PER_BYTE_MIN), S_PER_BYTE_MAX)

    def expected(self) -> tuple[float, float] | None:
        """Seconds until the first byte of a new read, behind all that is promised, and seconds per byte; or None."""
        if self.latency_s is None or self.s_per_byte is None or self._readings < READINGS_MIN:
            return None
        return self.latency_s + self._promised_bytes * self.s_per_byte, self.s_per_byte

    def as_dict(self) -> dict[str, float]:
        """``latency_s`` and ``bytes_per_s``; empty while they are not known."""
        if self.latency_s is None or self.s_per_byte is None or self._readings < READINGS_MIN:
            return {}
        return {"latency_s": self.latency_s, "bytes_per_s": 1 / self.s_per_byte}

    def is_stale(self, now: float) -> bool:
        """Whether nothing is being read and nothing was for a while: the numbers may be of the past."""
        return not self._promised_bytes and now - self._asked_at_s >= REMEASURE_S
