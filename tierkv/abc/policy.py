"""The eviction policy interface: in which order chunks leave a tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tierkv.types.keys import Key


class EvictionPolicy(Protocol):
    """Orders the evictable chunks of one tier. Pure and single-threaded; each verb O(1) amortised.

    A resident chunk is either *evictable* or *held* (pinned, or in the middle of I/O). The manager tells which.
    """

    def add(self, key: Key) -> None:
        """A chunk became resident, and evictable."""

    def hold(self, key: Key) -> None:
        """A resident chunk must not be chosen until released."""

    def release(self, key: Key) -> None:
        """A held chunk is evictable again; it was just used."""

    def touch(self, keys: Iterable[Key]) -> None:
        """These were used, given tail first so that the head of a prefix outlives its tail (S54).

        Unknown keys and held keys are ignored (S55).
        """

    def remove(self, key: Key) -> None:
        """A resident chunk is gone for another reason than this policy's choice. Unknown keys are ignored."""

    def evict(self) -> Key | None:
        """Choose and forget the next victim, or None if nothing is evictable."""

    def __len__(self) -> int:
        """How many chunks are evictable."""
