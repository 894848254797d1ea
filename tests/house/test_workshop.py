"""The project keeps its own rules: one test line, described sessions, reasons for every exception."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tierkv import _version

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^test_line='(.+)'$", flags=re.MULTILINE)


def text(name: str) -> str:
    """A file of the checkout."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_ci_runs_the_line_of_the_readme() -> None:
    """CI tests the line that a newcomer types, to the letter."""
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
    """An exception without a reason can never be removed."""
    section = text("pyproject.toml").partition("[tool.ruff.lint]")[2].partition("[tool.ruff.lint.pydocstyle]")[0]
    entries = re.findall(r'^  ("[A-Z]+\d*",.*)$', section, flags=re.MULTILINE)
    assert len(entries) > len(tomllib.loads(text("pyproject.toml"))["tool"]["ruff"]["lint"]["ignore"])
    bare = [entry for entry in entries if not re.search(r"# \S", entry)]
    assert not bare


@pytest.mark.parametrize("pattern", ["tierkv/**/*.py", "plugins/*/src/**/*.py", "noxfile.py"])
def test_every_noqa_has_its_reason(pattern: str) -> None:
    """An exception of one line names its rule and its reason."""
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
    vendors = (".github/workflows", ".gitlab-ci.yml", ".circleci", ".travis.yml")
    assert not [name for name in vendors if (ROOT / name).exists()]


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "CHANGELOG.md"])
def test_the_root_holds_what_a_visitor_looks_for(name: str) -> None:
    """A reporter of a vulnerability must find the private way before the public one."""
    assert text(name).strip()


def test_issue_templates_ask_for_versions() -> None:
    """A report without versions costs a round trip."""
    templates = list(ROOT.glob(".github/ISSUE_TEMPLATE/*.md"))
    assert len(templates) >= 2
    assert any("tierkv --version" in template.read_text(encoding="utf-8") for template in templates)


def test_the_distribution_names_its_pages() -> None:
    """PyPI shows these links beside the README."""
    urls = tomllib.loads(text("pyproject.toml"))["project"]["urls"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= urls.keys()


SENTENCES_MAX = 3


def fragments() -> list[Path]:
    """Changelog fragments."""
    return sorted(path for path in (ROOT / "changes").glob("*.md") if path.name != "README.md")


def sentences(paragraph: str) -> int:
    """Sentences of a text; dots inside code, numbers and names do not end one."""
    plain = re.sub(r"`[^`]*`", "code", paragraph.strip())
    return len(re.findall(r"[.!?](?:\s|$)", plain))


def faults_of(fragment: str) -> list[str]:
    """Rules that the text of a fragment breaks."""
    faults = [f"more than {SENTENCES_MAX} sentences"] if sentences(fragment) > SENTENCES_MAX else []
    verb = re.match(r"(?:Added|Changed|Fixed|Removed|Renamed|Replaced|[A-Z]\w+ed)\b", fragment)
    return faults if verb else [*faults, "past tense: Added ..., Fixed ..."]


def test_changelog_fragments_are_short() -> None:
    """Readers skim a changelog; the documentation has the details. There are no fragments right after a release."""
    found = {path.name: faults for path in fragments() if (faults := faults_of(path.read_text(encoding="utf-8")))}
    assert not found


def test_a_long_fragment_is_noticed() -> None:
    """The count sees sentences, not dots."""
    assert sentences("A `a.b. c` x 0.5. Two! Three? Four.") == 4
    assert faults_of("Adds one. Two. Three. Four.") == ["more than 3 sentences", "past tense: Added ..., Fixed ..."]
    assert not faults_of("Added one.")


def test_the_changelog_begins_with_this_version() -> None:
    """A reader looks up what the installed version has; towncrier puts the next one above it."""
    _, _, released = text("CHANGELOG.md").partition("<!-- towncrier: released versions follow -->\n")
    (newest,) = re.findall(r"^## (\S+) \(\d{4}-\d{2}-\d{2}\)$", released, flags=re.MULTILINE)[:1]
    assert newest == _version.__version__


def test_no_test_falls_between_two_sessions() -> None:
    """The session tests deselects the kit on plugins by a mark; conformance selects exactly what has the mark."""
    folder = "plugins/tierkv-example/tests"
    kit = collected(folder, "-m", "kit")
    assert kit
    assert collected(folder, "--conformance-only") == kit
    sessions = text("noxfile.py")
    assert '"-m", "not kit"' in sessions
    assert '"--conformance-only"' in sessions


def collected(*arguments: str) -> set[str]:
    """Names of the tests that pytest would run."""
    command = [sys.executable, "-I", "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    return {line for line in done.stdout.splitlines() if "::" in line}
