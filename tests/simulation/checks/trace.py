"""What happened lately: a bounded ring of short notes, written cheaply and reported when something went wrong."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

NOTES_MAX = 120


class Trace:
    """Notes with their step and simulated time. ``step`` is set by who counts them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.step = 0
        self.count = 0
        self._notes: deque[tuple[int, float, str, tuple[Any, ...]]] = deque(maxlen=NOTES_MAX)
        self._hash = hashlib.blake2b(digest_size=8)

    def note(self, what: str, *details: Any) -> None:
        """Remember something. Details are turned into text at once: they may change later."""
        now_s = self.clock()
        words = tuple(_show(detail) for detail in details)
        self._notes.append((self.step, now_s, what, words))
        self.count += 1
        self._hash.update(f"{self.step} {now_s:.6f} {what} {words}".encode())

    @property
    def digest(self) -> str:
        """Stands for everything ever noted: equal runs have equal ones."""
        return self._hash.hexdigest()

    def lines(self) -> list[str]:
        """The ring as text, oldest first."""
        return [f"step {step:4d}  {now:9.4f} s  {what} {' '.join(words)}" for step, now, what, words in self._notes]


def _show(value: object) -> str:
    if isinstance(value, bytes):
        return value[-8:].hex()  # group and the end of the hash
    if isinstance(value, tuple | list):
        return "[" + " ".join(_show(item) for item in value) + "]"
    return str(value)
