"""Empty environments, and a folder with all that pip may put into them."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BUILDER = "hatchling"
"""Package with which pip builds a wheel from one of our source archives."""


class InstallError(Exception):
    """A distribution cannot be collected, installed, or used once it is installed."""


def run(command: Sequence[str], doing: str, *, offline: bool = False, folder: Path | None = None) -> str:
    """Run a command and return its output.

    Args:
        command: program and arguments.
        doing: what it does, for the error.
        offline: pip gets no configuration and no index, also where it builds a wheel in an environment of its own.
        folder: working directory.

    Raises:
        InstallError: the command failed; the error has the end of its output.
    """
    environment = {name: value for name, value in os.environ.items() if not (offline and name.startswith("PIP_"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"} if offline else {}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise InstallError(f"{doing} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class WheelHouse:
    """A folder with our wheels or source archives, and the wheels of what they require."""

    folder: Path
    ours: tuple[Path, ...]

    def collect(self, wanted: Iterable[str], *options: str) -> None:
        """Download what the wanted requirements need, from where pip's configuration says.

        Args:
            wanted: requirements; those of ours are paths of wheels, since an index may have others of these names.
            options: further ones for pip, such as constraints.

        Raises:
            InstallError: pip could not find or download something.
        """
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
        run([*command, "--dest", str(self.folder), *options, *wanted, BUILDER], "collecting the requirements")

    def strangers(self, lock: str) -> list[str]:
        """Files that are neither ours nor in the lock, by their hashes."""
        known = set(re.findall(r"--hash=sha256:(\w+)", lock)) | {sha256(path) for path in self.ours}
        return sorted(path.name for path in self.folder.iterdir() if sha256(path) not in known)


def sha256(path: Path) -> str:
    """Hash of a file as the lock writes it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment without pip; the pip of this process installs into it."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        """Make an empty one."""
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)], "making an environment")
        return cls(folder)

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def install(self, wanted: Iterable[str], places: Iterable[Path]) -> None:
        """Install requirements from folders, and from nowhere else.

        Raises:
            InstallError: something is missing there, or a wheel cannot be built.
        """
        links = [option for place in places for option in ("--find-links", str(place))]
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-compile"]
        run([*command, "--no-index", *links, *wanted], f"installing {', '.join(wanted)}", offline=True)

    def holds(self, package: str) -> bool:
        """Whether a package can be imported there."""
        library = sysconfig.get_path("purelib", "venv", {"base": str(self.folder), "platbase": str(self.folder)})
        return (Path(library) / package).exists()

    def smoke(self, names: Sequence[str], folder: Path) -> str:
        """Run the smoke test on these distributions, in a folder without a checkout.

        Raises:
            InstallError: it failed, or the environment has torch.
        """
        if self.holds("torch"):
            raise InstallError(f"{', '.join(names)} brought torch, which no engine's user asked for")
        smoke = str(Path(__file__).with_name("smoke.py"))
        return run([self.python, "-I", smoke, *names], f"the smoke test of {', '.join(names)}", folder=folder).strip()

    def collect_kit(self, tests: Path, folder: Path) -> int:
        """Number of tests of the conformance kit that pytest finds in a copy of a plugin's tests.

        Raises:
            InstallError: pytest found none, or failed.
        """
        command = [self.python, "-I", "-m", "pytest", "--collect-only", "-q", "--conformance-only", str(tests)]
        output = run([*command, "-p", "no:cacheprovider"], "collecting the conformance kit", folder=folder)
        found = sum("::" in line for line in output.splitlines())
        if not found:
            raise InstallError(f"pytest found no test of the kit:\n{output}")
        return found
