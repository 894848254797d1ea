"""Pauses of Python's garbage collector: part of the duration of a call, and visible only from inside."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pauses:
    """Collections that happened while watching.

    Attributes:
        total_s, longest_s: seconds, so far.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.longest_s = 0.0
        self._began_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch collections."""
        gc.callbacks.append(self._on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
            return
        took_s = time.perf_counter() - self._began_s
        self.total_s += took_s
        self.longest_s = max(self.longest_s, took_s)
