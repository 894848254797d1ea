"""The page of numbered cases: what the core does, and the tests that show it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("behaviour.toml")
_CASE = re.compile(r"(?:^test|(?<=\d))_([sdg]\d+)(?=_|$)")

LEAD = """\
What the core promises, in cases small enough to be tested one by one. *S* are cases of the specification, *D* defects
of earlier designs that must not come back, *G* gaps of others that tierkv closes.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """Cases that belong together: sentence by identifier."""

    title: str
    cases: dict[str, str]


def sections() -> list[Section]:
    """The cases in order."""
    found = tomllib.loads(CASES.read_text(encoding="utf-8"))["section"]
    return [Section(part.pop("title"), part) for part in found]


def ids_of(test: str) -> list[str]:
    """The cases that a test's name carries: ``test_s77_d5_the_last_chunk`` is about S77 and D5."""
    return [case.upper() for case in _CASE.findall(test)]


def cases_tested(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Identifier -> (file, test), from the sources of all tests."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted([*root.glob("tests/**/test_*.py"), *root.glob("plugins/*/tests/**/test_*.py")]):
        for name in _tests(ast.parse(path.read_text(encoding="utf-8"))):
            for case in ids_of(name):
                found.setdefault(case, []).append((path.relative_to(root).as_posix(), name))
    return found


def _tests(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name


def body() -> str:
    """The page without its title."""
    tests = cases_tested(ROOT)
    parts = [LEAD]
    for section in sections():
        rows = [f"| {case} | {text} | {_links(tests.get(case, []))} |" for case, text in section.cases.items()]
        parts.append("\n".join([f"## {section.title}\n", "| case | what holds | tests |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _links(tests: list[tuple[str, str]]) -> str:
    return "<br>".join(f"`{path}`: `{name}`" for path, name in tests)
