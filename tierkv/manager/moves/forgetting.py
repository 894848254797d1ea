"""Removal of given chunks from every tier: they expire at once, and later steps delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tierkv.errors import EngineProtocolError
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.retention import Retention
from tierkv.manager.step_budget import KEYS_PER_LOOK, BudgetShare
from tierkv.manager.step_state import StepState
from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key


class Forgetting:
    """Chunks that a caller wants gone. Sans-IO, single-threaded; O(1) per key.

    An expired chunk counts as absent, and is deleted in every tier where nothing uses it
    (:class:`~tierkv.manager.moves.retention.Retention`). A shared tier has no index that names its chunks, so it is
    asked to delete each of them.

    Args:
        tiers: the tiers below.
        retention: lets the chunks expire.
        step: the current step.
        share: key operations of the step.
    """

    def __init__(self, tiers: TierList, retention: Retention, step: StepState, share: BudgetShare) -> None:
        self._tiers = tiers
        self._retention = retention
        self._step = step
        self._share = share

    def forget(self, keys: Iterable[Key], count: int) -> None:
        """Make chunks absent. Storing one of them again ends that.

        Those of a long prompt that are behind the first ones follow in later steps. With full attention, none of them
        is found any more: a hit begins with the first chunk.

        Args:
            keys: of a prompt, from the front on; they are taken when they are needed.
            count: number of them.

        Raises:
            EngineProtocolError: a tier is read-only; nothing has changed.
        """
        for tier in self._tiers.in_service:
            if tier.capabilities.read_only or not tier.limits.writes:
                raise EngineProtocolError(
                    f"tier {tier.name!r} is read-only, so its chunks cannot be removed by this stack. Remove them "
                    "where they are written, or change namespace.epoch"
                )
        self._retention.end_now(keys, count, self._step.budget.looks_max)
        self._step.version += 1

    def begin_some(self, remove: Callable[[Key], bool], per_key: int) -> None:
        """Delete some of these chunks, as many as the budget allows, and one in any case.

        remove: deletes an expired chunk where this stack knows that it is. Returns whether it is gone from every tier.
        per_key: key operations that this costs.
        """
        share = self._share
        share.take(cdiv(self._retention.end_more(KEYS_PER_LOOK * max(1, share.left // 2)), KEYS_PER_LOOK))
        shared = [tier for tier in self._tiers.in_service if not tier.capabilities.authoritative_index]

        def delete(key: Key) -> bool:
            for tier in shared:
                tier.residency.schedule_delete(key)
            return remove(key)

        share.take(per_key * self._retention.begin_ends(max(1, share.left // per_key), delete))

    @property
    def num_pending(self) -> int:
        """Number of these chunks that a tier may still hold."""
        return self._retention.num_ended
