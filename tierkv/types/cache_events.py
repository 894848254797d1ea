"""Public notices of what became available or unavailable, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tierkv.types.keys import Key


class CacheEventKind(Enum):
    """What happened to the keys of an event."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Some chunks became readable in, or left, one tier (``tier`` is its configured name; "host" for the arena)."""

    kind: CacheEventKind
    tier: str
    keys: tuple[Key, ...]
