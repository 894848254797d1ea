"""Draws of features: users and their quotas, eviction policies, codecs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from simulation.drawing.scenarios import Scenario
from simulation.engine.expected_bytes import ANONYMOUS, User
from tierkv.plugins.loading import load_plugins
from tierkv.types.keys import Tenant, tenant_of_salt

SLOT_BYTES = 8192
"""Bytes of a header page and a page of payload: the size of every chunk, so that capacities count chunks."""

ENCRYPTED = "aes-256-gcm"
KEY_ENV = "TIERKV_SIMULATION_KEY"
_KEY = bytes(range(32)).hex()

CAN_ENCRYPT = importlib.util.find_spec("cryptography") is not None

CODECS: tuple[str | dict[str, Any], ...] = (
    "none", "none", "none", "zstd",
    {"name": ENCRYPTED, "key_env": KEY_ENV}, {"name": ENCRYPTED, "key_env": KEY_ENV, "inner": "zstd"},
)  # fmt: skip
"""Exact codecs."""

LOSSY = ("fp8", "int8")
"""Lossy codecs. A run has one of them at most."""

USERS = (ANONYMOUS, User("a"), User("b"), User("c"), User("a", "adapter"), User(None, "adapter"))


@dataclass(frozen=True, slots=True)
class Features:
    """users: users of the engine. quotas: whether tiers have quotas that are checked. blind: as in :class:`Scenario`.

    host, tenants: more for these tables of the stack's description.
    """

    users: tuple[User, ...]
    quotas: bool
    blind: bool
    host: Mapping[str, Any]
    tenants: Mapping[str, Any]

    def describe(self) -> str:
        """Text of a few words."""
        return f"{len(self.users)} users{' with quotas' if self.quotas else ''}"


def policies() -> list[str]:
    """Names of the built-in eviction policies."""
    return sorted(load_plugins([], entry_points=lambda **_: ()).policies)


def draw_features(rng: Random, plan: Scenario, host_slots: int) -> Features:
    """Draw the features of a seed."""
    policy = rng.choice(("lru", rng.choice(policies())))
    tracked_max = rng.choice((None, None, None, None, 1, 2))  # None: all; otherwise several share a quota
    blind = rng.random() < plan.blind
    users = rng.sample(USERS, rng.randint(2, len(USERS)))
    if rng.random() >= plan.tenants:
        return Features((ANONYMOUS,), quotas=False, blind=False, host={"policy": policy}, tenants={})
    return Features(
        tuple(users),
        quotas=True,
        blind=blind,
        host={"policy": policy, **_draw_quotas(rng, host_slots * SLOT_BYTES)},
        tenants={} if tracked_max is None else {"tracked_max": tracked_max},
    )


def draw_tier_features(rng: Random, features: Features, capacity_bytes: int | None, lossy: str) -> dict[str, Any]:
    """Draw further keys for the table of a lower tier. lossy: name of the run's lossy codec, if it has one."""
    codec = rng.choice(CODECS)
    policy = rng.choice(("lru", rng.choice(policies())))
    quotas = {} if capacity_bytes is None or not features.quotas else _draw_quotas(rng, capacity_bytes)
    drawn = {"codec": codec if isinstance(codec, str) or CAN_ENCRYPT else "none", "policy": policy, "lossy": False}
    if lossy and rng.random() < 0.7:
        drawn |= {"lossy": True, "codec": lossy if rng.random() < 0.8 else drawn["codec"]}
    return {**drawn, **quotas}


def _draw_quotas(rng: Random, capacity_bytes: int) -> dict[str, Any]:
    def some() -> int:
        return max(1, int(capacity_bytes * rng.choice((0.1, 0.3, 0.5, 1.0)) / SLOT_BYTES)) * SLOT_BYTES

    each = rng.choice((None, some(), some()))
    named = {salt: some() for salt in rng.sample(("", "a", "b"), rng.randint(0 if each else 1, 3))}
    return {"tenant_quotas": named} if each is None else {"tenant_quota": each, "tenant_quotas": named}


def quota_of(table: Mapping[str, Any], tenant: Tenant) -> int | None:
    """Quota of a tenant in a tier's table; None: no quota."""
    named = {tenant_of_salt(salt or None): quota for salt, quota in table.get("tenant_quotas", {}).items()}
    found: int | None = named.get(tenant, table.get("tenant_quota"))
    return found


def has_quotas(table: Mapping[str, Any]) -> bool:
    """Whether a tier has quotas."""
    return table.get("tenant_quota") is not None or bool(table.get("tenant_quotas"))


@contextmanager
def key_at_hand() -> Iterator[None]:
    """Set the key in the environment, so that an encrypted tier can be opened."""
    before = os.environ.get(KEY_ENV)
    os.environ[KEY_ENV] = _KEY
    try:
        yield
    finally:
        if before is None:
            del os.environ[KEY_ENV]
        else:
            os.environ[KEY_ENV] = before
