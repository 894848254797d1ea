"""Chunks of one tier that its policy may evict: the policy, the order of prefixes, quotas, and a count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.abc import EvictionPolicy, WriteAwarePolicy
from tierkv.policies.prefix_order import PrefixOrder
from tierkv.policies.quotas import TRIMMED_MAX, TenantPolicy
from tierkv.types.keys import Key


class EvictionList:
    """Chunks that the policy of one tier knows: they are *listed*. Those without pins are *evictable*.

    Sans-IO, single-threaded. The owner keeps the column of pins. It changes :attr:`evictable` when a listed chunk gets
    its first pin or loses its last one, because these loops are the hottest ones.

    Args:
        policy: decides the eviction order.
        key_of: key of the chunk of a handle.
        ranks: as in :class:`~tierkv.policies.prefix_order.PrefixOrder`.
    """

    __slots__ = ("evictable", "order", "policy", "release_after_write", "tenants")

    def __init__(
        self, policy: EvictionPolicy, key_of: Callable[[int], Key], ranks: memoryview[int] | None = None
    ) -> None:
        self.policy = policy
        """Policy that decides the eviction order."""
        self.order = PrefixOrder(policy, key_of, ranks)
        """Order in which chunks of one prompt enter the policy. Its ``evict`` does not keep :attr:`evictable`."""
        self.release_after_write = (
            policy.release_after_write if isinstance(policy, WriteAwarePolicy) else policy.release
        )
        """Release chunks from pins of writes, which do not count as use where the policy can tell."""
        self.evictable = 0
        """Number of listed chunks without pins."""
        self.tenants = policy if isinstance(policy, TenantPolicy) else None
        """The policy where it keeps quotas of tenants, otherwise None."""

    def remove(self, handles: Sequence[int]) -> None:
        """Remove chunks that must not be evicted, or are gone. The caller keeps :attr:`evictable`."""
        self.order.forget(handles)
        self.policy.remove(handles)

    def evict(self, count: int, pins: Sequence[int], rank: int = 0) -> Sequence[int]:
        """Choose and remove victims.

        Args:
            count: number of victims.
            pins: number of pins by handle.
            rank: of the chunk that needs the room (:mod:`tierkv.policies.prefix_order`); 0: unknown.

        Returns:
            ``count`` handles, or none; for a chunk that continues a prefix, perhaps fewer.
        """
        victims = self.order.evict(count, pins, rank) if 0 < count <= self.evictable else ()
        self.evictable -= len(victims)
        return victims

    def evict_over_quota(self, pins: Sequence[int], victims_max: int = TRIMMED_MAX) -> Sequence[int]:
        """Choose and remove some victims of tenants that are over their quotas."""
        victims = () if self.tenants is None else self.tenants.trim(pins, victims_max)
        self.evictable -= len(victims)
        self.order.evicted(victims)
        return victims
