"""Damage of every file of a directory at rest: no crash, no hang, no wrong frame, and everything storable again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec_damage

COUNT = int(os.environ.get("TIERKV_FSSPEC_DAMAGE", "60"))
"""Number of changes; the variable gives more."""


def test_damage_by_field(tmp_path: Path) -> None:
    """Changes are played in forked processes; ``--only SEED`` of ``fsspec_damage.py`` repeats one."""
    program = Path(fsspec_damage.__file__)
    command = [sys.executable, program.name, "--place", str(tmp_path), "--count", str(COUNT), "--seed", "1"]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=60 + COUNT, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary = json.loads(done.stdout)
    assert summary["broken"] == []
    assert set(summary["kinds"]) == set(fsspec_damage.KINDS)
    assert summary["notes"].get("refused", 0) < COUNT / 6, "most damage is healed"
