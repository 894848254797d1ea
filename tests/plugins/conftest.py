"""Real distributions: a module and its dist-info on sys.path, as an installer would leave them."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., str]

_numbers = itertools.count()

HEAD = """
from __future__ import annotations
from dataclasses import dataclass
from tierkv.abc import *
from tierkv.hookspecs import hookimpl

TIERKV_SPI = 1

@dataclass(frozen=True)
class Options:
    path: str = ""

def never(*_):
    raise AssertionError("a plugin was opened while plugins were loaded")

def backend(name, **more):
    return BackendPlugin(**{"name": name, "summary": f"the {name} backend", "options": Options,
                            "capabilities": Capabilities(), "open": never, **more})
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions at the front of sys.path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("installed_"):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    """Installs `install("foo", source)`: distribution tierkv-foo with entry point foo. Gives the module's name."""

    def put(
        entry_point: str,
        source: str,
        *,
        distribution: str = "",
        version: str = "1.2.3",
        head: str = HEAD,
        target: str = "{module}",
        metadata: bool = True,
    ) -> str:
        module = f"installed_{next(_numbers)}"
        (site / f"{module}.py").write_text(head + textwrap.dedent(source), encoding="utf-8")
        name = distribution or f"tierkv-{entry_point}"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        if metadata:
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (info / "METADATA").write_text(text, encoding="utf-8")
        with (info / "entry_points.txt").open("a", encoding="utf-8") as file:
            file.write(f"[tierkv]\n{entry_point} = {target.format(module=module)}\n")
        return module

    return put
