"""The shape of the tree: sizes of modules, inheritance, and what each distribution must have."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 400
"""A longer module is a smell, not a fault: it gets a line in LONGER with the reason why it is not split."""

LONGER: dict[str, str] = {}
"""Path of a module to the reason why it is not split."""

MODULES_MAX = 12
"""Modules of a folder, beside its ``__init__``. More of them need wings."""

CROWDED = {
    "tierkv/stack": "what opens a stack, and what one holds: each is used by the others",
    "tierkv/testing/conformance/backend": "parts of one kit, each with its name in the report",
    "tierkv/types": "values without an order among them, imported by name everywhere",
}
"""Folder with more modules to the reason why it has no wings."""

INHERITS: dict[str, str] = {
    "Table": "configuration tables share one set of pydantic options",
    "KitBase": "a conformance kit is inherited by definition: pytest collects the methods of its classes",
    "StackKit": "fixtures of the kit for whole stacks, as KitBase",
    "*Tests": "parts of BackendConformance, which a backend author inherits as one class",
    "HandEngine": "SmallStack is the hand engine that opens its own stack; tests use either through one interface",
}
"""Concrete class that others inherit from ("*" matches any prefix), or one that inherits, to the reason."""

INTERFACES = {"Protocol", "ABC", "Exception", "NamedTuple", "TypedDict", "Enum", "StrEnum", "IntEnum", "IntFlag"}
"""Bases of classes without state of their own, and of errors and enumerations."""

SOURCES = ("tierkv/**/*.py", "plugins/*/src/**/*.py", "noxfile.py")
DISTRIBUTIONS = [
    pytest.param(path.parent, id=path.parent.name) for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))
]


def line_counts() -> dict[str, int]:
    """Lines of each module, the longest first."""
    paths = [path for pattern in SOURCES for path in ROOT.glob(pattern)]
    counts = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def test_modules_stay_small(record_testsuite_property: pytest.RecordTestSuite) -> None:
    """The field's worst module has one class of 1,908 lines; it began with 401."""
    counts = line_counts()
    record_testsuite_property("modules", len(counts))
    record_testsuite_property("longest", next(iter(counts.items())))
    long = {path: count for path, count in counts.items() if count > LINES_MAX and path not in LONGER}
    assert not long, f"split these, or give the reason in LONGER: {long}"


def test_reasons_for_long_modules_are_current() -> None:
    """A module that was split, or is gone, needs no excuse."""
    counts = line_counts()
    stale = [path for path in LONGER if counts.get(path, 0) <= LINES_MAX]
    assert not stale


def test_folders_have_wings() -> None:
    """A flat folder of many modules hides its order. A reason ends with the crowd that it excuses."""
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in (ROOT / "tierkv").rglob("*.py"))
    crowded = {folder for folder, count in folders.items() if count - 1 > MODULES_MAX}
    assert crowded == set(CROWDED)


def base_names(node: ast.ClassDef) -> list[str]:
    """Names of the bases of a class, without type arguments and modules."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [base.attr if isinstance(base, ast.Attribute) else ast.unparse(base) for base in bases]


def class_bases() -> dict[str, list[str]]:
    """Each class of the core with the names of its bases."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("tierkv/**/*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: base_names(node) for node in sorted(nodes, key=lambda node: len(node.bases))}


def is_interface(name: str, bases: dict[str, list[str]]) -> bool:
    """Whether a class is a Protocol, an ABC, an error or an enumeration."""
    return any(base in INTERFACES or (name.endswith("Error") and is_interface(base, bases)) for base in bases[name])


def concrete_inheritance() -> list[tuple[str, str]]:
    """Pairs of a class of the core and a concrete class of the core that it inherits from."""
    bases = class_bases()
    pairs = [(name, base) for name, names in bases.items() for base in names if base in bases]
    return [(name, base) for name, base in pairs if not is_interface(base, bases)]


def excuse(name: str, base: str) -> str | None:
    """The entry of INHERITS for a pair of classes."""
    suffixed = [entry for entry in INHERITS if entry.startswith("*") and base.endswith(entry[1:])]
    return next((entry for entry in (name, base, *suffixed) if entry in INHERITS), None)


def test_no_core_class_inherits_from_a_concrete_class() -> None:
    """A class that holds its parts is read part by part; one that inherits is read as a whole."""
    found = {f"{name}({base})" for name, base in concrete_inheritance() if excuse(name, base) is None}
    assert not found, f"hold an object instead of inheriting, or give the reason in INHERITS: {sorted(found)}"


def test_reasons_for_inheritance_are_current() -> None:
    """A reason whose class is gone would excuse the next class of that name."""
    used = {excuse(name, base) for name, base in concrete_inheritance()}
    assert set(INHERITS) == used - {None}


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_a_plugin_distribution_is_whole(folder: Path) -> None:
    """It is released by itself, so it carries its own license, README, types, tests and announcement."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == folder.name
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert any(requirement.startswith("tierkv>=") for requirement in project["dependencies"])
    assert project["entry-points"]["tierkv"], "the entry point through which tierkv finds it"
    assert (folder / project["readme"]).read_text(encoding="utf-8").startswith("# ")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert list(folder.glob("src/*/py.typed")), "a type marker"
    assert list(folder.glob("tests/**/test_*.py")), "tests"


def test_there_are_plugins() -> None:
    """The checks above would pass on an empty folder."""
    assert {path.values[0].name for path in DISTRIBUTIONS} >= {"tierkv-disk", "tierkv-lmdb", "tierkv-fsspec"}


def test_helper_modules_of_tests_have_names_of_their_own() -> None:
    """They are imported by bare names, so a second one of a name would get the first one's content."""
    paths = [path for pattern in ("tests/**/*.py", "plugins/*/tests/**/*.py") for path in ROOT.glob(pattern)]
    bare = [path for path in paths if not (path.parent / "__init__.py").exists()]  # packages have dotted names
    names = Counter(path.stem for path in bare if not path.stem.startswith("test_") and path.stem != "conftest")
    assert not [name for name, count in names.items() if count > 1]
