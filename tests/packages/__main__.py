"""``python -m packages DIST``: install what DIST holds into empty environments, and use it there."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from packages.environments import Environment, InstallError, WheelHouse

ROOT = Path(__file__).resolve().parents[2]
CORE = "tierkv"
KIT = ROOT / "plugins/tierkv-example/tests"
"""Tests that inherit the conformance kit, and need nothing but it."""


def parser() -> argparse.ArgumentParser:
    """Arguments of the program."""
    made = argparse.ArgumentParser(prog="python -m packages", description=__doc__)
    made.add_argument("dist", type=Path, help="folder with a wheel and a source archive of each distribution")
    made.add_argument("--constraints", type=Path, action="append", default=[], help="a file of versions for pip")
    made.add_argument("--lock", type=Path, help="a file of hashes that all other files must have")
    return made


def names_of(paths: list[Path]) -> dict[str, Path]:
    """Archives by the name of their distribution: the core first, since the smoke test of a plugin needs it."""
    found = {re.split(r"-\d", path.name, maxsplit=1)[0].replace("_", "-"): path for path in paths}
    return dict(sorted(found.items()))


def checks(dist: Path, folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Run all checks; yields a line for each one that has passed.

    Raises:
        InstallError: a check failed.
    """
    wheels, archives = names_of(list(dist.glob("*.whl"))), names_of(list(dist.glob("*.tar.gz")))
    if CORE not in wheels or wheels.keys() != archives.keys():
        raise InstallError(f"{dist} has wheels of {list(wheels)} and archives of {list(archives)}: build it again")
    house = WheelHouse(folder / "house", (*wheels.values(), *archives.values()))
    house.folder.mkdir()
    options = [option for path in arguments.constraints for option in ("--constraint", str(path))]
    core = f"{wheels[CORE]}[all,testing]"
    house.collect([core, *(str(path) for name, path in wheels.items() if name != CORE)], *options)
    if arguments.lock and (strangers := house.strangers(arguments.lock.read_text(encoding="utf-8"))):
        raise InstallError(f"{arguments.lock} has no hash of {', '.join(strangers)}: python -m nox -s lock")
    yield f"{len(list(house.folder.iterdir()))} wheels collected"

    place = folder / "empty"
    place.mkdir()
    for name in wheels:
        environment = Environment.make(folder / name)
        environment.install([name], [house.folder])
        yield f"{name}, wheel: {environment.smoke(sorted({CORE, name}), place)}"
    environment = Environment.make(folder / "all")
    environment.install([f"{CORE}[all,testing]"], [house.folder])
    backends = [name for name in wheels if name != "tierkv-example"]
    yield f"{CORE}[all,testing]: {environment.smoke(backends, place)}"
    tests = shutil.copytree(KIT, place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    yield f"{CORE}[all,testing] and {KIT.parent.name}: {kit_of(environment, house, tests)} tests of the kit found"
    environment = Environment.make(folder / "archives")
    environment.install(map(str, archives.values()), [house.folder])
    yield f"all source archives: {environment.smoke(list(archives), place)}"


def kit_of(environment: Environment, house: WheelHouse, tests: Path) -> int:
    """Number of the kit's tests for the example, which is no part of ``all``."""
    environment.install([KIT.parent.name], [house.folder])
    return environment.collect_kit(tests, tests.parent)


def main() -> int:
    """Check all distributions; 1 if one of them is of no use."""
    arguments = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        try:
            for line in checks(arguments.dist.resolve(), Path(folder), arguments):
                sys.stdout.write(f"{time.monotonic() - begin:5.1f} s  {line}\n")
                sys.stdout.flush()
        except InstallError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
