"""Rig of the tiers' benchmarks: a real lower tier behind a real dispatcher, and frames to move."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tierkv.abc import BackendContext, CodecContext
from tierkv.config.loading import parse_config
from tierkv.config.resolving import ResolvedTier, resolve
from tierkv.dispatch import Dispatcher, TierLimits
from tierkv.frames.frame import HEADER_BYTES
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import Bytes, HostArena
from tierkv.plugins.loading import load_plugins
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key, make_key
from tierkv.types.namespace import Namespace
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth, TierOp, Verb
from tierkv.types.transfers import SlotRef

NAMESPACE = Namespace("benchmark", "", "uint8", "page", ((16, (1 << 16,), "full_attention", None),), 1, 16)
TIMEOUT_S = 300.0
"""Seconds that a call may take."""

POLL_S = 0.002
"""Time between two looks for completions: a fast engine steps as often. Looking four times as often took a tenth of the
processor time of a tier."""


def huge_memory(size: int) -> Bytes:
    """Return memory like the arena's, with huge pages where available: both sides of a copy are of one kind."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class Frames:
    """Arena full of sealed frames of random bytes.

    Attributes:
        keys, slots: of all frames, in order. frame_bytes: of one. total_bytes: payload of all.
    """

    def __init__(self, count: int, payload_bytes: int) -> None:
        self.arena = HostArena(count * (HEADER_BYTES + payload_bytes), payload_bytes)
        self.sealer = FrameSealer(NAMESPACE.fingerprint())
        self.keys = [make_key(number.to_bytes(32, "big"), 0) for number in range(count)]
        self.slots = [SlotRef(number, 0) for number in range(count)]
        self.frame_bytes = self.arena.slot_bytes
        self.payload_bytes = payload_bytes
        self.total_bytes = count * payload_bytes
        self._originals = np.random.default_rng(1).integers(256, size=(count, payload_bytes), dtype=np.uint8)
        self.fill()

    def fill(self) -> None:
        """Write every frame into its slot."""
        for number, (key, ref) in enumerate(zip(self.keys, self.slots, strict=True)):
            np.copyto(self.arena.payload(ref.slot)[: self.payload_bytes], self._originals[number])
            self.sealer.seal(self.arena.slot(ref.slot), key, self.payload_bytes)

    def wipe(self) -> None:
        """Overwrite the slots, so that no byte is what will be read; also touches all of their pages."""
        for ref in self.slots:
            self.arena.payload(ref.slot)[:] = 0

    def verify(self) -> None:
        """Compare every byte in the slots.

        Raises:
            RuntimeError: one differs.
        """
        for number, ref in enumerate(self.slots):
            if not np.array_equal(self.arena.payload(ref.slot)[: self.payload_bytes], self._originals[number]):
                raise RuntimeError(f"frame {number} is not what was written")


def disk_options(path: Path, frames: Frames) -> dict[str, object]:
    """Configuration of a disk tier with one segment for all frames, and room for twice as many."""
    space = len(frames.keys) * frames.frame_bytes
    return {
        "backend": "disk",
        "path": str(path),
        "capacity": 2 * space,
        "segment_bytes": space,
        "min_free_bytes": 0,
    }


@dataclass(frozen=True, slots=True)
class OpenTier:
    """Tier in service."""

    dispatcher: Dispatcher
    batch: int
    read_batch: int
    threads: int

    def put(self, frames: Frames) -> None:
        """Write all frames."""
        self._run(Verb.WRITE, frames.keys, frames.slots)

    def get(self, frames: Frames) -> None:
        """Read all frames into their slots; the tier verifies each."""
        self._run(Verb.READ, frames.keys, frames.slots)

    def probe(self, frames: Frames) -> None:
        """Probe all frames, as a lookup does."""
        self._run(Verb.PROBE, frames.keys, ())

    def delete(self, frames: Frames) -> None:
        """Delete all frames."""
        self._run(Verb.DELETE, frames.keys, ())

    def _run(self, verb: Verb, keys: Sequence[Key], slots: Sequence[SlotRef]) -> None:
        batch = self.read_batch if verb is Verb.READ else self.batch
        for start in range(0, len(keys), batch):
            part = slice(start, start + batch)
            self.dispatcher.submit(TierOp(start, 0, verb, tuple(keys[part]), tuple(slots[part]), TIMEOUT_S))
        ended = 0
        while ended < len(keys):
            for completion in self.dispatcher.drain(1024):
                match completion:
                    case TierHealth(reason=reason):
                        raise RuntimeError(f"the tier went out of service: {reason}")
                    case Completion(outcomes=outcomes):
                        _require_ok(verb, outcomes)
                        ended += len(outcomes)
            time.sleep(POLL_S)


def _require_ok(verb: Verb, outcomes: Sequence[Outcome]) -> None:
    good = (OutcomeKind.OK, OutcomeKind.ABSENT) if verb is Verb.PROBE else (OutcomeKind.OK,)
    bad = [outcome for outcome in outcomes if outcome.kind not in good]
    if bad:
        raise RuntimeError(f"{verb.value}: {bad[0]}")


def _resolved(options: dict[str, object]) -> ResolvedTier:
    config = parse_config({"host": {"capacity": "1MiB"}, "tiers": [options]})
    return resolve(config, load_plugins()).tiers[0]


@contextmanager
def opened(options: dict[str, object], frames: Frames) -> Iterator[OpenTier]:
    """Open the tier of this part of a stack's configuration."""
    resolved = _resolved(options)
    config = resolved.config
    context = BackendContext(config.name, NAMESPACE, frames.frame_bytes, config.capacity)
    backend = resolved.backend.open(context, resolved.options)
    codec = resolved.codec
    codecs = {codec.name: codec.open(CodecContext(NAMESPACE), resolved.codec_options)}
    capabilities = resolved.backend.capabilities
    own_buffers = not capabilities.reads_end_with_call if config.own_buffers is None else config.own_buffers
    tier = Tier(
        config.name, backend, capabilities, codec.name, codecs, frames.sealer, frames.arena, own_buffers=own_buffers
    )
    limits = TierLimits(io_threads=resolved.io_threads)
    dispatcher = Dispatcher([tier], [limits], time.monotonic)
    try:
        threads = limits.concurrency(capabilities.preferred_concurrency)
        size = frames.frame_bytes
        yield OpenTier(dispatcher, capabilities.keys_per_write(size), capabilities.keys_per_read(size), threads)
    finally:
        dispatcher.close(60.0)
