"""Room of a tier whose backend reports that it is full below the tier's capacity, such as on a disk that is too small.

A refusal that stays alone is a fault that has passed, and costs one eviction. After a second one, the bytes stored at
that moment become the tier's room, so that chunks are evicted in time, instead of one per refused write. Room is won
back in steps: if the backend takes more, the next step follows at once and is twice as long. After a refusal it is the
shortest.

A refusal may have a cause that no eviction removes, such as a file system that copies on write and is full of the files
of others. So evictions that make no room end after some frames, and go on after a while.
"""

from __future__ import annotations

import math

RETRY_S = 10.0
"""Seconds after a refusal until the next step, and after a step that no write has used. A refusal that no other one
follows in this time stays alone."""
USED_RETRY_S = 1.0
"""Seconds after a step until the next one, if the backend holds more than before the step."""
STEP_FRAMES = 8
"""Frames of the shortest step and of the least room: each of them may be refused."""
EVICTED_FRAMES_MAX = 64
"""Frames that are evicted without effect within ``RETRY_S``: the rest is kept, and can be read."""


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
        self._first_s = -math.inf  # of a refusal that may stay alone
        self._since_s = 0.0  # of the latest refusal or step
        self._held_bytes = math.inf  # room before the latest step
        self._full_bytes = -1
        self._full_until_s = 0.0

    def refused(self, used_bytes: int, frame_bytes: int, now: float) -> bool:
        """Note that the backend has no room for a frame.

        Args:
            used_bytes: bytes of the stored frames.
            frame_bytes: upper bound for the frame. Some such frames are always tried, to notice the end of a full disk.
            now: time in seconds.

        Returns:
            Whether an eviction may make room.
        """
        if used_bytes > self._full_bytes or now >= self._full_until_s:
            self._full_bytes, self._full_until_s = used_bytes, now + RETRY_S
        kept = self._full_bytes - EVICTED_FRAMES_MAX * frame_bytes
        if now >= self._first_s + RETRY_S:
            self._first_s = now
        if self.bytes == self._capacity_bytes and now == self._first_s:  # one fault fails all frames of an operation
            return used_bytes > kept
        known = max(used_bytes, kept)
        self._step_bytes = STEP_FRAMES * frame_bytes
        room = max(known if self.bytes is None else min(self.bytes, known), self._step_bytes)
        self.bytes = room if self._capacity_bytes is None else min(room, self._capacity_bytes)
        self._since_s, self._held_bytes = now, math.inf
        return used_bytes > kept

    def retry(self, used_bytes: int, now: float) -> None:
        """Allow one step more if it is due. used_bytes: bytes of the stored frames."""
        if self.bytes is None or self.bytes == self._capacity_bytes:
            return
        if now < self._since_s + (USED_RETRY_S if used_bytes > self._held_bytes else RETRY_S):
            return
        self._since_s, self._held_bytes = now, self.bytes
        room = self.bytes + self._step_bytes
        self.bytes = room if self._capacity_bytes is None else min(room, self._capacity_bytes)
        self._step_bytes *= 2
