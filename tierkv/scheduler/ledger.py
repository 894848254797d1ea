"""The account of one request while it is being written."""

from __future__ import annotations

from collections import Counter

from tierkv.types.account import RequestAccount


class Ledger:
    """Fields as in :class:`~tierkv.types.account.RequestAccount`.

    deferred_since_s: since when its lookup waits, or None.
    """

    __slots__ = (
        "deferrals", "deferred_s", "deferred_since_s", "loaded_bytes", "loaded_tokens", "local_tokens", "request_id",
        "shortened_tokens", "stored_tokens",
    )  # fmt: skip

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.local_tokens = 0
        self.loaded_tokens: Counter[str] = Counter()
        self.loaded_bytes: Counter[str] = Counter()
        self.stored_tokens = 0
        self.deferrals = 0
        self.deferred_s = 0.0
        self.deferred_since_s: float | None = None
        self.shortened_tokens = 0

    def as_account(self) -> RequestAccount:
        """As a value that no longer changes."""
        return RequestAccount(
            request_id=self.request_id,
            local_tokens=self.local_tokens,
            loaded_tokens=dict(self.loaded_tokens),
            loaded_bytes=dict(self.loaded_bytes),
            stored_tokens=self.stored_tokens,
            deferrals=self.deferrals,
            deferred_s=self.deferred_s,
            shortened_tokens=self.shortened_tokens,
        )
