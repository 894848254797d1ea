"""Programs of Debian's packages, fetched and unpacked into a folder: nothing is installed."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 300


def fetch_program(folder: Path, packages: Sequence[str], names: Sequence[str]) -> Path:
    """Fetch the first of ``packages`` that Debian's archive has, with its dependencies. Returns a script.

    The script runs the first of ``names`` that the packages have in ``usr/bin``, with their own libraries.

    Raises:
        RuntimeError: the system is not Debian, its archive cannot be reached, or it has none of these.
    """
    folder = folder.resolve()  # the script runs in any directory
    script = folder / "program"
    if script.exists():
        return script
    folder.mkdir(parents=True, exist_ok=True)
    root, archives = folder / "root", folder / f"packages-{uuid.uuid4().hex}"
    archives.mkdir()
    _run(["apt-get", "download", *_wanted(packages)], cwd=archives)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(root)])
    program = next((path for name in names if (path := root / "usr/bin" / name).exists()), None)
    if program is None:
        raise RuntimeError(f"the packages have none of {', '.join(names)} in usr/bin")
    libraries = ":".join(str(path) for path in [*root.glob("usr/lib/*-linux-*"), *root.glob("lib/*-linux-*")])
    text = f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{program}" "$@"\n'
    fresh = folder / f"program-{uuid.uuid4().hex}"
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o755)
    fresh.rename(script)
    return script


def _wanted(packages: Sequence[str]) -> list[str]:
    """Packages to fetch for the first of ``packages`` that exists: those that are not on this system."""
    problems = []
    for package in packages:
        try:
            plan = _run(["apt-get", "install", "--simulate", "--reinstall", "--no-install-recommends", package])
        except RuntimeError as error:
            problems.append(str(error))
            continue
        return [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    raise RuntimeError("; ".join(problems))


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]} here: this needs Debian, or a system like it") from None
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
