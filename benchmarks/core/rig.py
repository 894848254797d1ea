"""Rig of the core's benchmarks: scheduler and manager wired without I/O, keys, and requests."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from tierkv.abc import EvictionPolicy
from tierkv.manager.host.chunk_state import ChunkEvent, ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.plugins.loading import load_plugins
from tierkv.scheduler.wiring import WiredCore, wire_core
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key

BLOCK_TOKENS = 16
PAGE_BYTES = 4096
HASH_BYTES = 32
ENGINE = EngineSpec("benchmark", "bfloat16", (GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,)),), BLOCK_TOKENS)
GEOMETRY = Geometry.of(ENGINE)
_T = TypeVar("_T")


def random_hashes(count: int, seed: int) -> list[bytes]:
    """Make chained hashes, as an engine does."""
    stream = random.Random(seed).randbytes(HASH_BYTES * count)
    return [stream[i : i + HASH_BYTES] for i in range(0, len(stream), HASH_BYTES)]


def keys_of(hashes: Iterable[bytes]) -> list[Key]:
    """Keys of the one group; every call makes new objects, equal to the previous ones."""
    return [make_key(chunk_hash, 0) for chunk_hash in hashes]


def batches_of(items: Sequence[_T], count: int) -> list[Sequence[_T]]:
    """Split keys or other items into batches of ``count``."""
    return [items[i : i + count] for i in range(0, len(items), count)]


def copies_of(hashes: Iterable[bytes]) -> list[bytes]:
    """Equal hashes in new objects, without a cached hash of their own, as a new request has them."""
    return [bytes(bytearray(chunk_hash)) for chunk_hash in hashes]


def plain_loop() -> int:
    """Loop of Python that takes about as long as a usual call: its worst case shows the machine's part of a maximum."""
    total = 0
    for number in range(8_000):
        total += number
    return total


@dataclass
class BenchRequest:
    """Prompt of whole chunks."""

    request_id: str
    block_hashes: list[bytes]
    kv_transfer_params: None = None
    num_tokens: int = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Count the tokens."""
        self.num_tokens = self.num_prompt_tokens = len(self.block_hashes) * BLOCK_TOKENS


def policy_names() -> list[str]:
    """Names of all installed eviction policies."""
    return sorted(load_plugins().policies)


def open_policy(name: str, chunks_max: int) -> EvictionPolicy:
    """Open a policy by name."""
    return load_plugins().require_policy(name).plugin.open(chunks_max)


def make_core(slots: int, *, policy: str = "lru", lower: Sequence[LowerTier] = ()) -> WiredCore:
    """Wire a scheduler over a manager and begin a step; waiting requests may reserve all slots."""
    core = wire_core(GEOMETRY, HostTier(slots, open_policy(policy, slots)), lower)
    core.manager.begin_step(0.0)
    core.scheduler.begin_step(0.0)
    return core


def fill(host: HostTier, keys: Iterable[Key]) -> None:
    """Make chunks readable in the host tier, past the manager: nothing is written below and no event is kept."""
    keys = iter(keys)
    while batch := list(islice(keys, 1024)):
        host.evict_for(len(batch))
        host.filled(host.admit(batch, ChunkState.STORING), ChunkEvent.STORED)
