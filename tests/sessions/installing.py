"""Install what a session needs: this repository's packages as wheels of their folders, the rest as the lock has it."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
CONSTRAINTS = ("-c", "constraints.txt")
LOCK = "requirements.lock"
"""Exact versions and hashes of what the sessions install, but for torch and the engines."""


def put_real_pythons_first() -> None:
    """Put pyenv's interpreters before its shims: ``python3.12`` is on the PATH there even where it cannot run."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    real = [str(path.parent) for version in PYTHONS for path in pyenv.glob(f"versions/{version}.*/bin/python{version}")]
    os.environ["PATH"] = os.pathsep.join([*real, os.environ.get("PATH", "")])


def local(folder: Path, *wanted: str) -> str:
    """A requirement for the distribution in ``folder``, with those of the wanted extras that it has."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"].get("optional-dependencies", {})
    chosen = ",".join(extra for extra in wanted if extra in extras)
    return f"{folder}[{chosen}]" if chosen else str(folder)


def install(session: nox.Session, *wanted: str) -> None:
    """Install in the versions of the lock, and stop if a file has a hash that the lock does not name.

    pip itself checks hashes only where it installs nothing from a folder, and this repository's packages are folders.
    """
    place = Path(session.virtualenv.location)
    text = (ROOT / LOCK).read_text(encoding="utf-8")
    versions, report = versions_file(session), place / "installed.json"
    versions.write_text("\n".join(re.findall(r"^(\w[^\\\n]*)", text, flags=re.MULTILINE)), encoding="utf-8")
    report.unlink(missing_ok=True)
    session.install(*CONSTRAINTS, "-c", str(versions), "--report", str(report), *wanted)
    if report.is_file():  # with nox's --no-install there is none
        session.run("python", "-I", "tests/support/locked_files.py", LOCK, str(report), silent=True)


def versions_file(session: nox.Session) -> Path:
    """Exact versions of the lock, as constraints for pip; :func:`install` writes it."""
    return Path(session.virtualenv.location) / "versions.txt"


def everything(*extras: str) -> list[str]:
    """Requirements for the core with the given extras, and for all plugins."""
    return [local(ROOT, *extras), *(local(plugin, "testing") for plugin in PLUGINS)]
