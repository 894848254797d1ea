"""Trace: a bounded ring of short notes, reported with a violation, and a digest of all notes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

NOTES_MAX = 120


class Trace:
    """Notes with their step and simulated time. The world sets ``step``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.step = 0
        self.count = 0
        self._notes: deque[tuple[int, float, str, tuple[Any, ...]]] = deque(maxlen=NOTES_MAX)
        self._hash = hashlib.blake2b(digest_size=8)

    def note(self, what: str, *details: Any) -> None:
        """Add a note. Details are turned into text at once: they may change later."""
        now_s = self.clock()
        words = tuple(_show(detail) for detail in details)
        self._notes.append((self.step, now_s, what, words))
        self.count += 1
        self._hash.update(f"{self.step} {now_s:.6f} {what} {words}".encode())

    @property
    def digest(self) -> str:
        """Digest of all notes: equal runs have equal ones."""
        return self._hash.hexdigest()

    def lines(self) -> list[str]:
        """Notes of the ring as text, oldest first."""
        return [f"step {step:4d}  {now:9.4f} s  {what} {' '.join(words)}" for step, now, what, words in self._notes]


def _show(value: object) -> str:
    if isinstance(value, bytes):
        return value[-8:].hex()  # group and the end of the hash
    if isinstance(value, tuple | list):
        return "[" + " ".join(_show(item) for item in value) + "]"
    return str(value)
