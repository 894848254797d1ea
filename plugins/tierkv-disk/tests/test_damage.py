"""Damage of every file of a tier at rest: no crash, no hang, no wrong frame, and everything storable again."""

from __future__ import annotations

import os
from pathlib import Path

import disk_damage

from tierkv.frames.frame import HEADER_BYTES
from tierkv.testing.damage import run_program

COUNT = int(os.environ.get("TIERKV_DISK_DAMAGE", "150"))
"""Number of changes; the variable gives more."""
SEED = int(os.environ.get("TIERKV_DISK_SEED", "1"))


def test_damage_by_field(tmp_path: Path) -> None:
    """Each change is played in a process of its own; ``--only SEED`` of ``disk_damage.py`` repeats one."""
    summary = run_program(Path(disk_damage.__file__), tmp_path, COUNT, SEED)
    assert set(summary["kinds"]) == set(disk_damage.KINDS)
    assert summary["notes"].get("refused", 0) < COUNT / 10, "most damage is healed"


def test_a_wrong_frame_is_recognised() -> None:
    """The oracle itself: an earlier version is right, damage is a miss, and a sealed frame of other bytes is wrong."""
    assert not disk_damage.STORED.is_wrong(1, disk_damage.STORED.frame(1, 2))
    damaged = bytearray(disk_damage.STORED.frame(1, 2))
    damaged[HEADER_BYTES + 5] ^= 1
    assert not disk_damage.STORED.is_wrong(1, bytes(damaged))
    assert disk_damage.STORED.is_wrong(1, disk_damage.STORED.frame(1, disk_damage.VERSIONS + 1))
