"""Cache events: chunks that became available or unavailable in a tier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tierkv.types.keys import Key

HOST = "host"
"""Name of the host tier in events, accounts, metrics and messages. No other tier may have it."""


class CacheEventKind(Enum):
    """Change that an event reports."""

    STORED = "stored"
    """The chunks became readable in the tier."""
    REMOVED = "removed"
    """The chunks were removed from the tier."""
    CLEARED = "cleared"
    """The tier was emptied."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Change of some chunks in one tier."""

    kind: CacheEventKind
    """The change."""
    tier: str
    """Configured name of the tier; :data:`HOST` for the host tier."""
    keys: tuple[Key, ...]
    """Keys of the chunks; empty for CLEARED."""
