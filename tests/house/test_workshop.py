"""The workshop keeps its own rules: one test line, described sessions, reasons for every exception."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^test_line='(.+)'$", flags=re.MULTILINE)


def text(name: str) -> str:
    """A file of the checkout."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_ci_runs_the_line_of_the_readme() -> None:
    """What newcomers are told to type is what is tested, to the letter."""
    (line,) = LINE.findall(text(".ci/run"))
    assert f"$ {line}\n" in text("README.md")


def test_ci_is_valid_shell() -> None:
    """A script that only runs elsewhere is at least read here."""
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)


def test_every_session_has_a_line_in_the_manual() -> None:
    """``nox -l`` reads like a manual: one full sentence each, that fits a line."""
    functions = [node for node in ast.parse(text("noxfile.py")).body if isinstance(node, ast.FunctionDef)]
    sessions = [function for function in functions if "nox.session" in map(ast.unparse, decorators(function))]
    assert sessions
    for session in sessions:
        docstring = ast.get_docstring(session) or ""
        assert re.fullmatch(r"[A-Z`].+\.", docstring), f"{session.name}: {docstring!r}"


def decorators(function: ast.FunctionDef) -> list[ast.expr]:
    """The decorators of a function, without their arguments."""
    return [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]


def test_every_switched_off_rule_has_its_reason() -> None:
    """An exception that nobody can explain can never be removed."""
    section = text("pyproject.toml").partition("[tool.ruff.lint]")[2].partition("[tool.ruff.lint.pydocstyle]")[0]
    entries = re.findall(r'^  ("[A-Z]+\d*",.*)$', section, flags=re.MULTILINE)
    assert len(entries) > len(tomllib.loads(text("pyproject.toml"))["tool"]["ruff"]["lint"]["ignore"])
    bare = [entry for entry in entries if not re.search(r"# \S", entry)]
    assert not bare


@pytest.mark.parametrize("pattern", ["tierkv/**/*.py", "plugins/*/src/**/*.py", "noxfile.py"])
def test_every_noqa_has_its_reason(pattern: str) -> None:
    """The same for an exception of one line: the rule is named, and words follow."""
    good = re.compile(r"# (?:noqa: [A-Z]+\d+(?:, ?[A-Z]+\d+)*|type: ignore\[[\w, -]+\])\s+\S")
    empty_body = "# type: ignore[empty-body]"  # a hook specification has no body: pluggy's way
    bad = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(ROOT.glob(pattern))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"# (noqa|type: ignore)", line) and not good.search(line) and empty_body not in line
    ]
    assert not bad


def test_torch_is_pinned_once() -> None:
    """Tests and demo know one torch; users keep their own."""
    assert re.search(r"^torch==\d+\.\d+\.\d+$", text("constraints.txt"), flags=re.MULTILINE)
    (requirement,) = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]["torch"]
    assert requirement == "torch>=2.6"


def test_no_file_belongs_to_one_ci_vendor() -> None:
    """``.ci/run`` is the CI, for every vendor and for a laptop."""
    assert not [name for name in (".github", ".gitlab-ci.yml", ".circleci", ".travis.yml") if (ROOT / name).exists()]


def test_no_test_falls_between_two_sessions() -> None:
    """``tests`` leaves the suites' files out, ``conformance`` runs nothing but the kit: other tests there never run."""
    (pattern,) = re.findall(r'"--ignore-glob", "([^"]+)"', text("noxfile.py"))
    suites = sorted(ROOT.glob(pattern))
    assert suites
    for path in suites:
        names = names_of_tests(path)
        assert not names, f"{path.relative_to(ROOT)}: move {names} to a file that does not match {pattern}"


def names_of_tests(path: Path) -> list[str]:
    """The names of functions in a module that pytest would collect."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]
