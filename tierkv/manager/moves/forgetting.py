"""Removal of given chunks from every tier: they expire at once, and later steps delete them."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.errors import EngineProtocolError
from tierkv.manager.lower.row_table import DELETING
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.retention import Retention
from tierkv.manager.step_state import StepState
from tierkv.types.keys import Key


class Forgetting:
    """Chunks that a caller wants gone. Sans-IO, single-threaded; O(1) per key.

    An expired chunk counts as absent, and is deleted in every tier where nothing uses it
    (:class:`~tierkv.manager.moves.retention.Retention`). A shared tier has no index that names its chunks, so it is
    asked to delete each of them.
    """

    def __init__(self, tiers: TierList, retention: Retention, step: StepState) -> None:
        self._tiers = tiers
        self._retention = retention
        self._step = step
        self._wanted: set[Key] = set()

    def forget(self, keys: Sequence[Key]) -> None:
        """Make chunks absent now. Storing one of them again ends that.

        Raises:
            EngineProtocolError: a tier is read-only; nothing has changed.
        """
        for tier in self._tiers.in_service:
            if tier.capabilities.read_only or not tier.limits.writes:
                raise EngineProtocolError(
                    f"tier {tier.name!r} is read-only, so its chunks cannot be removed by this stack. Remove them "
                    "where they are written, or change namespace.epoch"
                )
        self._retention.end_now(keys, self._step.now)
        for tier in self._tiers.in_service:
            if not tier.capabilities.authoritative_index:
                for key in keys:
                    tier.residency.schedule_delete(key)
        self._wanted.update(keys)
        self._step.version += 1

    @property
    def num_pending(self) -> int:
        """Number of these chunks that a tier may still hold."""
        lifetimes, tiers = self._retention.lifetimes, self._tiers.in_service
        self._wanted = {
            key
            for key in self._wanted
            if key in lifetimes or any(tier.residency.rows.flags_of(key) & DELETING for tier in tiers)
        }
        return len(self._wanted)
