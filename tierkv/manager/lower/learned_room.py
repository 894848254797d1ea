"""Room of a tier whose backend reports that it is full below the tier's capacity, such as on a disk that is too small.

The bytes stored at that moment become the tier's room, so that chunks are evicted in time, instead of one per refused
write. Room is won back in steps: if the backend takes more, the next step is twice as long, and otherwise the shortest.
"""

from __future__ import annotations

RETRY_S = 10.0
"""Seconds after a refusal, or after a step, until the next step."""
STEP_FRAMES = 8
"""Frames of the shortest step and of the least room: each of them may be refused."""


class LearnedRoom:
    """Room of one tier in bytes. Sans-IO, single-threaded; O(1).

    Args:
        capacity_bytes: the tier's capacity; None: no bound.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self.bytes = capacity_bytes
        """Bytes that the tier may hold at present; None: no bound."""
        self._capacity_bytes = capacity_bytes
        self._step_bytes = 0
        self._again_s = 0.0

    @property
    def is_learned(self) -> bool:
        """Whether the room is less than the capacity."""
        return self.bytes != self._capacity_bytes

    def refused(self, used_bytes: int, frame_bytes: int, now: float) -> None:
        """Note that the backend has no room for a frame.

        Args:
            used_bytes: bytes of the stored frames.
            frame_bytes: upper bound for the frame. Some such frames are always tried, to notice the end of a full disk.
            now: time in seconds.
        """
        known = used_bytes if self.bytes is None else min(self.bytes, used_bytes)
        self._step_bytes = STEP_FRAMES * frame_bytes
        room = max(known, self._step_bytes)
        self.bytes = room if self._capacity_bytes is None else min(room, self._capacity_bytes)
        self._again_s = now + RETRY_S

    def retry(self, now: float) -> None:
        """Allow one step more if it is due."""
        if self.bytes is None or not self.is_learned or now < self._again_s:
            return
        room = self.bytes + self._step_bytes
        self.bytes = room if self._capacity_bytes is None else min(room, self._capacity_bytes)
        self._step_bytes *= 2
        self._again_s = now + RETRY_S
