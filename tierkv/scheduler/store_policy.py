"""Which store policy a request has: what it says itself, else what the stack says (spec, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierkv.scheduler.limits import StorePolicy


def store_policy(kv_transfer_params: Mapping[str, Any], default: StorePolicy) -> StorePolicy:
    """``do_remote_decode`` true asks for REQUEST_LEVEL: another engine will go on from what this one leaves."""
    return StorePolicy.REQUEST_LEVEL if kv_transfer_params.get("do_remote_decode") is True else default
