"""Damage of every file of a tier at rest: no crash, no hang, no wrong frame, and everything storable again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import disk_damage

from tierkv.frames.frame import HEADER_BYTES

COUNT = int(os.environ.get("TIERKV_DISK_DAMAGE", "150"))
"""Number of changes; the variable gives more."""
SEED = int(os.environ.get("TIERKV_DISK_SEED", "1"))


def test_damage_by_field(tmp_path: Path) -> None:
    """Each change is played in a process of its own; ``--only SEED`` of ``disk_damage.py`` repeats one."""
    program = Path(disk_damage.__file__)
    command = [sys.executable, program.name, "--place", str(tmp_path), "--count", str(COUNT), "--seed", str(SEED)]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=60 + COUNT, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary = json.loads(done.stdout)
    assert summary["broken"] == []
    assert set(summary["kinds"]) == set(disk_damage.KINDS)
    assert summary["notes"].get("refused", 0) < COUNT / 10, "most damage is healed"


def test_a_wrong_frame_is_recognised() -> None:
    """The oracle itself: an earlier version is right, damage is a miss, and a sealed frame of other bytes is wrong."""
    assert not disk_damage.STORED.is_wrong(1, disk_damage.STORED.frame(1, 2))
    damaged = bytearray(disk_damage.STORED.frame(1, 2))
    damaged[HEADER_BYTES + 5] ^= 1
    assert not disk_damage.STORED.is_wrong(1, bytes(damaged))
    assert disk_damage.STORED.is_wrong(1, disk_damage.STORED.frame(1, disk_damage.VERSIONS + 1))
