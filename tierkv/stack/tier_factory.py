"""Factory of lower tiers: from a tier's part of the description to its opened backend and its table in the manager.

A stack opens its tiers with it when it starts, and those that are attached later.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tierkv.abc import (
    BackendContext,
    Capabilities,
    Codec,
    CodecContext,
    CodecPlugin,
    EvictionPolicy,
    PolicyPlugin,
    SupportsRoomLimit,
)
from tierkv.abc.logs import lines_of_tier
from tierkv.config.options import make_options
from tierkv.config.resolving import ResolvedTier
from tierkv.config.schema import HostConfig
from tierkv.config.tier_schema import TierConfig
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.dispatch.tier_state import TierLimits
from tierkv.errors import BackendError, ConfigError, PluginError, TierKVError
from tierkv.frames.recognition import recognise_frame
from tierkv.frames.sealer import FrameSealer
from tierkv.logs.definitions import CODEC_NOT_OPENED
from tierkv.logs.stack_log import StackLog
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.memory.arena import HostArena
from tierkv.metrics.counters import CoreCounters
from tierkv.plugins.calls import open_value
from tierkv.plugins.registry import PluginRegistry
from tierkv.policies.guarded import GuardedPolicy
from tierkv.policies.quotas import Quotas, TenantPolicy
from tierkv.stack.timed_opening import close_backend
from tierkv.structures.key_table import KeyDirectory
from tierkv.tiers.framing import FrameRules
from tierkv.tiers.retry import RetryLimits, Timing
from tierkv.tiers.tier import Tier
from tierkv.types.cache_events import HOST
from tierkv.types.geometry import Geometry
from tierkv.types.keys import tenant_of_salt
from tierkv.types.namespace import Namespace

PINNED_BY_WRITES_SHARE = 0.5
"""Share of the host slots that pending writes to lower tiers may pin, all tiers together."""


class TierTables:
    """Maker of the tables of tiers for the manager, with their eviction policies. Does no I/O.

    A stack has one for its tiers, a replay one for tiers that it does not open.

    Args:
        registry: the installed plugins.
        slot_bytes: bytes of a host slot.
        tenants_max: tenants with a quota of their own, in each tier.
        counters: count failed policies.
        rng: source of chance.
    """

    def __init__(
        self, registry: PluginRegistry, slot_bytes: int, tenants_max: int, counters: CoreCounters, rng: random.Random
    ) -> None:
        self._registry = registry
        self._slot_bytes = slot_bytes
        self._tenants_max = tenants_max
        self._counters = counters
        self._rng = rng

    def make_host_policy(self, config: HostConfig, plugin: PolicyPlugin, num_slots: int) -> EvictionPolicy:
        """Make the host tier's eviction policy; one for each tenant, where there are quotas."""
        return self._make_policy_with_quotas(config, plugin, num_slots * self._slot_bytes, HOST)

    def _make_policy_with_quotas(
        self,
        config: HostConfig | TierConfig,
        plugin: PolicyPlugin,
        capacity_bytes: int | None,
        tier: str,
    ) -> EvictionPolicy:
        slot_bytes = self._slot_bytes
        if capacity_bytes is None or (config.tenant_quota is None and not config.tenant_quotas):
            return self._make_policy(plugin, None if capacity_bytes is None else capacity_bytes // slot_bytes, tier)
        named = {tenant_of_salt(salt or None): quota for salt, quota in config.tenant_quotas.items()}
        quotas = Quotas(capacity_bytes, config.tenant_quota, named, self._tenants_max)
        return TenantPolicy(lambda chunks: self._make_policy(plugin, chunks, tier), quotas, slot_bytes)

    def _make_policy(self, plugin: PolicyPlugin, chunks: int | None, tier: str) -> EvictionPolicy:
        """Make an eviction policy for up to ``chunks`` chunks (None: no bound), guarded unless it is built in."""
        origin = self._registry.policies[plugin.name].origin
        policy = open_value(f"eviction policy {plugin.name!r}", origin, partial(plugin.open, chunks), tier=tier)
        return policy if origin.is_builtin else GuardedPolicy(policy, tier, self._counters)

    def make_table(
        self,
        index: int,
        tier: ResolvedTier,
        backend: object,
        directory: KeyDirectory | None = None,
    ) -> LowerTier:
        """Make the empty table of a tier for the manager.

        Args:
            index: number of the tier.
            tier: its description.
            backend: may state its room (:class:`SupportsRoomLimit`); None: the tier is not opened.
            directory: directory of keys to share with other tiers. None for a tier that is attached to a running
                stack: another thread fills its table.

        Raises:
            PluginError: policy or backend is broken.
        """
        config = tier.config
        capacity = config.capacity
        if capacity is not None and isinstance(backend, SupportsRoomLimit):
            capacity = min(capacity, _checked_room(backend.room_bytes, config.name))
        limits = LowerTierLimits(
            capacity_bytes=capacity,
            write=WritePolicy(config.write),
            queue_chunks_max=max(1, config.queue_bytes_max // self._slot_bytes),
            probe_deadline_s=config.probe_deadline_s,
            read_deadline_s=config.read_deadline_s,
            write_deadline_s=config.write_deadline_s,
            probe_keys_max=config.probe_keys_max,
            reads_max=config.queue_ops_max,
            concurrency=dispatch_limits(tier).concurrency(tier.backend.capabilities.preferred_concurrency),
            presence_ttl_s=config.presence_ttl_s,
            absence_ttl_s=config.absence_ttl_s,
            presence_keys_max=config.presence_keys_max,
            seen_keys_max=config.seen_keys_max,
            exact=not config.lossy,
        )
        policy = self._make_policy_with_quotas(config, tier.policy, capacity, config.name)
        salt = self._rng.getrandbits(32)
        return LowerTier(index, config.name, tier.backend.capabilities, limits, policy, directory, rank_salt=salt)


class TierFactory:
    """Factory of the tiers of one stack. Its methods block; any thread.

    Args:
        registry: the installed plugins.
        runtime: source of time, chance and threads.
        namespace: identity of the chunks.
        sealer: seals and verifies frames.
        arena: memory of the host slots.
        counters: count failed policies.
        tenants_max: tenants with a quota of their own, in each tier.
        geometry: sizes of the groups' chunks.
        log: log of the stack.
        replica: number of the engine (:class:`tierkv.types.engine.EngineSpec`).
    """

    def __init__(  # noqa: PLR0913, PLR0917 - everything that a tier needs of its stack
        self,
        registry: PluginRegistry,
        runtime: Runtime,
        namespace: Namespace,
        sealer: FrameSealer,
        arena: HostArena,
        counters: CoreCounters,
        tenants_max: int,
        geometry: Geometry,
        log: StackLog,
        replica: int = 0,
    ) -> None:
        self.log = log
        self._registry = registry
        self._runtime = runtime
        self._namespace = namespace
        self._sealer = sealer
        self._arena = arena
        self._geometry = geometry
        self._replica_namespace = replace(namespace, replica=replica)
        self.tables = TierTables(registry, arena.slot_bytes, tenants_max, counters, runtime.rng)
        """Tables and policies of the tiers, for the manager."""

    def open_tier(self, tier: ResolvedTier, codecs: Mapping[str, Codec]) -> Tier:
        """Open the backend of a tier and wrap it. codecs: by name, those that may have written stored frames.

        Raises:
            BackendError: the backend cannot be opened; says what to do.
            ConfigError: the tier's codec does not suit the engine's payloads, or lacks what it needs.
            PluginError: backend or codec is broken.
        """
        config, codec = tier.config, tier.codec
        codecs = {**codecs, codec.name: self._open_codec(codec, tier.codec_options, config.name)}
        capabilities = tier.backend.capabilities
        context = BackendContext(
            config.name,
            self._namespace if capabilities.shared else self._replica_namespace,
            self._arena.slot_bytes,
            config.capacity,
            partial(recognise_frame, self._sealer.namespace, capabilities.alignment),
        )
        with lines_of_tier(config.name, self.log.note):
            backend = open_value(
                f"backend {tier.backend.name!r}",
                self._registry.backends[tier.backend.name].origin,
                partial(tier.backend.open, context, tier.options),
                tier=config.name,
                error=BackendError,
            )
        try:
            return Tier(
                config.name, backend, capabilities, codec.name, codecs, self._sealer, self._arena,
                rules=FrameRules(codec.lossy, codec.conceals, config.lossy, config.accept_clear),
                retry=RetryLimits(attempts=config.retries + 1),
                timing=Timing(self._runtime.clock, self._runtime.io_sleep, self._runtime.rng),
                geometry=self._geometry,
                own_buffers=_needs_own_buffers(config, capabilities),
                log=self.log,
            )  # fmt: skip
        except BaseException:
            close_backend(backend)
            raise

    def open_codecs(self, tiers: Collection[ResolvedTier]) -> dict[str, Codec]:
        """Open all codecs that need no option and suit the payloads: they read frames of an earlier description."""
        named = {tier.codec.name for tier in tiers}
        codecs = {}
        for name, registered in self._registry.codecs.items() if named else ():
            try:
                options, missing = make_options(registered.plugin, {}, name)
                if not missing:
                    codecs[name] = self._open_codec(registered.plugin, options)
            except ConfigError:  # it does not suit these payloads: no frame can have been written with it
                continue
            except TierKVError as error:
                if name not in named:  # a tier that writes with it raises the error later
                    self.log.report(CODEC_NOT_OPENED, kind=name, codec=name, reason=error)
        return codecs

    def _open_codec(self, plugin: CodecPlugin, options: object, tier: str | None = None) -> Codec:
        origin = self._registry.codecs[plugin.name].origin
        context = CodecContext(self._namespace)
        return open_value(f"codec {plugin.name!r}", origin, partial(plugin.open, context, options), tier=tier)


def _needs_own_buffers(config: TierConfig, capabilities: Capabilities) -> bool:
    return not capabilities.reads_end_with_call if config.own_buffers is None else config.own_buffers


def _checked_room(room_bytes: object, tier: str) -> int:
    if type(room_bytes) is not int or room_bytes < 0:
        raise PluginError(f"its backend says room_bytes = {room_bytes!r}, which is not a number of bytes", tier=tier)
    return room_bytes


def held_by(tier: LowerTier) -> dict[str, Any]:
    """Return chunks, bytes and capacity of a tier as fields of a log line. None: unknown, or without a bound."""
    residency, is_known = tier.residency, tier.capabilities.authoritative_index
    return {
        "chunks": len(residency.policy) if is_known else None,
        "held_bytes": residency.used_bytes if is_known else None,
        "capacity_bytes": residency.capacity_bytes,
    }


def share_host_slots(tables: Sequence[LowerTier], num_slots: int, pinned: int = 0) -> None:
    """Divide the host slots that writes may pin among the tiers in service.

    pinned: slots pinned by writes to tiers that are being detached, perhaps for long.
    """
    share = (int(num_slots * PINNED_BY_WRITES_SHARE) - pinned) // max(1, len(tables))
    for table in tables:
        table.queue_chunks_max = max(1, min(table.limits.queue_chunks_max, share))


def dispatch_limits(tier: ResolvedTier) -> TierLimits:
    """Return the bounds that dispatch keeps for a tier."""
    return TierLimits(
        queue_ops_max=tier.config.queue_ops_max,
        io_threads=tier.io_threads,
        breaker_failures=tier.config.breaker_failures,
        breaker_cooldown_s=tier.config.breaker_cooldown_s,
        trial_deadline_s=tier.config.probe_deadline_s,
    )
