"""Reference pages say what the code says, and every hook has a contract, its signature in the docs, and a test."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pages
import pluggy
import pytest

from tierkv import hookspecs

ROOT = Path(__file__).resolve().parents[2]
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")]


def test_pages_are_current() -> None:
    """A reference that lags behind is worse than none: readers trust it."""
    unknown = set() if importlib.util.find_spec("torch") else {"cli.md"}  # the demo's part cannot be made without
    assert not set(pages.outdated(ROOT / "docs/reference")) - unknown, "python -m nox -s generate"


def test_an_outdated_page_is_noticed(tmp_path: Path) -> None:
    """The check of pages can fail."""
    (tmp_path / "hooks.md").write_text("old", encoding="utf-8")
    assert set(pages.outdated(tmp_path)) == set(pages.PAGES)


def test_every_hook_is_found() -> None:
    """The lists here and in pluggy agree, so none escapes the tests below."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    assert sorted(HOOKS) == sorted(vars(manager.hook).keys() - {"__module__"})
    assert HOOKS


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_says_when_where_and_what_if(name: str) -> None:
    """A plugin author must know when a hook is called, on which thread, what it returns, and what a failure means."""
    (hook,) = [hook for hook in pages.hooks() if hook.name == name]
    assert hook.summary
    assert set(hook.contract) == {"When", "Thread", "Return", "Failure"}


def test_a_hook_without_contract_is_refused() -> None:
    """The check of contracts can fail: a field that is not written is not there."""
    assert pages.contract_of("Do it.\n\nWhen: always. Thread: main.") == {"When": "Always.", "Thread": "Main."}


@pytest.mark.parametrize("name", HOOKS)
def test_the_docs_carry_the_exact_signature(name: str) -> None:
    """Read from the live function here, and from the source in the generator: two ways to the same line."""
    signature = inspect.signature(getattr(hookspecs, name))
    parameters = ", ".join(f"{parameter.name}: {parameter.annotation}" for parameter in signature.parameters.values())
    page = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")
    assert f"def {name}({parameters}) -> {signature.return_annotation}: ..." in page


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_test(name: str) -> None:
    """A hook that no test implements is an untested promise."""
    tests = [path for path in ROOT.glob("tests/**/*.py") if "house" not in path.parts]
    assert any(re.search(rf"\bdef {name}\(", path.read_text(encoding="utf-8")) for path in tests)
