"""The path of a bad frame: damaged on the disk, refused by the framework, its pages out of service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from disk_support import PAGE, OpenDisk, make_namespace

from tierkv.frames.frame import HEADER_BYTES
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.testing.frames import make_key
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, Verb
from tierkv.types.transfers import SlotRef
from tierkv_disk import CAPABILITIES


def test_a_bad_frame_is_stored_elsewhere(
    open_disk: OpenDisk, directory: Path, page_of: Callable[[Key], tuple[Path, int]]
) -> None:
    """A flipped bit is a miss, the deletion frees no page, and the chunk is stored again elsewhere."""
    session = open_disk(frame_bytes_max=2 * PAGE, capacity_bytes=8 * PAGE)
    arena, key = HostArena(2 * 2 * PAGE, PAGE), make_key(1)
    sealer = FrameSealer(make_namespace().fingerprint())
    tier = Tier("disk", session.backend, CAPABILITIES, "none", {}, sealer, arena)
    payload = arena.payload(0)
    payload[:PAGE] = 0x11
    sealer.seal(arena.slot(0), key, PAGE)
    source, target = SlotRef(0, 1), SlotRef(1, 1)
    assert tier.perform(Verb.WRITE, [key], [source]).outcomes[0].kind is OutcomeKind.OK
    path, page = page_of(key)
    with path.open("r+b") as file:
        file.seek(page * PAGE + HEADER_BYTES + 7)
        file.write(b"\x12")
    assert tier.perform(Verb.READ, [key], [target]).outcomes[0].kind is OutcomeKind.CORRUPT
    assert tier.perform(Verb.DELETE, [key]).outcomes[0].kind is OutcomeKind.OK
    assert tier.perform(Verb.WRITE, [key], [source]).outcomes[0].kind is OutcomeKind.OK
    assert page_of(key) != (path, page)
    assert tier.perform(Verb.READ, [key], [target]).outcomes[0].kind is OutcomeKind.OK
    (line,) = map(json.loads, (directory / "quarantine.jsonl").read_text().splitlines())
    assert line["runs"] == [{"segment": 0, "page": page, "pages": 2}]
    assert "checksum" in line["reason"]
