"""A thread that runs only when the test steps it: a disk that hangs, and answers again."""

from __future__ import annotations

from typing import Any

from tierkv.dispatch.threads.spawn import Runner


class HandThread:
    """Spawn of one runner, which works when the test calls ``step``, or waits for its end."""

    def __init__(self) -> None:
        self.runner: Any = None

    def __call__(self, name: str, runner: Runner) -> HandThread:
        self.runner = runner
        return self

    def is_alive(self) -> bool:
        """Alive until it is closed."""
        while self.runner.step():
            pass
        return not self.runner.done
