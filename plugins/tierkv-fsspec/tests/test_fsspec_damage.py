"""Damage of every file of a directory at rest: no crash, no hang, no wrong frame, and everything storable again."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec_damage

from tierkv.testing.damage import run_program

COUNT = int(os.environ.get("TIERKV_FSSPEC_DAMAGE", "60"))
"""Number of changes; the variable gives more."""


def test_damage_by_field(tmp_path: Path) -> None:
    """Changes are played in forked processes; ``--only SEED`` of ``fsspec_damage.py`` repeats one."""
    summary = run_program(Path(fsspec_damage.__file__), tmp_path, COUNT)
    assert set(summary["kinds"]) == set(fsspec_damage.KINDS)
    assert summary["notes"].get("refused", 0) < COUNT / 6, "most damage is healed"
