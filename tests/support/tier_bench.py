"""Tier over real files, with functions to fill and inspect slots. Shared by the tests of tiers and of dispatch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codec_parts import open_codec
from plain_files import AsyncPlainFiles, PlainFiles, PlainOptions

from tierkv.abc import BackendContext, Capabilities, Codec
from tierkv.frames.frame import HEADER_BYTES, checksum
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.testing.faults import FaultyBackend
from tierkv.testing.manual_clock import ManualClock
from tierkv.tiers.retry import RetryLimits, Timing
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace
from tierkv.types.tier_ops import Outcome, Verb
from tierkv.types.transfers import SlotRef

PAYLOAD_BYTES = 10_000
CODECS: Mapping[str, Codec] = {name: open_codec(name) for name in ("none", "zstd", "bf16", "fp8", "int8")}
NAMESPACE = Namespace("model", "", "bf16", "page", ((16, (4096,), "full_attention", None),), 4, 16)
ONCE = RetryLimits(attempts=1)


@dataclass
class Bench:
    """Collaborators of one tier."""

    place: Path
    arena: HostArena
    sealer: FrameSealer
    files: PlainFiles | AsyncPlainFiles
    backend: FaultyBackend
    clock: ManualClock = field(default_factory=ManualClock)

    def tier(self, codec: str = "none", *, asynchronous: bool = False, **changes: Any) -> Tier:
        """Return a tier over the files. changes: capabilities, codecs, retry, timing, sealer."""
        declared = changes.pop("capabilities", Capabilities(preferred_batch=4))
        codecs = changes.pop("codecs", CODECS)
        sealer = changes.pop("sealer", self.sealer)
        backend = self.files if asynchronous else self.backend
        changes.setdefault("retry", ONCE)
        changes.setdefault("timing", Timing(self.clock))
        return Tier("files", backend, declared, codec, codecs, sealer, self.arena, **changes)

    def fill(self, slot: int, key: Key, payload: bytes, parts: int = 1) -> SlotRef:
        """Store a chunk in a slot, as one or several workers would."""
        view = self.arena.slot(slot)
        view[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        if parts == 1:
            self.sealer.seal(view, key, len(payload))
        else:
            size = len(payload) // parts
            digests = [checksum(payload[start : start + size]) for start in range(0, len(payload), size)]
            self.sealer.seal_parts(view, key, len(payload), digests)
        return SlotRef(slot, 1)

    def payload(self, slot: int, key: Key) -> bytes:
        """Return the payload of a slot that must hold ``key``."""
        view = self.arena.slot(slot)
        header = self.sealer.check_slot(view, key)
        return bytes(view[HEADER_BYTES : HEADER_BYTES + header.raw_bytes])

    def file(self, key: Key) -> Path:
        """Return the path of the frame of ``key``."""
        inner = self.files.files if isinstance(self.files, AsyncPlainFiles) else self.files
        return inner.path(key)

    def stale(self, slots: Sequence[int]) -> list[SlotRef]:
        """Fill slots with the bytes of another chunk."""
        for slot in slots:
            self.arena.slot(slot)[:] = b"\x5a" * self.arena.slot_bytes
        return [SlotRef(slot, 2) for slot in slots]


def make_bench(
    place: Path, kind: type[PlainFiles | AsyncPlainFiles] = PlainFiles, *, beside: Bench | None = None
) -> Bench:
    """Open a directory and an arena of eight slots. With ``beside``, share arena and clock with another bench."""
    # Slots are a page longer than the chunks: what a file has too much then arrives, and must be seen.
    arena = beside.arena if beside else HostArena(8 * (HEADER_BYTES + 16_384), PAYLOAD_BYTES + 4096)
    context = BackendContext("files", NAMESPACE, arena.slot_bytes, None)
    files = kind(context, PlainOptions(str(place)))
    backend = FaultyBackend(files)  # type: ignore[arg-type]  # of an async one only the inner backend is used
    clock = beside.clock if beside else ManualClock()
    return Bench(place, arena, FrameSealer(NAMESPACE.fingerprint()), files, backend, clock)


def compressible(number: int, size: int = PAYLOAD_BYTES) -> bytes:
    """Return a payload that zstd shortens, different for each number."""
    return (random.Random(number).randbytes(50) * (size // 50 + 1))[:size]


def read_chunks(tier: Tier, keys: Sequence[Key], slots: Sequence[SlotRef]) -> list[Outcome]:
    """Read the raw frame of each key into its slot."""
    return tier.perform(Verb.READ, keys, slots).outcomes


def write_chunks(tier: Tier, keys: Sequence[Key], slots: Sequence[SlotRef]) -> list[Outcome]:
    """Write the chunk in each slot."""
    return tier.perform(Verb.WRITE, keys, slots).outcomes


def probe_chunks(tier: Tier, keys: Sequence[Key]) -> list[Outcome]:
    """Ask whether chunks are stored."""
    return tier.perform(Verb.PROBE, keys).outcomes


def delete_chunks(tier: Tier, keys: Sequence[Key]) -> list[Outcome]:
    """Delete chunks."""
    return tier.perform(Verb.DELETE, keys).outcomes
