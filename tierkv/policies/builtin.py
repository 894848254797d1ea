"""List of the built-in eviction policies."""

from __future__ import annotations

from tierkv.abc.plugin import PolicyPlugin
from tierkv.policies.adaptive.policy import AdaptivePolicy
from tierkv.policies.arc import ArcPolicy
from tierkv.policies.lfu import LfuPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.s3_fifo import S3FifoPolicy

POLICY_PLUGINS: tuple[PolicyPlugin, ...] = (
    PolicyPlugin(
        name="adaptive",
        summary="Learn from requests which chunks come back soon; admit and keep those.",
        open=AdaptivePolicy,
    ),
    PolicyPlugin(name="arc", summary="Balance recent use against frequent use, and learn the balance.", open=ArcPolicy),
    PolicyPlugin(name="lfu", summary="Evict the least frequently used chunks; old uses count less.", open=LfuPolicy),
    PolicyPlugin(name="lru", summary="Evict the least recently used chunks.", open=LruPolicy),
    PolicyPlugin(
        name="s3-fifo", summary="Evict new chunks early, unless they are used twice or come back.", open=S3FifoPolicy
    ),
)
"""Policies that the built-in plugin registers."""
