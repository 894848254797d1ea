"""Replays through whole stacks: the real scheduler and manager, over tiers that take no time."""

from __future__ import annotations

from typing import Any

import pytest
from made_traces import conversations, naive_lru, trace_of

from tierkv.config.loading import parse_config
from tierkv.config.resolving import ResolvedStack, resolve
from tierkv.errors import ConfigError
from tierkv.frames.frame import frame_bytes
from tierkv.plugins.loading import load_plugins
from tierkv.replay.lru_stack import is_inclusive_lru, play_lru, sizes_of
from tierkv.replay.stack_distances import stack_distances
from tierkv.replay.stack_player import StackPlayer, play_stack
from tierkv.types.hints import RequestHints

CHUNK_BYTES = 60_000
FRAME_BYTES = frame_bytes(CHUNK_BYTES)


def stack_of(host: int, *lower: int | None, **changes: Any) -> ResolvedStack:
    """Host tier of some chunks over tiers of some chunks; None: an object store. changes: of every tier below."""
    tiers = [
        {"name": f"objects-{i}", "backend": "fsspec", "url": f"file:///nowhere/{i}", **changes}
        if chunks is None
        else {"name": f"disk-{i}", "backend": "disk", "path": f"/nowhere/{i}", "capacity": chunks * FRAME_BYTES}
        | changes
        for i, chunks in enumerate(lower)
    ]
    config = {"host": {"capacity": host * FRAME_BYTES, "policy": changes.get("policy", "lru")}, "tiers": tiers}
    return resolve(parse_config(config), load_plugins())


@pytest.mark.parametrize("lower", [(), (60,), (60, 200), (60, None)])
def test_stack_distances_agree_with_the_real_stack(lower: tuple[int | None, ...]) -> None:
    """`tierkv plan` answers for LRU stacks without a replay: its answer must be the one of the real manager."""
    trace = trace_of(prompts := conversations(1, 300))
    stack = stack_of(20, *lower)
    assert is_inclusive_lru(stack, trace, CHUNK_BYTES)
    sizes = sizes_of(stack, CHUNK_BYTES)
    names = tuple(tier.config.name for tier in stack.tiers)
    by_distance = play_lru(trace, stack_distances(trace), names, sizes)
    played = play_stack(trace, stack, load_plugins(), CHUNK_BYTES)
    assert played.tiers == by_distance.tiers
    few = 0.01 * len(trace.chunks)
    assert by_distance.hits.sum() == sum(naive_lru(prompts, sizes[-1])[0])
    assert by_distance.hits.sum(axis=1) == pytest.approx(played.hits.sum(axis=1), abs=few)
    for ours, real in zip(by_distance.traffic, played.traffic, strict=True):
        assert ours.read.total() == pytest.approx(real.read.total(), abs=few)
        assert ours.written.total() == pytest.approx(real.written.total(), abs=few)
    assert sum(len(prompt) for prompt in prompts) > by_distance.hits.sum() > 0


@pytest.mark.parametrize(
    ("stack", "why"),
    [
        (stack_of(20, 60, policy="arc"), "another policy"),
        (stack_of(20, 10), "a tier smaller than the one above it"),
        (stack_of(20, 60, write="back"), "chunks arrive below when they are evicted"),
        (stack_of(20, 60, tenant_quota=5 * FRAME_BYTES), "quotas"),
    ],
)
def test_other_stacks_are_played(stack: ResolvedStack, why: str) -> None:
    """The shortcut must not answer for stacks that behave otherwise."""
    trace = trace_of(conversations(2, 60))
    assert not is_inclusive_lru(stack, trace, CHUNK_BYTES), why
    played = play_stack(trace, stack, load_plugins(), CHUNK_BYTES)
    assert 0 < played.hits.sum() < len(trace.chunks)


def test_hints_and_tenants_reach_the_stack() -> None:
    """A hint that forbids storing leaves nothing to find, and tenants do not find the chunks of each other."""
    trace = trace_of([[1, 2, 3]] * 4)
    trace.hints_known = [RequestHints(store=frozenset())]
    assert trace.has_hints
    assert not is_inclusive_lru(stack_of(20, 60), trace, CHUNK_BYTES)
    assert play_stack(trace, stack_of(20, 60), load_plugins(), CHUNK_BYTES).hits.sum() == 0
    trace.hints_known, trace.tenant_names = [RequestHints()], ["acme", "zenith"]
    trace.tenants[:] = type(trace.tenants)("I", [0, 1, 0, 1])
    played = play_stack(trace, stack_of(20, 60), load_plugins(), CHUNK_BYTES)
    assert list(played.hits.sum(axis=0)) == [0, 0, 3, 3]


def test_invariants_hold_after_a_replay() -> None:
    """A replay drives the core as an engine does: nothing leaks, and every pin and byte is accounted for."""
    trace = trace_of(conversations(3, 40))
    player = StackPlayer(stack_of(8, 30, None), load_plugins(), CHUNK_BYTES, trace.num_chunks)
    for number, request in enumerate(trace.requests()):
        player.play(number, request)
        player.core.scheduler.validate()
    assert not player.core.scheduler.has_pending_work
    assert player.core.manager.host_is_idle


def test_a_prompt_larger_than_every_tier_ends() -> None:
    """A stranger's trace may have one prompt that no tier of a planned stack holds."""
    trace = trace_of([list(range(500))] * 3)
    played = play_stack(trace, stack_of(4, 10), load_plugins(), CHUNK_BYTES)
    assert played.hits.sum() < len(trace.chunks)


def test_a_host_tier_smaller_than_a_chunk_is_named() -> None:
    """A user who mixes up bytes of tokens and of chunks sees which key is too small."""
    stack = resolve(parse_config({"host": {"capacity": "1KiB"}}), load_plugins())
    for call in (
        lambda: sizes_of(stack, CHUNK_BYTES),
        lambda: play_stack(trace_of([[1]]), stack, load_plugins(), CHUNK_BYTES),
    ):
        with pytest.raises(ConfigError, match=r"host.capacity = 1024 bytes: a chunk of this trace needs 65536"):
            call()


def test_chunks_that_a_load_lost_are_not_counted_as_read() -> None:
    """A quota may evict chunks behind the front of a hit: the report has the bytes that reach the engine."""
    trace = trace_of([list(range(3 * i)) for i in range(1, 60)])
    player = StackPlayer(stack_of(20, 150, tenant_quota=30 * FRAME_BYTES), load_plugins(), CHUNK_BYTES, 177)
    hits = sum(sum(player.play(number, request).values()) for number, request in enumerate(trace.requests()))
    assert player.core.counters.tokens_given_up
    assert player.traffic[0].read.total() == hits
    player.core.scheduler.validate()
