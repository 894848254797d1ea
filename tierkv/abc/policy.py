"""The eviction policy interface: in which order chunks leave a tier, and which may come in.

A policy knows chunks by *handles*: small whole numbers without gaps, that the tier hands out and uses again. So a
policy keeps what it knows in columns, not in an object per chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from tierkv.types.keys import Key


class EvictionPolicy(Protocol):
    """Orders the readable chunks of one tier. Pure and single-threaded: all verbs run on the engine's thread.

    Each verb takes a batch, O(1) amortised per handle, and no verb takes over 1 ms for a batch of 128 at a million
    handles. So keep no dict of a million entries, which stops to rebuild itself, and no list of them, which every full
    garbage collection walks; an ``array`` or a ``memoryview`` does neither.

    Handles are below the number that the policy was opened with; where that was None, or frames at rest are smaller
    than at most, higher ones may come. A batch never names a handle twice. Every handle in it is known, except in
    :meth:`add`, where none is.
    """

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Chunks became readable, the last one most recently. Their keys are told only here.

        Some may be held already. A key may have been here before: a policy that remembers what left sees it by its key.
        """

    def touch(self, handles: Sequence[int]) -> None:
        """A request used these; tail first, so that the head of a prefix outlives its tail (S54).

        The request that brought a chunk tells so too, when it ends: the first use after :meth:`add` is most likely its
        own, and says nothing about others.
        """

    def release(self, handles: Sequence[int]) -> None:
        """No request holds any of these any more; tail first. A hold is I/O or a request that was to load it.

        A policy of recency takes that for a use. One that counts uses hears of them by :meth:`touch`. A write to a tier
        below may still hold some.
        """

    def remove(self, handles: Sequence[int]) -> None:
        """These are gone for another reason than this policy's choice: damaged, deleted, or the cache was emptied."""

    def evict(self, count: int, pins: Sequence[int]) -> Sequence[int]:
        """Choose ``count`` victims and forget them, the first to leave first.

        ``pins[handle]`` is above 0 for what may not be chosen now: such a handle stays known. At least ``count``
        handles are not held.

        Returns:
            Exactly ``count`` handles; or none, with nothing forgotten: not now, ask again (finding them would take too
            long). Then the store is offered again in a later step.
        """

    def __len__(self) -> int:
        """How many handles are known, held or not."""


@runtime_checkable
class AdmissionPolicy(Protocol):
    """An ability of some policies: to say that a newcomer is worth less than what would leave for it."""

    def refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        """Which of ``keys`` shall not come in, as positions in it.

        Asked before stores and cascades, never for what a request waits for. ``free``: how many could come in without
        anything leaving.
        """


@runtime_checkable
class WriteAwarePolicy(Protocol):
    """An ability of some policies: to tell the end of a write to a tier below from a use."""

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Writes that held these have ended, and nobody holds them any more. Their order is what it would be without.

        So there is nothing to do but for those that a choice passed over meanwhile: they are the next to leave, the
        first one first. A policy that lacks this verb is told :meth:`EvictionPolicy.release` instead.
        """
