"""The floors of the house hold (docs/explanation/decisions/0001-the-house.md), and the checks of them can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def check_floors(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over a checkout with the contracts of its pyproject.toml."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache', '--no-logo'])"
    command = [sys.executable, "-I", "-c", program]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=240)


def test_every_contract_holds(root: Path) -> None:
    """A floor that knows the one above it can no longer be understood, tested or replaced alone."""
    done = check_floors(root)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("types/keys.py", "import tierkv.manager.manager", "only from floors below"),
        ("manager/manager.py", "import tierkv.testing.frames", "only from floors below"),
        ("stray.py", "import tierkv.errors", "only from floors below"),
        ("manager/manager.py", "import threading", "no thread"),
        ("scheduler/search.py", "from time import monotonic", "no thread"),
        ("config/units.py", "import torch", "torch is imported"),
        ("abc/backend.py", "import numpy", "nothing but the standard library"),
        ("codecs/rogue.py", "import rich.table", "draws on a terminal"),
    ],
)
def test_a_breach_is_found(root: Path, tmp_path: Path, module: str, line: str, contract: str) -> None:
    """A contract with a misspelled module would hold for ever."""
    shutil.copytree(root / "tierkv", tmp_path / "tierkv", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    with (tmp_path / "tierkv" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = check_floors(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert contract in said.partition("Broken contracts")[2] or "stray" in said, done.stdout
