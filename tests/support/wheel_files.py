"""Files that a wheel must hold, and must not: ``python wheel_files.py dist/*.whl`` in the root of the repository."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path


def problems_of(wheel: Path) -> Iterator[str]:
    """Problems of a wheel: a missing type marker, license or data file, or files that no user needs."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {name.partition("/")[0] for name in names if name.endswith(".py")}
    required = {f"{package}/py.typed" for package in packages}
    if "tierkv" in packages:
        required |= set(data_files(Path("tierkv")))
    yield from (f"{wheel.name} lacks {name}" for name in sorted(required.difference(names)))
    if not any("/licenses/" in name for name in names):
        yield f"{wheel.name} lacks its LICENSE"
    if strays := [name for name in names if name.startswith(("tests/", "docs/"))]:
        yield f"{wheel.name} holds what no user needs: {strays}"


def data_files(package: Path) -> Iterable[str]:
    """Files of a package that are not Python: each must be in its wheel, ``default_stack.toml`` first of all."""
    skipped = {".py", ".pyc"}
    return [str(path.relative_to(package.parent)) for path in package.rglob("*.*") if path.suffix not in skipped]


if __name__ == "__main__":
    sys.exit("\n".join(problem for name in sys.argv[1:] for problem in problems_of(Path(name))) or 0)
