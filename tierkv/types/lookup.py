"""Result of a lookup of one chunk."""

from __future__ import annotations

from enum import Enum


class LookupResult(Enum):
    """Availability of a chunk."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    HIT = "hit"
    """A tier of the stack has the chunk, and it can be loaded."""
    MISS = "miss"
    """No tier of the stack has the chunk."""
    PENDING = "pending"
    """A tier has the chunk; its bytes are being read into the host tier."""
    RETRY = "retry"
    """Not known yet: a tier is being probed; ask again in the next step."""
