"""Keeper of tokens: the interface through which snapshots outlive the process, and its twin that keeps nothing."""

from __future__ import annotations

from typing import Protocol

from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.keys import Key


class TokenKeeper(Protocol):
    """Receiver of snapshots. Engine's thread; no method but ``close`` waits.

    ``keep``, ``forget`` and ``hand_over`` are called only where ``is_kept`` is true.
    """

    @property
    def is_kept(self) -> bool:
        """Whether anything is kept. Constant."""

    def keep(self, key: Key, snapshot: Snapshot) -> None:
        """Keep the snapshot of a chunk."""

    def forget(self, key: Key) -> None:
        """Delete the snapshot of a chunk that no tier holds any more."""

    def hand_over(self) -> None:
        """Pass the changes since the previous call to the writer."""

    def close(self, timeout_s: float) -> None:
        """Write what is pending, within ``timeout_s``. Idempotent."""


class NoKeeper:
    """Keeper of a stack whose description names no file."""

    is_kept = False

    def keep(self, key: Key, snapshot: Snapshot) -> None:
        """Keep nothing."""

    def forget(self, key: Key) -> None:
        """Delete nothing."""

    def hand_over(self) -> None:
        """Pass nothing on."""

    def close(self, timeout_s: float) -> None:
        """Do nothing."""
