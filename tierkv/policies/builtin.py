"""List of the built-in eviction policies."""

from __future__ import annotations

from tierkv.abc.plugin import PolicyPlugin
from tierkv.abc.policy import EvictionPolicy
from tierkv.policies.adaptive.policy import AdaptivePolicy
from tierkv.policies.arc import ArcPolicy
from tierkv.policies.lfu import LfuPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.s3_fifo import S3FifoPolicy


def _open_adaptive(chunks_max: int | None) -> EvictionPolicy:
    return AdaptivePolicy(chunks_max)


def _open_arc(chunks_max: int | None) -> EvictionPolicy:
    return ArcPolicy(chunks_max)


def _open_lfu(chunks_max: int | None) -> EvictionPolicy:
    return LfuPolicy(chunks_max)


def _open_lru(chunks_max: int | None) -> EvictionPolicy:
    return LruPolicy(chunks_max)


def _open_s3_fifo(chunks_max: int | None) -> EvictionPolicy:
    return S3FifoPolicy(chunks_max)


POLICY_PLUGINS: tuple[PolicyPlugin, ...] = (
    PolicyPlugin(
        name="adaptive",
        summary="Learn from requests which chunks come back soon; admit and keep those.",
        open=_open_adaptive,
    ),
    PolicyPlugin(name="arc", summary="Balance recent use against frequent use, and learn the balance.", open=_open_arc),
    PolicyPlugin(name="lfu", summary="Evict the least frequently used chunks; old uses count less.", open=_open_lfu),
    PolicyPlugin(name="lru", summary="Evict the least recently used chunks.", open=_open_lru),
    PolicyPlugin(
        name="s3-fifo", summary="Evict new chunks early, unless they are used twice or come back.", open=_open_s3_fifo
    ),
)
"""Policies that the built-in plugin registers."""
