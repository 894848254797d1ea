"""The layers hold (docs/explanation/decisions/0001-layers.md), and the checks of them can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def check_layers(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over a checkout with the contracts of its pyproject.toml."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache', '--no-logo'])"
    command = [sys.executable, "-I", "-c", program]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=240)


def test_every_contract_holds(root: Path) -> None:
    """A layer that imports from a higher one cannot be understood, tested or replaced alone."""
    done = check_layers(root)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("types/keys.py", "import tierkv.manager.manager", "tierkv.types.keys -> tierkv.manager.manager"),
        (
            "manager/manager.py",
            "import tierkv.testing.frames",
            "tierkv.manager.manager -> tierkv.testing.frames",
        ),
        ("stray.py", "import tierkv.errors", "not listed as layers: - tierkv.stray"),
        ("manager/manager.py", "import threading", "tierkv.manager.manager -> threading"),
        ("scheduler/lookup/search.py", "from time import monotonic", "tierkv.scheduler.lookup.search -> time"),
        ("config/units.py", "import torch", "tierkv.config.units -> torch"),
        ("abc/backend.py", "import numpy", "tierkv.abc.backend -> numpy"),
        ("codecs/rogue.py", "import rich.table", "tierkv.codecs.rogue -> rich"),
    ],
)
def test_a_breach_is_found(root: Path, tmp_path: Path, module: str, line: str, found: str) -> None:
    """A contract with a misspelled module never fails."""
    shutil.copytree(root / "tierkv", tmp_path / "tierkv", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    with (tmp_path / "tierkv" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = check_layers(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert found in " ".join(done.stdout.split()), done.stdout
