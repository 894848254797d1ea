"""The shape of the tree: sizes of modules, and what each distribution must have."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 400
"""Beyond this a module is a smell. One that must be longer gets a line in LONGER, with its reason."""

LONGER: dict[str, str] = {
    "tierkv/manager/host/host_tier.py": "one class: admission, holds and eviction change the same columns together",
}
"""Path of a module to the reason why it is not split."""

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
