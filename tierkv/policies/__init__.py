"""Eviction policies that come with tierkv."""

from __future__ import annotations

from tierkv.abc.plugin import PolicyPlugin
from tierkv.abc.policy import EvictionPolicy
from tierkv.policies.lru import LruPolicy


def _open_lru(chunks_max: int | None) -> EvictionPolicy:
    return LruPolicy(chunks_max)


POLICY_PLUGINS: tuple[PolicyPlugin, ...] = (
    PolicyPlugin(name="lru", summary="Evict what was not used for the longest time.", open=_open_lru),
)
"""What :func:`tierkv.hookspecs.tierkv_policies` returns for tierkv itself."""
