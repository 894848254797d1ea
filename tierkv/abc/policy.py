"""Eviction policy interface: the order in which chunks are evicted from a tier, and which chunks are admitted.

A policy knows chunks by *handles*: small whole numbers without gaps, which the tier assigns and reuses. So a policy
keeps its data in columns instead of one object per chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from tierkv.types.keys import Key


class EvictionPolicy(Protocol):
    """Order of the readable chunks of one tier. Pure and single-threaded: all verbs run on the engine's thread.

    Each verb takes a batch and costs O(1) amortised per handle. At a million handles, no verb may take over 1 ms for a
    batch of 128. So avoid a dict of a million entries, which stalls when it grows, and a list of a million objects,
    which every full garbage collection walks. An ``array`` or a ``memoryview`` has neither cost.

    Handles are below the number that the policy was opened with. Higher handles may occur where that number was None,
    or where stored frames are shorter than the maximum. A batch never contains a handle twice. Every handle in a
    batch is known to the policy, except in :meth:`add`, where none is.
    """

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Add chunks that became readable, the last one most recently. Only this verb passes their keys.

        Some of the chunks may be pinned already. A key may have been in the tier before: a policy that remembers
        evicted chunks recognises it by the key.
        """

    def touch(self, handles: Sequence[int]) -> None:
        """Note that a request used these chunks.

        The tail of a path comes first, so that the head of a prefix stays longest (S54).

        The request that stored a chunk also touches it when it ends. So the first touch after :meth:`add` is most
        likely that request's own, and says nothing about other requests.
        """

    def release(self, handles: Sequence[int]) -> None:
        """Note that no request pins these chunks any more, tail first. I/O and reservations of requests pin chunks.

        A policy of recency treats this as a use. A policy that counts uses waits for :meth:`touch`. A write to a lower
        tier may still pin some of the chunks.
        """

    def remove(self, handles: Sequence[int]) -> None:
        """Remove chunks that left without this policy's choice: damaged, deleted, or the cache was emptied."""

    def evict(self, count: int, pins: Sequence[int]) -> Sequence[int]:
        """Choose ``count`` victims and forget them, the first to be evicted first.

        Args:
            count: number of victims. At least this many known handles are unpinned.
            pins: number of pins by handle. A handle with ``pins[handle] > 0`` must not be chosen and stays known.

        Returns:
            Exactly ``count`` handles; or none, with nothing forgotten, where the search would take too long. The store
            is then offered again in a later step.
        """

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Ability to refuse a new chunk that is worth less than the chunk that would be evicted for it."""

    def refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        """Return the chunks that must not be admitted, as positions in ``keys``.

        Called before stores and cascades, never for chunks that a request waits for.

        Args:
            keys: keys of the new chunks.
            free: number of chunks that fit without an eviction.
        """


@runtime_checkable
class WriteAwarePolicy(Protocol):
    """Ability to tell the end of a write to a lower tier from a use."""

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Restore the order of chunks after writes that pinned them have ended, with no pin left.

        The order must be the one without these writes. So only chunks that a choice passed over meanwhile are affected:
        they are evicted next, the first one first. A policy without this verb gets :meth:`EvictionPolicy.release`
        instead.
        """


@runtime_checkable
class PrefixAwarePolicy(Protocol):
    """Ability to keep the head of a prefix longer than its tail, although the tail is stored later.

    A chunk serves no request without the chunks before it. A long prompt is stored in several batches, the head first.
    With :meth:`EvictionPolicy.add` alone, a policy of recency would evict the head for the tail.
    """

    def add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int) -> None:
        """Add chunks as :meth:`EvictionPolicy.add` does, and evict them before ``behind``.

        Args:
            handles: chunks of one prefix, tail first.
            keys: their keys.
            behind: known handle of the chunk before them in the prefix.
        """

    def evict_before(self, count: int, pins: Sequence[int], stop: int) -> Sequence[int]:
        """Choose up to ``count`` victims as :meth:`EvictionPolicy.evict` does, and end before ``stop``.

        ``stop`` is the last chunk of the prefix that the room is for. To evict it would cost more than the room is
        worth.

        Returns:
            Fewer than ``count`` handles if ``stop`` is the next one, or if the search would take too long.
        """
