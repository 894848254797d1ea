"""The answer to "is this chunk there?", with its reason."""

from __future__ import annotations

from enum import Enum


class LookupResult(Enum):
    """Where a chunk stands."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    HIT = "hit"
    """It is somewhere in the stack and can be had."""
    MISS = "miss"
    """It is nowhere in the stack."""
    PENDING = "pending"
    """It is in the stack but its bytes are still on their way into the host tier."""
    RETRY = "retry"
    """Not known yet: a tier was asked; ask again next step."""
