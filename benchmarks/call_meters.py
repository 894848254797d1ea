"""Meters of calls on this thread: function calls, or processor time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Calls:
    """Calls of some parts of a round, in order."""

    python: int = 0
    """Calls of Python functions."""
    c: int = 0
    """Calls of C functions."""
    engine: int = 0
    """Calls that the engine itself made."""
    ignored: frozenset[CodeType] = frozenset()
    """Python functions whose own calls are not counted, such as those of a meter."""

    @property
    def total(self) -> int:
        """Python and C together."""
        return self.python + self.c

    def of(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function, and count it with every call that it makes on this thread."""

        def count(frame: FrameType, event: str, called: object) -> None:
            if event == "call":
                self.python += frame.f_code not in self.ignored
            elif event == "c_call" and called is not sys.setprofile:
                self.c += 1

        self.engine += 1
        sys.setprofile(count)
        try:
            return function(*arguments, **named)
        finally:
            sys.setprofile(None)


@dataclass(slots=True)
class CallTimes:
    """Processor time of this thread in some parts of a round, as :class:`Calls` counts them."""

    total: float = 0.0
    """Microseconds."""

    def of(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function, and add its time."""
        cpu_s = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            self.total += 1e6 * (time.thread_time() - cpu_s)
