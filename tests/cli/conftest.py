"""A distribution installed beside tierkv, with backends whose places are good, bad, and hopeless, and a command."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tierkv.cli.main import cli

SOURCE = '''
import threading
from dataclasses import dataclass
from pathlib import Path

import click

from tierkv.abc import BackendPlugin, Capabilities, CheckResult
from tierkv.hookspecs import hookimpl

TIERKV_SPI = 1

@dataclass(frozen=True)
class Options:
    path: Path
    limit_bytes: int = 1

def opened(*_):
    raise AssertionError("check opened a backend")

def look(options, capacity):
    ok = options.path.is_dir()
    yield CheckResult("path", ok, f"[{options.path}], {capacity}", "" if ok else "mkdir it")

def crash(options, capacity):
    raise OSError("the disk is on fire")

def hang(options, capacity):
    threading.Event().wait()

def mumble(options, capacity):
    return ["all fine"]

@hookimpl
def tierkv_backends():
    checks = {"folder": look, "burning": crash, "hung": hang, "mumbling": mumble, "blind": None}
    return [BackendPlugin(name, f"the {name} one", Options, Capabilities(durable=True), opened, check)
            for name, check in checks.items()]

@hookimpl
def tierkv_observe(events):
    """Count nothing."""

@hookimpl
def tierkv_commands():
    @click.command()
    @click.argument("name")
    def greet(name):
        """Print a greeting, politely."""
        click.echo(f"hello {name}")
    return [greet]
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the distribution tierkv-places 4.5, on sys.path here and in child processes."""
    folder = tmp_path / "site"
    info = folder / "tierkv_places-4.5.dist-info"
    info.mkdir(parents=True)
    (folder / "installed_places.py").write_text(SOURCE, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tierkv-places\nVersion: 4.5\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[tierkv]\nplaces = installed_places\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield folder
    sys.modules.pop("installed_places", None)


@pytest.fixture
def break_plugin(site: Path) -> Callable[[str], None]:
    """Adds lines to the distribution's module, so that it misbehaves."""

    def add(source: str) -> None:
        with (site / "installed_places.py").open("a", encoding="utf-8") as file:
            file.write(source)
        importlib.invalidate_caches()

    return add


@pytest.fixture
def tierkv() -> Callable[..., Result]:
    """Runs the program in this process: `tierkv("check", path)`."""

    def run(*words: object) -> Result:
        return CliRunner().invoke(cli, [str(word) for word in words], prog_name="tierkv")

    return run


@pytest.fixture
def stack(tmp_path: Path, site: Path) -> Callable[..., Path]:
    """Writes a stack with these backends, each with a place of its own: `stack("folder", "burning")`."""

    def write(*backends: str, path: Path = tmp_path) -> Path:
        more = [tmp_path.with_name(f"{tmp_path.name}-{name}") for name in backends[1:]]
        for place in more:
            place.mkdir(exist_ok=True)
        places = zip(backends, (path, *more), strict=True)
        tiers = [{"backend": name, "path": str(place), "capacity": "1GiB"} for name, place in places]
        file = tmp_path / "stack.json"
        file.write_text(json.dumps({"host": {"capacity": "8MiB"}, "tiers": tiers}), encoding="utf-8")
        return file

    return write
