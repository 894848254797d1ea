"""Values that the scheduler exchanges with the manager, besides keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

ResetScope = Literal["host", "all"]
"""Tiers that a reset empties: the host tier, or every tier."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Identity and hints of the request on whose behalf a call is made."""

    request_id: str
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the engine's user attached to the request."""
    hints: RequestHints = NO_HINTS
    """Hints read from these parameters."""
    asked_s: float = math.inf
    """Time since when its lookup is open, on the stack's clock. Answers of shared tiers since then count for it, also
    if they have expired. Otherwise an engine that asks rarely would never see one that is not."""
    number: int = 0
    """Number of the request. An engine may use an id again once its request has finished; the next one has another
    number."""

    def asked_at(self, asked_s: float) -> RequestContext:
        """Return the same context for a lookup that is open since ``asked_s``."""
        return RequestContext(self.request_id, self.kv_transfer_params, self.hints, asked_s, self.number)


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """Answer to ``prepare_store``."""

    keys: tuple[Key, ...]
    """Keys to store, in order."""
    slots: tuple[SlotRef, ...]
    """Lease on a slot for each key."""
    evicted: tuple[Key, ...]
    """Keys that were evicted to make room."""
    reading: frozenset[Key] = frozenset()
    """Other keys of the offer, which a tier is still being read for: they are lost if that fails."""


@dataclass(frozen=True, slots=True)
class LoadGrant:
    """Answer to ``prepare_load``."""

    keys: tuple[Key, ...]
    slots: tuple[SlotRef, ...]
    """Lease on the slot of each key, held until ``complete_load``."""
    sources: tuple[str, ...]
    """Tier that the bytes of each key came from."""
