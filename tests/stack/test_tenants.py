"""Tenants in a whole stack: separated by their keys, and within their quotas, even after a restart."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from stack_bed import ANSWER, ENGINE, SLOT_BYTES, opened, stack_config

from tierkv.errors import ConfigError
from tierkv.policies.quotas import TenantPolicy
from tierkv.reference.engine import Engine
from tierkv.stack.stack import Stack
from tierkv.types.engine import StepOutput
from tierkv.types.keys import NO_TENANT, tenant_of, tenant_of_salt

A, B = tenant_of_salt("team-a"), tenant_of_salt("team-b")


def prompts(seed: int, count: int, length: int = 120) -> list[list[int]]:
    """Prompts that share no chunk."""
    rng = random.Random(seed)
    return [[rng.randrange(1, 211) for _ in range(length)] for _ in range(count)]


def serve(stack: Stack, asked: Sequence[list[int]], salt: str | None) -> int:
    """Serve prompts of one tenant in a fresh engine; return the loaded tokens."""
    engine = Engine(ENGINE, connector=stack)
    names = [engine.add_request(prompt, ANSWER, cache_salt=salt) for prompt in asked]
    while engine.has_work:
        engine.step()
    return sum(engine.record(name).tokens_loaded for name in names)


def settle(stack: Stack) -> None:
    """Wait until writes and deletions have ended."""
    stack.flush()  # False where a quota evicted a chunk that was still to be written
    assert not stack._core.wiring.manager.has_pending_changes
    quiet = 0
    while quiet < 20:
        stack.build_connector_meta(StepOutput())
        time.sleep(0.002)
        quiet = quiet + 1 if all(table.is_quiet for table in stack._core.wiring.manager.tiers) else 0


def disk(place: Path, **more: Any) -> dict[str, Any]:
    """A tier on disk."""
    return {"backend": "disk", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0, **more}


def held(stack: Stack, tier: int = 0) -> dict[bytes, int]:
    """Chunks per tenant in a lower tier, counted from its table."""
    counts: dict[bytes, int] = {}
    for key in stack._core.wiring.manager.tiers[tier].residency:
        counts[tenant_of(key)] = counts.get(tenant_of(key), 0) + 1
    return counts


def test_salts_share_nothing(tmp_path: Path) -> None:
    """A hit on another tenant's chunk would reveal that tenant's prompts."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        asked = prompts(1, 2)
        assert serve(stack, asked, "team-a") == 0
        assert serve(stack, asked, "team-b") == 0
        assert serve(stack, asked, None) == 0
        assert serve(stack, asked, "team-a") > 0


def test_a_flood_costs_others_nothing(tmp_path: Path) -> None:
    """With a quota the chunks of a quiet tenant outlive any number of another tenant's, in host memory and on disk."""
    quota = 7 * SLOT_BYTES
    host = {"capacity": 32 * SLOT_BYTES, "tenant_quota": quota}
    tiers = [disk(tmp_path, capacity=30 * 16 * 1024, tenant_quota=15 * 16 * 1024)]
    with opened(stack_config(tmp_path, host=host, tiers=tiers)) as stack:
        quiet = prompts(1, 1)
        serve(stack, quiet, "team-a")
        settle(stack)
        for seed in range(2, 12):
            serve(stack, prompts(seed, 2), "team-b")
        settle(stack)
        assert serve(stack, quiet, "team-a") > 0
        assert stack.metrics.counters.promotions["disk"] == 0, "the quiet tenant lost its place in the host tier"
        stack.reset_cache()
        assert serve(stack, quiet, "team-a") > 0
        assert stack.metrics.counters.promotions["disk"] > 0, "the quiet tenant lost its place on disk"
        assert stack.tiers.usage()["disk"][B.hex()] <= 15 * 16 * 1024


def test_without_a_quota_the_flood_wins(tmp_path: Path) -> None:
    """Control of the test above: without quotas the same load evicts the quiet tenant."""
    host = {"capacity": 32 * SLOT_BYTES}
    with opened(stack_config(tmp_path, host=host, tiers=[disk(tmp_path, capacity=30 * 16 * 1024)])) as stack:
        quiet = prompts(1, 1)
        serve(stack, quiet, "team-a")
        for seed in range(2, 12):
            serve(stack, prompts(seed, 2), "team-b")
        settle(stack)
        assert serve(stack, quiet, "team-a") == 0


def test_quotas_hold_after_a_restart(tmp_path: Path) -> None:
    """Stored chunks name their tenant, so a smaller quota applies to chunks of an earlier process."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        for seed in range(4):
            serve(stack, prompts(seed, 2), "team-a")
        serve(stack, prompts(9, 1), None)
        settle(stack)
        before = held(stack)
        assert before[A] > 20
    named = {"team-a": "64KiB"}
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path, tenant_quotas=named)])) as stack:
        policy = stack._core.wiring.manager.tiers[0].policy
        assert isinstance(policy, TenantPolicy)
        settle(stack)
        assert 0 < policy.usage()[A] <= 64 * 1024
        assert held(stack)[NO_TENANT] == before[NO_TENANT], "requests without a salt lost chunks"


def test_a_tier_without_an_account_takes_no_quota(tmp_path: Path) -> None:
    """One stack cannot keep a tenant within its quota in a bucket that others write to: refused at start."""
    objects = {"name": "objects", "backend": "fsspec", "url": f"file://{tmp_path}/o", "tenant_quota": "1MiB"}
    with (
        pytest.raises(ConfigError, match=r"tiers\[0\].tenant_quota.*with a capacity"),
        opened(stack_config(tmp_path, tiers=[objects])),
    ):
        pass
