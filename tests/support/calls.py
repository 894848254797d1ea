"""Calls counted on one thread, for promises about what a call costs whatever the amount of state."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls_of(function: Callable[..., object], *arguments: object) -> int:
    """Number of calls of functions, Python and C, in a call, that call included.

    The garbage collector is off meanwhile: whatever it would finalize, and every callback of a library on its passes,
    would count as a call of the function under test.
    """
    calls = 0

    def count(_frame: FrameType, event: str, _called: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    return calls


class CountedKey(bytes):
    """Key that counts how often it is looked up, also by code that makes no call per key."""

    looked_up = 0

    def __hash__(self) -> int:
        """Hash of the key, counted."""
        CountedKey.looked_up += 1
        return super().__hash__()

    __eq__ = bytes.__eq__


def lookups_of(function: Callable[..., object], *arguments: object) -> int:
    """Number of lookups of keys in a call whose arguments name chunks by :class:`CountedKey`."""
    CountedKey.looked_up = 0
    function(*arguments)
    return CountedKey.looked_up
