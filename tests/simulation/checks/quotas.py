"""Check of quotas: at every step as far as chunks can be evicted, and exactly at rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from simulation.checks.failure import Violation, demand
from simulation.checks.monitor import HOST
from simulation.checks.probe import Kept, Probe
from simulation.drawing.features import has_quotas, quota_of
from simulation.drawing.run_spec import RunSpec
from tierkv.types.keys import Key, Tenant, tenant_of

QUOTAS = "a tenant keeps within its quota"


class QuotaChecks:
    """Quotas in the tiers of one process."""

    def __init__(self, setup: RunSpec, probe: Probe) -> None:
        self._probe = probe
        tables: dict[str, Mapping[str, Any]] = {HOST: setup.host, **{tier.name: tier.options for tier in setup.tiers}}
        self._tables = {name: table for name, table in tables.items() if has_quotas(table)}
        self._tells_apart = not setup.features.tenants  # otherwise several may share a quota, and none can be checked
        self._seen: dict[str, dict[Key, Kept]] = {}
        self._paused: set[str] = set()
        self._chosen: set[Key] = set()
        probe.listen_to_trims(self._chosen.update)

    def forget(self, name: str) -> None:
        """A tier was attached: all of its chunks are new."""
        self._seen.pop(name, None)

    @property
    def _in_service(self) -> list[str]:
        tiers = {HOST, *self._probe.tiers()}
        return [name for name in self._tables if name in tiers]

    def after_step(self) -> None:
        """A tenant above its quota when the step began has lost its unused chunks; newer ones may exceed the quota.

        Not while evictions pause, because one failed.
        """
        reported = self._probe.tenant_usage()
        for name in self._in_service:
            before, now = self._seen.get(name, {}), self._probe.evictable(name)
            self._seen[name] = now
            total, right = sum(reported[name].values()), sum(kept.size for kept in now.values())
            swept = name != HOST or self._probe.is_swept()
            demand(total == right or not swept, QUOTAS, f"{name} tells of {total} bytes, there are {right}")
            paused = self._probe.evictions_pause(name)
            if self._tells_apart and not (paused or name in self._paused):
                self._check_trimmed(name, before, now)
            (self._paused.add if paused else self._paused.discard)(name)
        self._chosen.clear()

    def _check_trimmed(self, name: str, before: Mapping[Key, Kept], now: Mapping[Key, Kept]) -> None:
        stayed = {key: kept.size for key, kept in now.items() if key in before and before[key].lease == kept.lease}
        idle = _by_tenant({key: size for key, size in stayed.items() if not before[key].used})
        # Chosen to leave, and wanted again before it was written: it stays, and another one leaves in the next step.
        # Where all unused chunks are needed again, none can be evicted. One that was used when the step began may have
        # been chosen after its use.
        chosen = self._chosen if name == HOST else set[Key]()
        wanted = {key for key in stayed if now[key].used and (key in chosen or not before[key].used)}
        came_back = _by_tenant({key: stayed[key] for key in wanted})
        for tenant, over in self._over(name, _by_tenant(stayed)).items():
            if idle[tenant] > came_back[tenant] and over > came_back[tenant]:
                raise Violation(QUOTAS, f"{tenant.hex() or 'nobody'} keeps {over} bytes too many in {name}")

    def over(self) -> dict[str, dict[str, int]]:
        """Bytes above quotas, by tier and tenant; at rest there are none."""
        found = {}
        for name in self._in_service if self._tells_apart else ():
            used = _by_tenant({key: kept.size for key, kept in self._probe.evictable(name).items()})
            found[name] = {tenant.hex(): size for tenant, size in self._over(name, used).items()}
        return {name: over for name, over in found.items() if over}

    def check_frames(self, name: str, sizes: Mapping[Key, int]) -> None:
        """At rest, the chunks of a tier are within every quota."""
        if name in self._tables and self._tells_apart:
            over = self._over(name, _by_tenant(sizes))
            demand(not over, QUOTAS, f"in {name} lies too much of {[tenant.hex() or 'nobody' for tenant in over]}")

    def _over(self, name: str, used: Mapping[Tenant, int]) -> dict[Tenant, int]:
        quotas = {tenant: quota_of(self._tables[name], tenant) for tenant in used}
        return {tenant: used[tenant] - quota for tenant, quota in quotas.items() if quota and used[tenant] > quota}


def _by_tenant(sizes: Mapping[Key, int]) -> Counter[Tenant]:
    used: Counter[Tenant] = Counter()
    for key, size in sizes.items():
        used[tenant_of(key)] += size
    return used
