"""The crash harness: a few seeds of each mode hold, and each of its oracles finds a backend that breaks a promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the harness."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("backend", ["disk", "fsspec", "lmdb"])
def test_a_few_seeds_hold(tmp_path: Path, backend: str) -> None:
    """The session ``crash`` plays more; this says that it works at all."""
    done = run_program("harness", "crash", "--backend", backend, "--count", "6", "--json", "--place", str(tmp_path))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    totals = {total["name"]: total for total in json.loads(done.stdout)}
    assert set(totals) == {f"{backend} {mode}" for mode in ("kills", "calls", "cuts", "upkeep")}
    assert all(total["count"] >= 6 or total["skipped"] for total in totals.values())
    assert not list(tmp_path.iterdir()), "files were left"


READ_BACK = "possible|is not what was stored just now"
"""Finding of a wrong read: after the kill, or where that came too early, after a later write."""


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("early", READ_BACK),
        ("wrong", READ_BACK),
        ("sulking", "no write succeeds"),
        ("unforced", "possible"),
        ("unforced-lmdb", ""),
        ("torn-export", "no frame of this namespace and name"),
        ("late-manifest", "missing: .*the manifest has"),
        ("unseen", "the journal lacks calls that changed segment-"),
    ],
)
def test_an_oracle_finds(name: str, finding: str) -> None:
    """An oracle that finds nothing in a backend that breaks its promise would prove nothing."""
    done = run_program("harness.broken_targets", name)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout)
    assert done.stdout.strip() != "nothing"
    assert re.search(finding, done.stdout)


def test_the_place_is_made(tmp_path: Path) -> None:
    """A path that cannot be one is refused by its name."""
    (tmp_path / "file").write_bytes(b"")
    done = run_program("harness", "crash", "--place", str(tmp_path / "file" / "below"))
    assert (done.returncode, "below' cannot hold files" in done.stderr) == (2, True)
    done = run_program(
        "harness", "crash", "--backend", "disk", "--mode", "upkeep", "--count", "1", "--place", str(tmp_path / "new")
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_help_names_every_mode() -> None:
    """The help is the manual of the session."""
    done = run_program("harness", "crash", "--help")
    assert all(f"  {mode} " in done.stdout for mode in ("kills", "calls", "cuts", "upkeep"))
