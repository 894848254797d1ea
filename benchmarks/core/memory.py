"""Bytes of Python objects per resident chunk: the index, the policy, and the keys that both share.

The policy is one through which as many chunks have passed as it holds, so its ghosts are in it. Each chunk has a rank,
as those of an engine's requests do; policies that cannot use ranks keep none. Counted by tracemalloc, so the same on
every run; without what the allocator itself rounds up and keeps. The limit is the least that answers "where is it?" for
these keys in Python: a dict from key to an integer.
"""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.core.busy_tier import CAPABILITIES
from benchmarks.core.rig import batches_of, fill, keys_of, make_core, open_policy, policy_names, random_hashes
from benchmarks.measure import Settings
from benchmarks.rows import Row, Target
from tierkv.abc import EvictionPolicy
from tierkv.frames.frame import frame_bytes
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.policies.prefix_order import PrefixOrder
from tierkv.scheduler.wiring import WiredCore
from tierkv.structures.columns import column
from tierkv.structures.ranks import ranks_of
from tierkv.types.keys import Key
from tierkv.types.tier_ops import TierContent

TARGET = Target("measured", "<=", 200.0)
PROMPT_CHUNKS = 256
RANK_BYTES = 8


def run(settings: Settings) -> Iterator[Row]:
    """Measure the host tier with every policy, and a lower tier with an index."""
    count = settings.pick(1_000_000, 5_000)
    hashes = random_hashes(count, seed=1)
    key_bytes = _traced(lambda: keys_of(hashes)) / count - 8  # without the list's reference
    keys = keys_of(hashes)
    plain = _traced(lambda: {key: number for number, key in enumerate(keys)}) / count + key_bytes
    for name in policy_names():
        _filled_host(name, keys[:1])  # modules that it imports are no memory of a chunk
        new = _traced(partial(_filled_policy, name, keys)) / count
        used = _traced(partial(_used_policy, name, keys)) / count
        ranks = _traced(partial(_ranked_policy, name, keys, column("Q", count))) / count - new
        whole = _traced(partial(_filled_host, name, keys)) / count + key_bytes + used - new + ranks
        yield Row(
            f"host tier, {name}, {count:,} chunks",
            "B/chunk",
            whole,
            "a dict from key to integer, keys included",
            plain,
            target=TARGET,
            extra={
                "of it the policy, B": used,
                "of it the places in prompts, B": ranks + RANK_BYTES,
                "of it the key, B": key_bytes,
            },
        )
    yield Row(
        f"lower tier with an index, {count:,} chunks",
        "B/chunk",
        _traced(lambda: _filled_lower(keys)) / count + key_bytes,
        "a dict from key to integer, keys included",
        plain,
        target=TARGET,
        extra={"of it the key, B, shared with the host tier's where both have it": key_bytes},
    )


def _traced(build: Callable[[], object]) -> int:
    """Bytes that stay allocated after building something."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        built = build()
        after, _ = tracemalloc.get_traced_memory()
        del built
    finally:
        tracemalloc.stop()
    return after - before


def _filled_policy(name: str, keys: list[Key]) -> EvictionPolicy:
    policy = open_policy(name, len(keys))
    policy.add(range(len(keys)), keys)
    return policy


def _ranked_policy(name: str, keys: list[Key], ranks: memoryview[int]) -> PrefixOrder:
    """Policy filled with prompts of :data:`PROMPT_CHUNKS` chunks. ranks: the column of its tier."""
    order = PrefixOrder(open_policy(name, len(keys)), None, ranks)
    for number, start in enumerate(range(0, len(keys), PROMPT_CHUNKS)):
        prompt = keys[start : start + PROMPT_CHUNKS]
        order.add(range(start, start + len(prompt)), prompt, ranks_of(str(number), range(16, 16 * len(prompt) + 1, 16)))
    return order


def _used_policy(name: str, keys: list[Key]) -> EvictionPolicy:
    """Policy from which every chunk was evicted once, so that its history is full."""
    policy, holds = _filled_policy(name, keys), bytes(len(keys))
    for batch in batches_of(keys, 1024):
        victims = policy.evict(len(batch), holds)
        policy.add(victims, [Key(key[::-1]) for key in batch[: len(victims)]])
    return policy


def _filled_host(name: str, keys: list[Key]) -> WiredCore:
    core = make_core(len(keys), policy=name)
    fill(core.host, keys)
    return core


def _filled_lower(keys: list[Key]) -> LowerTier:
    limits = LowerTierLimits(capacity_bytes=None, write=WritePolicy.THROUGH, queue_chunks_max=1)
    lower = LowerTier(0, "lower", CAPABILITIES, limits, open_policy("lru", len(keys)))
    size = frame_bytes(1 << 21)
    lower.load_index(TierContent(keys, array("Q", [size]) * len(keys)))
    return lower
