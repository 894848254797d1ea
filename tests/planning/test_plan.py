"""Plans of stacks: what they add up to, and what they say of strange traces."""

from __future__ import annotations

from typing import Any

import pytest
from made_traces import conversations, trace_of

from tierkv.config.loading import parse_config
from tierkv.config.resolving import ResolvedStack, resolve
from tierkv.errors import ConfigError
from tierkv.frames.frame import frame_bytes
from tierkv.planning.assumptions import Assumptions, TierSpeed
from tierkv.planning.plan import chosen, make_plan
from tierkv.planning.results import Plan
from tierkv.plugins.loading import load_plugins

CHUNK_BYTES = 60_000
FRAME_BYTES = frame_bytes(CHUNK_BYTES)
ASSUMED = Assumptions(prefill_tokens_per_s=50.0, chunk_tokens=16, chunk_bytes=CHUNK_BYTES)


def stack_of(host: int, disk: int, policy: str = "lru", **host_keys: Any) -> ResolvedStack:
    """Host tier and disk of some chunks."""
    tier = {"backend": "disk", "path": "/nowhere", "capacity": disk * FRAME_BYTES, "policy": policy}
    config = {"host": {"capacity": host * FRAME_BYTES, "policy": policy, **host_keys}, "tiers": [tier]}
    return resolve(parse_config(config), load_plugins())


def plan_of(prompts: list[list[int]], assumed: Assumptions = ASSUMED, **stacks: ResolvedStack) -> Plan:
    """Plan for these prompts."""
    return make_plan(trace_of(prompts), stacks or {"small": stack_of(20, 60)}, load_plugins(), assumed)


def test_the_figures_of_a_plan_add_up() -> None:
    """Hits, computation and engines are three views of one thing: they must agree with each other."""
    prompts = conversations(4, 200)
    plan = plan_of(prompts, small=stack_of(20, 60), large=stack_of(20, 4000))
    small, large = plan.stacks
    assert plan.without.prefill_s == pytest.approx(16 * sum(map(len, prompts)) / 50)
    for one in plan.stacks:
        used = one.hits - one.slow
        assert one.prefill_saved_s == pytest.approx(used * ASSUMED.chunk_prefill_s, rel=0.02)
        assert one.fleet.prefill_s + one.prefill_saved_s == pytest.approx(plan.without.prefill_s)
        assert one.engines_saved == plan.without.engines - one.fleet.engines
        assert one.fleet.ttft_p50_s <= one.fleet.ttft_p95_s
    assert large.hits > small.hits
    assert large.fleet.ttft_p95_s < plan.without.ttft_p95_s
    assert [found for _, found in plan.curve] == sorted(found for _, found in plan.curve)
    assert plan.curve[-1][1] == pytest.approx(large.hit_percent)
    assert chosen(plan.stacks) is large


def test_more_room_brings_what_a_larger_stack_has() -> None:
    """The marginal line is what a buyer decides by: it must equal the plan of the larger stack."""
    prompts = conversations(5, 200)
    for policy in ("lru", "arc"):
        plan = plan_of(prompts, now=stack_of(20, 60, policy), then=stack_of(20, 120, policy))
        now, then = plan.stacks
        disk = next(growth for growth in now.growths if growth.tier == "disk")
        assert disk.more_bytes == 60 * FRAME_BYTES
        assert now.hit_percent + disk.hit_points == pytest.approx(then.hit_percent)
        assert now.prefill_saved_s + disk.prefill_saved_s == pytest.approx(then.prefill_saved_s)
        assert now.is_exact_lru == (policy == "lru")


def test_traffic_is_counted_by_tier_and_minute() -> None:
    """A drive has an endurance and a speed: both are exceeded in the busiest minute first."""
    plan = plan_of([list(range(i * 10, i * 10 + 10)) for i in range(120)])
    _, disk = plan.stacks[0].tiers
    assert disk.written.total_bytes == 1200 * CHUNK_BYTES
    assert disk.written.peak_bytes_per_s == pytest.approx(600 * CHUNK_BYTES / 60)
    assert disk.written.bytes_per_day == pytest.approx(1200 * CHUNK_BYTES / 119 * 86_400)
    assert disk.drive_writes_per_day == pytest.approx(disk.written.bytes_per_day / (60 * FRAME_BYTES))
    assert plan.stacks[0].tiers[0].drive_writes_per_day is None
    assert disk.read.total_bytes == 0
    assert disk.read.peak_minute is None


def test_engines_are_planned_for_the_busiest_hour() -> None:
    """A quiet night must not make the day's rush look small: its users would wait for hours."""
    rush = trace_of([list(range(i * 10, i * 10 + 10)) for i in range(120)])
    night = trace_of([list(range(i * 10, i * 10 + 10)) for i in range(121)])
    night.at_s[-1] = 86_400.0
    stacks = {"small": stack_of(20, 60)}
    alone, with_night = (make_plan(trace, stacks, load_plugins(), ASSUMED).without for trace in (rush, night))
    assert alone.engines == 5
    hour = Assumptions(ASSUMED.prefill_tokens_per_s / 1000, 16, CHUNK_BYTES)
    needed = make_plan(night, stacks, load_plugins(), hour).without.engines
    assert needed == 121, "the rush of two minutes has 384,000 s of computation, so each prompt has an engine"
    assert with_night.engines == 1, "within an hour, one engine has computed the rush"


def test_minutes_count_from_the_first_request() -> None:
    """A log of one's own has the time since 1970: its busiest minute is not the 28 millionth."""
    trace = trace_of([list(range(i * 10, i * 10 + 10)) for i in range(120)])
    for number, at_s in enumerate(trace.at_s):
        trace.at_s[number] = at_s + 1_764_200_007.25
    for policy in ("lru", "arc"):
        _, disk = make_plan(trace, {"one": stack_of(20, 60, policy)}, load_plugins(), ASSUMED).stacks[0].tiers
        assert set(disk.written.by_minute) == {0, 1}
        assert disk.written.peak_minute in {0, 1}


def test_prices_choose_the_stack() -> None:
    """The stack that saves most is not the one to buy, if its last hits cost more than the engines that they save."""
    prompts = conversations(6, 200)
    prices = {"host": 10.0, "disk": 1e9, "engine": 1.0}
    plan = plan_of(
        prompts, Assumptions(50.0, 16, CHUNK_BYTES, prices=prices), small=stack_of(20, 60), large=stack_of(20, 400)
    )
    assert chosen(plan.stacks) is plan.stacks[0]
    assert plan.stacks[1].price == pytest.approx(400 * FRAME_BYTES / 2**30 * 1e9, rel=1e-3)
    assert plan.stacks[0].growths[1].price == pytest.approx(60 * FRAME_BYTES / 2**30 * 1e9)


@pytest.mark.parametrize(
    ("assumed", "words"),
    [
        ({"prices": {"host": 1.0}}, "there is no price of tier 'disk': add --price disk=PRICE"),
        ({"prices": {"host": 1.0, "disk": 1.0, "tape": 2.0}}, "--price tape=...: no stack has such a tier"),
        ({"speeds": {"dsk": TierSpeed(1.0, 1.0)}}, "--speed dsk=...: no stack has such a tier"),
    ],
)
def test_names_that_no_stack_has_are_refused(assumed: dict[str, Any], words: str) -> None:
    """A misspelt name would silently leave a default in place."""
    with pytest.raises(ConfigError, match=words):
        plan_of([[1]], Assumptions(50.0, 16, CHUNK_BYTES, **assumed))


@pytest.mark.parametrize(
    "prompts",
    [[], [[]], [[], []], [[1, 2]], [[i] for i in range(50)], [list(range(300))] * 3],
    ids=["empty", "no chunk", "no chunks", "one request", "one-shot only", "larger than every tier"],
)
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_strange_traces_have_a_plan(prompts: list[list[int]], policy: str) -> None:
    """Empty, of one request, of one-shot prompts only, with one chunk again and again: an answer, not a crash."""
    plan = plan_of(prompts, one=stack_of(4, 10, policy))
    (one,) = plan.stacks
    assert 0 <= one.hits <= plan.chunks
    assert plan.without.engines >= 1
    assert one.fleet.ttft_p95_s >= 0


def test_requests_that_all_come_at_once_have_a_plan() -> None:
    """A trace without times has one instant: rates are those of a second, and engines are at most the requests."""
    trace = trace_of([[1, 2, 3]] * 50)
    trace.at_s[:] = type(trace.at_s)("d", [0.0] * 50)
    plan = make_plan(trace, {"one": stack_of(20, 60)}, load_plugins(), ASSUMED)
    assert plan.span_s == 1
    assert plan.without.engines == 50
    assert plan.stacks[0].fleet.engines < 50


def test_the_worst_tenant_is_named() -> None:
    """An average hides a customer whose prompts are never found."""
    trace = trace_of([[1, 2, 3] if i % 2 else [100 * i, 100 * i + 1] for i in range(100)])
    trace.tenant_names = ["returning", "fresh"]
    trace.tenants[:] = type(trace.tenants)("I", [(i + 1) % 2 for i in range(100)])
    (one,) = make_plan(trace, {"one": stack_of(20, 60)}, load_plugins(), ASSUMED).stacks
    assert one.worst is not None
    assert (one.worst.name, one.worst.hits) == ("fresh", 0)
    assert [tenant.name for tenant in one.tenants] == ["returning", "fresh"]
