"""How often a request is told "ask me again", and how much is read from below for what the engine used.

A whole stack over a real disk tier. A step lasts longer than the reads of one prompt, so a deferral is a matter of the
protocol and not of the disk. Existence in an authoritative tier is known at once; what remains is the wait for bytes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Settings
from benchmarks.rows import Row, Target
from benchmarks.workloads.small_engine import (
    BLOCKS_PER_CHUNK,
    CHUNK_TOKENS,
    TENSORS,
    Prompt,
    Served,
    SmallEngine,
    engine_spec,
)
from tierkv.frames.frame import HEADER_BYTES
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A disk tier, and the sizes that go with it."""

    path: Path
    page_bytes: int
    step_s: float

    @property
    def slot_bytes(self) -> int:
        """Of one chunk in the host tier."""
        return HEADER_BYTES + self.page_bytes * BLOCKS_PER_CHUNK * TENSORS

    def open(self, host_chunks: int) -> Stack:
        """A stack with a host tier of so many chunks."""
        disk = {"backend": "disk", "path": str(self.path), "capacity": 512 * MIB, "min_free_bytes": 0}
        config = {
            "chunk": {"tokens": CHUNK_TOKENS},
            "host": {"capacity": host_chunks * self.slot_bytes},
            "tiers": [{**disk, "segment_bytes": 32 * MIB}],
        }
        return open_stack(config, engine_spec(self.page_bytes))

    def serve(self, stack: Stack, prompts: list[Prompt]) -> Served:
        """With an engine that has room for all prompts at once."""
        blocks = 1 + sum(len(prompt.block_hashes) for prompt in prompts)
        return SmallEngine(stack, self.page_bytes, blocks, self.step_s).serve(prompts)


def run(settings: Settings) -> Iterator[Row]:
    """Deferrals, then bytes."""
    chunks = settings.pick(16, 4)
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
        place = Place(Path(folder) / "disk", settings.pick(64 << 10, 4096), settings.pick(0.1, 0.02))
        yield _from_host(place, chunks)
        yield _from_disk(place, chunks)
        yield from _bytes(place, "host tier twice the prefix", 2 * chunks, [chunks])
        yield from _bytes(place, "host tier one chunk smaller than the prefix", chunks - 1, [chunks])
        yield from _bytes(place, "host tier a third of the prefix", math.ceil(chunks / 3), [chunks])
        yield from _bytes(place, "four prompts at once, host tier for one and a half", 3 * chunks // 2, [chunks] * 4)


def _from_host(place: Place, chunks: int) -> Row:
    with place.open(2 * chunks) as stack:
        place.serve(stack, [Prompt("first", "0", chunks)])
        served = place.serve(stack, [Prompt("second", "0", chunks)])
    _require_all(served, chunks)
    return Row("prefix in the host tier", "deferrals", served.deferrals, target=Target("measured", "<=", 0))


def _from_disk(place: Place, chunks: int) -> Row:
    with place.open(2 * chunks) as stack:
        served = place.serve(stack, [Prompt("third", "0", chunks)])
    _require_all(served, chunks)
    return Row("prefix on disk", "deferrals", served.deferrals, target=Target("measured", "<=", 1))


def _require_all(served: Served, chunks: int) -> None:
    if served.loaded_tokens != chunks * CHUNK_TOKENS:
        raise RuntimeError(f"{served.loaded_tokens} tokens were loaded of {chunks * CHUNK_TOKENS} that are stored")


def _bytes(place: Place, what: str, host_chunks: int, prompts: list[int]) -> Iterator[Row]:
    """Store the prompts through a large host tier, then serve them in a new process's stack."""
    with place.open(2 * sum(prompts)) as stack:
        place.serve(stack, [Prompt(f"store-{i}", f"{i}", chunks) for i, chunks in enumerate(prompts)])
    with place.open(host_chunks) as stack:
        served = place.serve(stack, [Prompt(f"load-{i}", f"{i}", chunks) for i, chunks in enumerate(prompts)])
        used, read = stack.worker.bytes_loaded, stack.tiers.stats()["disk"]["bytes_read"]
    yield Row(
        what,
        "MiB read",
        read / MIB,
        "bytes that the engine used",
        used / MIB,
        target=Target("ratio", "<=", 1.05),
        extra={
            "of the prefixes answered, %": 100 * served.loaded_tokens / (sum(prompts) * CHUNK_TOKENS),
            "deferrals": served.deferrals,
            "verified, MiB": served.verified_bytes / MIB,
        },
    )
