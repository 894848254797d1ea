"""The answer to "is this chunk there?", with its reason."""

from __future__ import annotations

from enum import Enum


class LookupResult(Enum):
    """Where a chunk stands. Plugins may say True, False or None instead: see :func:`as_lookup_result`."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    HIT = "hit"
    """It is somewhere in the stack and can be had."""
    MISS = "miss"
    """It is nowhere in the stack."""
    PENDING = "pending"
    """It is in the stack but its bytes are still on their way into the host tier."""
    RETRY = "retry"
    """Not known yet: a tier was asked; ask again next step."""


def as_lookup_result(answer: LookupResult | bool | None) -> LookupResult:  # noqa: FBT001 - the value itself
    """Normalise what a plugin may say: True is HIT, False is MISS, None is RETRY."""
    if isinstance(answer, LookupResult):
        return answer
    if answer is None:
        return LookupResult.RETRY
    return LookupResult.HIT if answer else LookupResult.MISS
