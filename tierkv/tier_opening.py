"""How one lower tier is opened: from its part of the description to a backend in its wrapper, and its table.

A stack opens its tiers with this when it starts, and those that are attached later.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from tierkv.abc import AsyncBackend, Backend, BackendContext, Codec, EvictionPolicy, PolicyPlugin
from tierkv.codecs.frame import FrameSealer
from tierkv.config.resolving import ResolvedTier
from tierkv.dispatch.limits import TierLimits
from tierkv.dispatch.runtime import Runtime
from tierkv.errors import BackendError, TierKVError
from tierkv.manager.guarded_policy import guarded
from tierkv.manager.lower_tier import LowerTier, LowerTierLimits
from tierkv.metrics.counters import CoreCounters
from tierkv.plugins import PluginRegistry, opened
from tierkv.tiers.arena import HostArena
from tierkv.tiers.retry import RetryLimits, Timing
from tierkv.tiers.tier import Tier
from tierkv.types.namespace import Namespace

_log = logging.getLogger(__name__)

HELD_BY_CASCADES_SHARE = 0.5
"""Share of the host slots that chunks on their way to lower tiers may hold, all tiers together."""


class TierOpener:
    """Opens tiers for one stack. Blocks; any thread.

    Args:
        registry: the installed plugins.
        runtime: where time, chance and threads come from.
        namespace: whose chunks these are.
        sealer: seals and checks their frames.
        arena: where the host slots are.
        counters: for policies that fail.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - all that a tier has to know of its stack
        self,
        registry: PluginRegistry,
        runtime: Runtime,
        namespace: Namespace,
        sealer: FrameSealer,
        arena: HostArena,
        counters: CoreCounters,
    ) -> None:
        self._registry = registry
        self._runtime = runtime
        self._namespace = namespace
        self._sealer = sealer
        self._arena = arena
        self._counters = counters

    def open(self, tier: ResolvedTier, codecs: Mapping[str, Codec]) -> Tier:
        """The backend, opened and wrapped.

        Raises:
            BackendError: it cannot be opened; says what to do.
            PluginError: it is broken.
        """
        config = tier.config
        context = BackendContext(config.name, self._namespace, self._arena.slot_bytes, config.capacity)
        backend = opened(
            f"backend {tier.backend.name!r}",
            self._registry.backends[tier.backend.name].origin,
            partial(tier.backend.open, context, tier.options),
            tier=config.name,
            error=BackendError,
        )
        try:
            return Tier(
                config.name, backend, tier.backend.capabilities, tier.codec.name, codecs, self._sealer, self._arena,
                retry=RetryLimits(attempts=config.retries + 1),
                timing=Timing(self._runtime.clock, self._runtime.nap, self._runtime.rng),
            )  # fmt: skip
        except BaseException:
            close_backend(backend)
            raise

    def open_codecs(self, tiers: Collection[ResolvedTier]) -> dict[str, Codec]:
        """Every codec by name: those that ``tiers`` name, and others, to read frames of an earlier description."""
        named = {tier.codec.name: tier.config.name for tier in reversed(tuple(tiers))}
        codecs = {}
        for name, registered in self._registry.codecs.items() if named else ():
            try:
                codec = opened(f"codec {name!r}", registered.origin, registered.plugin.open, tier=named.get(name))
            except TierKVError as error:
                if name in named:
                    raise
                _log.warning("%s; no tier is to write with it, and frames that were written with it are misses", error)
            else:
                codecs[name] = codec
        return codecs

    def policy(self, plugin: PolicyPlugin, chunks: int | None, tier: str) -> EvictionPolicy:
        """An eviction policy for a tier of so many chunks (None: no bound), watched."""
        origin = self._registry.policies[plugin.name].origin
        policy = opened(f"eviction policy {plugin.name!r}", origin, partial(plugin.open, chunks), tier=tier)
        return guarded(policy, tier, self._counters)

    def table(self, index: int, tier: ResolvedTier) -> LowerTier:
        """The tier as the manager sees it, still empty."""
        config = tier.config
        limits = LowerTierLimits(
            capacity_bytes=config.capacity,
            writes=config.write == "through",
            queue_chunks_max=max(1, config.queue_bytes_max // self._arena.slot_bytes),
            probe_deadline_s=config.probe_deadline_s,
            read_deadline_s=config.read_deadline_s,
            write_deadline_s=config.write_deadline_s,
            probe_keys_max=config.probe_keys_max,
            presence_ttl_s=config.presence_ttl_s,
            absence_ttl_s=config.absence_ttl_s,
            presence_keys_max=config.presence_keys_max,
        )
        frames = None if config.capacity is None else config.capacity // self._arena.slot_bytes
        policy = self.policy(tier.policy, frames, config.name)
        return LowerTier(index, config.name, tier.backend.capabilities, limits, policy)


def share_host_slots(tables: Sequence[LowerTier], num_slots: int) -> None:
    """Say how many host slots the writes of each tier may hold, now that the tiers are these."""
    share = int(num_slots * HELD_BY_CASCADES_SHARE) // max(1, len(tables))
    for table in tables:
        table.queue_chunks_max = max(1, min(table.limits.queue_chunks_max, share))


def close_backend(backend: Backend | AsyncBackend) -> None:
    """Close a backend that is not to be used after all, so that its locks do not outlive the error."""
    result = backend.close()
    if inspect.iscoroutine(result):
        asyncio.run(result)


def dispatch_limits(tier: ResolvedTier) -> TierLimits:
    """The bounds that dispatch keeps for a tier."""
    return TierLimits(
        queue_ops_max=tier.config.queue_ops_max,
        io_threads=tier.io_threads,
        breaker_failures=tier.config.breaker_failures,
        breaker_cooldown_s=tier.config.breaker_cooldown_s,
        trial_deadline_s=tier.config.probe_deadline_s,
    )
