"""The public face: small, loaded on first use, documented name by name, and enough for users and plugin authors."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import api
import pytest

import tierkv

ROOT = Path(__file__).resolve().parents[2]
FACE = {
    *("Stack", "StagedStack", "open_stack", "open_staged_stack", "open_worker", "serve_metrics"),
    *("EngineSpec", "GroupSpec", "EngineCapabilities", "StepOutput", "ScheduledRequest", "LoadReport"),
    *("TierKVError", "__version__"),
}
ENGINE_CALLS_MAX = 24
"""Public names of Stack: about 14 calls of the engine, its three groups, and what a process needs around them."""

PUBLIC_MODULES = tuple(api.PUBLIC)


def test_the_face_holds_what_an_engine_author_needs() -> None:
    """Each further name is a promise; a name less sends its user into the core."""
    assert set(tierkv.__all__) == FACE


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", sorted(FACE))
def test_a_name_of_the_face_loads(name: str) -> None:
    """Names load on first use, so a wrong home shows only then."""
    assert getattr(tierkv, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    """``hasattr`` and tab completion rely on it."""
    assert not hasattr(tierkv, "nothing")


def test_stack_is_small() -> None:
    """A class with forty names has no reader; groups of calls have names of their own."""
    (stack,) = [name for name in api.names_of("tierkv") if name.name == "Stack"]
    assert isinstance(stack.node, ast.ClassDef)
    names = {item.name for item in api.methods(stack.node)}
    assert len(names) <= ENGINE_CALLS_MAX, sorted(names)


@pytest.mark.parametrize("package", PUBLIC_MODULES)
def test_every_public_name_has_a_contract(package: str) -> None:
    """A public name without a text is a question to its author."""
    names = api.names_of(package)
    assert names
    silent = [f"{name.module}.{name.name}" for name in names if not ast.get_docstring(name.node)]
    assert not silent


def test_every_public_name_is_on_the_page() -> None:
    """The page is the promise: what it lacks may change without notice."""
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    names = [name.name for package in PUBLIC_MODULES for name in api.names_of(package)]
    assert len(names) > len(FACE)
    assert not [name for name in names if f"### {name}\n" not in page]


def test_the_page_states_what_may_change() -> None:
    """Users plan upgrades by it."""
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    assert all(word in page for word in ("deprecated", "SPI_VERSION", "**Threads.**", "**Units**"))


IMPORT = re.compile(r"^\s*(?:from (tierkv[\w.]*) import|import (tierkv[\w.]*))", flags=re.MULTILINE)


def imported_in_pages() -> list[tuple[str, str]]:
    """Page and module of each import of tierkv in a code block."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    found = []
    for page in pages:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            found += [(str(page.relative_to(ROOT)), first or second) for first, second in IMPORT.findall(block)]
    return found


INSIDE = {
    "docs/explanation/adaptive.md": "explains the policy from inside",
    "docs/reference/frame-format.md": "shows the format with the code that writes it",
    "docs/reference/metrics.md": "lists the metrics with the code that makes them",
}
"""Page to the reason why it shows names that may change."""


def is_public(module: str) -> bool:
    """Whether a module is public, or belongs to a plugin."""
    inner = [package for package in PUBLIC_MODULES if package != "tierkv"]
    return module in {"tierkv", *inner} or module.startswith(("tierkv_", *(f"{package}." for package in inner)))


def test_pages_import_public_modules_only() -> None:
    """Users copy from pages, so a page shows public names."""
    found = imported_in_pages()
    assert found
    assert INSIDE.keys() <= {page for page, _ in found}, "these need no exception any more"
    private = [f"{page}: {module}" for page, module in found if page not in INSIDE and not is_public(module)]
    assert not private, "\n".join(private)


def test_modules_of_the_page_exist() -> None:
    """The list of public modules names no module that moved."""
    for module in ("tierkv.abc", "tierkv.types", "tierkv.errors", "tierkv.hookspecs", "tierkv.metrics.prometheus"):
        importlib.import_module(module)
