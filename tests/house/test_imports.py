"""Rules of import beyond the layers: pure modules, plugins, and a program that starts fast."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PURE = {
    *("__future__", "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "functools"),
    *("heapq", "itertools", "math", "operator", "types", "typing", "tierkv"),
}
"""Modules that the scheduler and the manager may import. Time, randomness and I/O reach them as values."""

IMPURE_BUILTINS = {"open", "print", "input", "eval", "exec", "breakpoint", "__import__"}
SEAM = ("tierkv.abc", "tierkv.types", "tierkv.errors", "tierkv.hookspecs")
"""All that a plugin may know of tierkv."""


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def impurities_of(source: str) -> list[str]:
    """Imports and calls that a sans-IO module must not have."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    used = {node.func.id for node in calls if isinstance(node.func, ast.Name)} & IMPURE_BUILTINS
    imported = [f"line {line}: {name}" for line, name in imports_of(source) if name.partition(".")[0] not in PURE]
    return imported + [f"{name}()" for name in sorted(used)]


def beyond_the_seam(source: str) -> list[str]:
    """Imports of tierkv that a plugin must not have."""
    ours = [(line, name) for line, name in imports_of(source) if name.partition(".")[0] == "tierkv"]
    return [
        f"line {line}: {name}"
        for line, name in ours
        if not name.startswith(tuple(f"{part}." for part in SEAM)) and name not in SEAM
    ]


PUBLIC = {"os._exit"}
"""Documented names of the standard library that begin with an underscore."""


def private_reaches(source: str) -> list[str]:
    """Private attributes of other objects that a module names."""
    attributes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in attributes
        if node.attr.startswith("_")
        and not node.attr.endswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
        and ast.unparse(node) not in PUBLIC
    ]


def modules(*patterns: str) -> list[object]:
    """Parameters: the modules that match."""
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


@pytest.mark.parametrize(
    "path",
    [each for each in modules("tierkv/**/*.py", "plugins/*/src/**/*.py") if "testing" not in str(each)],
)
def test_no_place_that_fails_looks_absent(path: Path) -> None:
    """``Path.exists()`` says no where a place cannot be looked at (Python 3.14). tierkv.abc.places.exists() raises."""
    calls = [line for line in path.read_text(encoding="utf-8").splitlines() if ".exists()" in line]
    assert not calls, "call tierkv.abc.places.exists(path)"


@pytest.mark.parametrize("path", modules("tierkv/scheduler/**/*.py", "tierkv/manager/**/*.py"))
def test_scheduler_and_manager_are_sans_io(path: Path) -> None:
    """The same code must run under an engine, in a property test and in a simulation of a day within seconds."""
    found = impurities_of(path.read_text(encoding="utf-8"))
    assert not found, f"{path}: {found}: let it come in through the constructor, or go out as an instruction"


@pytest.mark.parametrize("path", modules("plugins/*/src/**/*.py"))
def test_a_plugin_knows_the_seam_alone(path: Path) -> None:
    """Otherwise a change inside the framework would break plugins that state the right SPI version."""
    found = beyond_the_seam(path.read_text(encoding="utf-8"))
    assert not found, f"{path}: {found}: a plugin imports {', '.join(SEAM)} and nothing else of tierkv"


@pytest.mark.parametrize("path", modules("tierkv/testing/**/*.py"))
def test_the_kit_reaches_no_private_name(path: Path) -> None:
    """The kit ships to plugin authors: it must survive every change inside the core."""
    found = private_reaches(path.read_text(encoding="utf-8"))
    assert not found, f"{path}: {found}: use stack.introspection, or add what is missing there"


@pytest.mark.parametrize("source", ["stack._parts", "self.stack._manager.tiers", "stack._a.b", "self._stack._manager"])
def test_a_private_reach_is_found(source: str) -> None:
    """The check of the kit can fail."""
    assert private_reaches(source)
    assert not private_reaches("self._stack.tiers.__class__")


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from os import path",
        "def f():\n    import random",
        "import numpy as np",
        "print(1)",
        "open('x')",
    ],
)
def test_an_impurity_is_found(source: str) -> None:
    """The check of sans-IO modules can fail."""
    assert impurities_of(source)


@pytest.mark.parametrize(
    "source", ["import tierkv", "from tierkv import codecs", "from tierkv.manager import x", "import tierkv.abcd"]
)
def test_a_step_beyond_the_seam_is_found(source: str) -> None:
    """The check of plugins can fail, also for a module whose name only begins like an allowed one."""
    assert beyond_the_seam(source)


def test_what_is_allowed_is_not_refused() -> None:
    """The checks are about something: they let the intended imports pass."""
    assert not impurities_of("from collections import deque\nfrom tierkv.types.keys import Key\nlen('x')")
    assert not beyond_the_seam("from tierkv.abc import Backend\nfrom tierkv import errors\nimport tierkv.types.keys")


def loaded_by(program: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after a program, beyond the standard library."""
    report = "import json, sys; sys.stderr.write('\\n' + json.dumps(list(sys.modules)))"
    command = [sys.executable, "-I", "-c", f"{program}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])} - sys.stdlib_module_names


def test_importing_tierkv_loads_nothing_heavy() -> None:
    """Engines and tools that may never open a stack run ``import tierkv``: it must cost no time and no memory."""
    assert loaded_by("import tierkv") <= {"tierkv", "__main__"} | loaded_by("pass")


def test_help_loads_no_torch() -> None:
    """``tierkv --help`` answers at once: torch alone takes seconds to import."""
    program = (
        "import sys; sys.argv = ['tierkv', '--help']\n"
        "from tierkv.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    heavy = {"torch", "transformers", "fsspec", "aiohttp", "botocore", "obstore", "lmdb"}
    assert not loaded_by(program) & heavy
