"""What the scheduler says to the manager and hears back, beside keys (spec, section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

ResetScope = Literal["host", "all"]
"""What a reset empties: the host tier, or every tier."""

HOST = "host"
"""Name of the host tier in events and accounts."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Who asks. ``kv_transfer_params``: what the engine's user attached; ``hints``: what we read in it."""

    request_id: str
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)
    hints: RequestHints = NO_HINTS


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """Answer to ``prepare_store``: the keys to store, in order, each with its slot, and what was evicted for them."""

    keys: tuple[Key, ...]
    slots: tuple[SlotRef, ...]
    evicted: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class LoadGrant:
    """Answer to ``prepare_load``: each key's slot, held until ``complete_load``, and the tier its bytes came from."""

    keys: tuple[Key, ...]
    slots: tuple[SlotRef, ...]
    sources: tuple[str, ...]
