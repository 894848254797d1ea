"""Deferrals of a request, and bytes read from below per byte that the engine used.

A hand engine drives a whole stack over a real disk tier. A step takes longer than the reads of one prompt, so
deferrals depend on the protocol and not on the disk. Existence in an authoritative tier is known at once; only the wait
for bytes remains.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Settings
from benchmarks.rows import Row, Target
from tierkv.frames.frame import HEADER_BYTES
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack
from tierkv.testing.engines.hand_engine import HandEngine, HandRequest, Prompt, engine_spec
from tierkv.types.engine import StepOutput

MIB = 1 << 20
STEPS_MAX = 2000


@dataclass(frozen=True, slots=True)
class Served:
    """Result of serving some prompts."""

    deferrals: int
    """Lookups that were answered with "not known yet"."""
    loaded_chunks: int
    """Chunks that were loaded instead of computed."""
    verified_bytes: int
    """Bytes of loaded chunks, each compared with what was computed once."""


@dataclass(frozen=True, slots=True)
class Place:
    """Disk tier, with the sizes and the pace of the engine above it."""

    path: Path
    payload_bytes: int
    """Payload bytes of a chunk."""
    step_s: float
    """Duration of a forward pass in seconds."""

    def open(self, host_chunks: int) -> Stack:
        """Stack with a host tier of ``host_chunks`` chunks."""
        disk = {"backend": "disk", "path": str(self.path), "capacity": 512 * MIB, "min_free_bytes": 0}
        config = {
            "host": {"capacity": host_chunks * (HEADER_BYTES + self.payload_bytes)},
            "tiers": [{**disk, "segment_bytes": 32 * MIB}],
        }
        return open_stack(config, engine_spec("benchmark", self.payload_bytes))

    def serve(self, stack: Stack, prompts: list[Prompt]) -> Served:
        """Serve prompts from first token to last, all at once, with an engine that has blocks for all of them.

        Raises:
            RuntimeError: a load failed, or there is no end.
            AssertionError: a loaded byte is not what was computed.
        """
        engine = HandEngine(stack, self.payload_bytes, 1 + sum(prompt.chunks + 1 for prompt in prompts))
        waiting = [engine.arrive(prompt) for prompt in prompts]
        loading: dict[str, tuple[HandRequest, int]] = {}
        ready: list[tuple[HandRequest, int]] = []
        deferrals = loaded_chunks = steps = 0
        while waiting or loading or ready or stack.has_pending_work():
            steps += 1
            if steps > STEPS_MAX:
                raise RuntimeError(f"no end after {steps} steps: {[request.request_id for request in waiting]} wait")
            for request in list(waiting):
                chunks = engine.ask(request)
                if chunks is None:
                    deferrals += 1
                    continue
                waiting.remove(request)
                engine.allocate(request, chunks)
                loaded_chunks += chunks
                if chunks:
                    loading[request.request_id] = (request, chunks)
                else:
                    ready.append((request, 0))
            ready = [loading.pop(request_id) for request_id in sorted(self._step(engine, ready))]
            for request, chunks in ready:
                engine.check(request, chunks)
        return Served(deferrals, loaded_chunks, loaded_chunks * self.payload_bytes)

    def _step(self, engine: HandEngine, ready: list[tuple[HandRequest, int]]) -> frozenset[str]:
        """Run one forward pass over the requests that are ready, and end them. Returns the loads that have ended."""

        def forward() -> None:
            for request, loaded in ready:
                engine.compute(request, loaded)
            time.sleep(self.step_s)

        entries = tuple(engine.schedule(request, loaded) for request, loaded in ready)
        report = engine.step(StepOutput(entries), forward)
        if report.invalid_block_ids:
            raise RuntimeError(f"blocks {sorted(report.invalid_block_ids)} could not be loaded")
        for request, _ in ready:
            engine.end(request)
        return frozenset(report.finished)


def run(settings: Settings) -> Iterator[Row]:
    """Measure deferrals, then bytes."""
    chunks = settings.pick(16, 4)
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
        place = Place(Path(folder) / "disk", settings.pick(MIB, 16 * 4096), settings.pick(0.1, 0.02))
        yield _from_host(place, chunks)
        yield _from_disk(place, chunks)
        yield from _bytes(place, "host tier twice the prefix", 2 * chunks, [chunks])
        yield from _bytes(place, "host tier one chunk smaller than the prefix", chunks - 1, [chunks])
        yield from _bytes(place, "host tier a third of the prefix", math.ceil(chunks / 3), [chunks])
        yield from _bytes(place, "four prompts at once, host tier for one and a half", 3 * chunks // 2, [chunks] * 4)


def _from_host(place: Place, chunks: int) -> Row:
    with place.open(2 * chunks) as stack:
        place.serve(stack, [Prompt(0, chunks)])
        served = place.serve(stack, [Prompt(0, chunks)])
    _require_all(served, chunks)
    return Row("prefix in the host tier", "deferrals", served.deferrals, target=Target("measured", "<=", 0))


def _from_disk(place: Place, chunks: int) -> Row:
    with place.open(2 * chunks) as stack:
        served = place.serve(stack, [Prompt(0, chunks)])
    _require_all(served, chunks)
    return Row("prefix on disk", "deferrals", served.deferrals, target=Target("measured", "<=", 1))


def _require_all(served: Served, chunks: int) -> None:
    if served.loaded_chunks != chunks:
        raise RuntimeError(f"{served.loaded_chunks} chunks were loaded of {chunks} that are stored")


def _bytes(place: Place, what: str, host_chunks: int, prompts: list[int]) -> Iterator[Row]:
    """Store the prompts through a large host tier, then serve them with the stack of a new process."""
    with place.open(2 * sum(prompts)) as stack:
        place.serve(stack, [Prompt(i, chunks) for i, chunks in enumerate(prompts)])
    with place.open(host_chunks) as stack:
        served = place.serve(stack, [Prompt(i, chunks) for i, chunks in enumerate(prompts)])
        used, read = stack.worker.bytes_loaded, stack.tiers.stats()["disk"]["bytes_read"]
    yield Row(
        what,
        "MiB read",
        read / MIB,
        "bytes that the engine used",
        used / MIB,
        target=Target("ratio", "<=", 1.05),
        extra={
            "of the prefixes answered, %": 100 * served.loaded_chunks / sum(prompts),
            "deferrals": served.deferrals,
            "verified, MiB": served.verified_bytes / MIB,
        },
    )
