"""Layout of the backend distributions: one plan of module names, as docs/how-to/write-a-backend.md states it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/write-a-backend.md"
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("plugins/*/src/*/__init__.py"))}
LARGE = {name: folder for name, folder in PACKAGES.items() if len(list(folder.glob("*.py"))) > 1}
"""Packages of several modules. A small backend may keep every role in its ``__init__``."""

ROLES = {
    "__init__": r"PLUGIN$|tierkv_backends$",
    "options": r"\w+Options$",
    "opening": r"open_backend$",
    "checking": r"check$",
    "failures": r"as_tier_error$|Failures?$",
    "backend": r"\w+Backend$",
}
"""File of each role that every backend has, and the names that it must define: at least one matches."""

READ_ONLY_ROLES = {"__init__": r"READ_ONLY_PLUGIN$", "opening": r"open_reader$", "reader": r"\w+Reader$"}
"""Roles of a package with a read-only sibling."""

MODULES_MAX = 12
"""Largest number of modules in one folder; beyond it, the package needs wings."""

PACKAGE_LINES_MIN = 10
WING_LINES_MIN = 5
"""Lines of the docstring in which a package or a wing states its theory of operation."""


def defined_in(path: Path) -> set[str]:
    """Names that a module defines at its top level."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def missing_roles(folder: Path) -> list[str]:
    """Roles that a package lacks, or has in a file of another name."""
    roles = list(ROLES.items())
    if "READ_ONLY_PLUGIN" in defined_in(folder / "__init__.py"):
        roles += READ_ONLY_ROLES.items()
    missing = []
    for role, pattern in roles:
        path = folder / f"{role}.py"
        if not path.exists() or not any(re.match(pattern, name) for name in defined_in(path)):
            missing.append(f"{role}.py: {pattern}")
    return missing


def thin_docstrings(folder: Path) -> Iterator[str]:
    """Packages and wings whose docstring is too short for a theory of operation."""
    for path in folder.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        wanted = PACKAGE_LINES_MIN if path.parent == folder else WING_LINES_MIN
        if len(text.splitlines()) < wanted:
            yield str(path.relative_to(ROOT))


def wings_used(folder: Path) -> dict[str, set[str]]:
    """Wings of a package, each with the other wings that its modules import."""
    wings = {path.parent.name for path in folder.glob("*/__init__.py")}
    used: dict[str, set[str]] = {}
    for wing in wings:
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (folder / wing).glob("*.py")]
        froms = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        used[wing] = {other for other in wings - {wing} for name in names if name.startswith(f"{folder.name}.{other}.")}
    return used


def circles_of(used: dict[str, set[str]]) -> list[str]:
    """Wings that cannot be put in an order in which each imports only previous ones."""
    left = dict(used)
    while free := [wing for wing, others in left.items() if not others & left.keys()]:
        for wing in free:
            del left[wing]
    return sorted(left)


def inherited_classes(folder: Path) -> list[str]:
    """Classes of a package that inherit from another class of the package, but for errors and protocols."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    concrete = {node.name for node in classes if not any(ast.unparse(base) == "Protocol" for base in node.bases)}
    return [
        f"{node.name}({base})"
        for node in classes
        for base in map(ast.unparse, node.bases)
        if base in concrete and not base.endswith("Error")
    ]


def test_there_are_large_backends() -> None:
    """The checks below would pass on an empty folder."""
    assert set(LARGE) >= {"tierkv_disk", "tierkv_lmdb", "tierkv_fsspec"}


@pytest.mark.parametrize("name", LARGE)
def test_roles_have_their_files(name: str) -> None:
    """A reader who knows one backend finds the same role in the same file of another one."""
    assert not missing_roles(LARGE[name])


@pytest.mark.parametrize("name", LARGE)
def test_packages_and_wings_state_their_theory(name: str) -> None:
    """Nouns, flow and invariants are in the ``__init__`` of each package and wing."""
    assert not list(thin_docstrings(LARGE[name]))


@pytest.mark.parametrize("name", PACKAGES)
def test_folders_have_wings(name: str) -> None:
    """A flat folder of many modules hides its order."""
    folders = {path.parent for path in PACKAGES[name].rglob("*.py")}
    crowded = {str(folder): count for folder in folders if (count := len(list(folder.glob("*.py")))) > MODULES_MAX}
    assert not crowded


@pytest.mark.parametrize("name", LARGE)
def test_wings_import_in_one_direction(name: str) -> None:
    """Wings that import each other are one room with two names."""
    assert not circles_of(wings_used(LARGE[name]))


@pytest.mark.parametrize("name", PACKAGES)
def test_backends_hold_instead_of_inheriting(name: str) -> None:
    """A read-only sibling holds the reads of the other one: what it can do is on one page."""
    assert not inherited_classes(PACKAGES[name])


def test_sibling_backends_are_named_alike() -> None:
    """The read-only sibling of backend ``x`` is ``x-read-only``, in every distribution."""
    for name, folder in LARGE.items():
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        if "READ_ONLY_PLUGIN" in defined_in(folder / "__init__.py"):
            backends = re.findall(r'\bname="([\w-]+)"', text)
            assert backends == [backends[0], f"{backends[0]}-read-only"], name


def test_page_lists_the_roles() -> None:
    """The table of the how-to page names exactly the files that this test requires."""
    rows = re.findall(r"^\| `(\w+)\.py`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(rows) == {*ROLES, *READ_ONLY_ROLES}


def test_a_missing_role_is_found(tmp_path: Path) -> None:
    """The check can fail."""
    (tmp_path / "__init__.py").write_text("PLUGIN = 1\nREAD_ONLY_PLUGIN = 2\n", encoding="utf-8")
    (tmp_path / "options.py").write_text("class Settings: ...\n", encoding="utf-8")
    found = {line.partition(".py")[0] for line in missing_roles(tmp_path)}
    assert found == {"options", "opening", "checking", "failures", "backend", "reader"}


def test_a_circle_of_wings_is_found() -> None:
    """The check can fail, and names the wings of the circle alone."""
    assert circles_of({"log": {"space"}, "space": {"log"}, "directory": set()}) == ["log", "space"]
    assert not circles_of({"log": {"directory"}, "directory": set()})


def test_an_inherited_class_is_found(tmp_path: Path) -> None:
    """The check can fail; errors may inherit."""
    source = "class A: ...\nclass B(A): ...\nclass AError(Exception): ...\nclass BError(AError): ...\n"
    (tmp_path / "backend.py").write_text(source, encoding="utf-8")
    assert inherited_classes(tmp_path) == ["B(A)"]
