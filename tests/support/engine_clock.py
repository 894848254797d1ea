"""Clock of an engine's thread in tests."""

from __future__ import annotations

import time


class EngineClock:
    """Clock that a test moves, and the waits of the engine's thread."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass, and other threads run."""
        self.now_s += seconds
        time.sleep(0.001)
