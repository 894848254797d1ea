"""Prose is plain: no banned phrase in a docstring, comment, message or page, and every name in a page exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import prose
import pytest
from vocabulary import repeats_signature

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("tierkv", "plugins", "benchmarks", "docs", "tests", "changes")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "noxfile.py", "conftest.py")
EXCEPTIONS = {
    "tests/support/prose.py": "it holds the banned phrases",
    "tests/house/test_prose.py": "it shows that they are found",
}
"""Path to the reason why a file is not checked."""


@pytest.mark.parametrize("area", [*AREAS, *PAGES])
def test_prose_is_plain(area: str) -> None:
    """Readers work in their second language: field terms and plain sentences cost them less than wit."""
    found = [
        f"{path.relative_to(ROOT)}:{finding.line}: {finding.phrase!r}: {finding.instead}"
        for path in prose.files_of(ROOT / area)
        if str(path.relative_to(ROOT)) not in EXCEPTIONS
        for finding in prose.check_file(path)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What it is."""',
        "# nobody waits",
        "raise ValueError('the engine was told so')",
        'x = 1\n"""How many are there."""',
        '"""The same, but later."""',
    ],
)
def test_a_banned_phrase_is_found(source: str) -> None:
    """The check can fail: in docstrings, comments, messages and texts below attributes."""
    assert list(prose.check_python(source))


def test_code_in_prose_is_no_prose() -> None:
    """Names in backticks and code blocks of pages are the code's."""
    assert not list(prose.check("``told`` and `nobody`, :meth:`hears`"))
    assert not list(prose.check_page("text\n\n```python\nnobody = told\n```\n"))
    assert list(prose.check_page("```python\nx = 1\n```\nnobody\n"))


def test_no_docstring_repeats_its_signature() -> None:
    """A docstring that adds no word to the name costs a line and states no contract."""
    found = []
    for path in (*ROOT.glob("tierkv/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and repeats_signature(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {ast.get_docstring(node)}")
    assert not found, "state the contract beyond the words of the name:\n" + "\n".join(found)


def test_a_repeated_signature_is_found() -> None:
    """The check can fail, and a contract passes."""
    (bad, good) = ast.parse(
        'def free_pages(self) -> int:\n    """Number of free pages."""\n'
        'def free_slots(self) -> int:\n    """Slots without a chunk."""\n'
    ).body
    assert isinstance(bad, ast.FunctionDef)
    assert isinstance(good, ast.FunctionDef)
    assert repeats_signature(bad)
    assert not repeats_signature(good)


# -- names in pages --------------------------------------------------------------------------------------------------

DOTTED = re.compile(r"(?<![\w/.-])tierkv(?:_\w+)?(?:\.[A-Za-z_]\w*)+(?!\w*[/-])")
FILES = {"toml", "md", "json", "yaml", "log", "jsonl", "net"}


def dotted_names() -> Iterator[tuple[str, str]]:
    """Page and each dotted name of tierkv or a plugin in it."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("changes/*.md"), *ROOT.glob("docs/**/*.md")]
    for page in [*pages, *ROOT.glob("plugins/*/*.md")]:
        for name in sorted(set(DOTTED.findall(page.read_text(encoding="utf-8")))):
            if name.rpartition(".")[2] not in FILES:
                yield str(page.relative_to(ROOT)), name


def exists(name: str) -> bool:
    """Whether a dotted name is a module or an attribute of one. Modules that cannot be imported are read as text."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        if spec is not None:
            return has_attribute(".".join(parts[:count]), parts[count:])
    return False


def has_attribute(module: str, path: list[str]) -> bool:
    """Whether a module has an attribute, and that one the next."""
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        return not path or path[0] in names_in_source(module)
    for name in path:
        fields = getattr(found, "__dataclass_fields__", {}) | getattr(found, "model_fields", {})
        annotations = getattr(found, "__annotations__", {})
        if not hasattr(found, name):
            return name in fields or name in annotations
        found = getattr(found, name)
    return True


def names_in_source(module: str) -> set[str]:
    """Names that a module defines or imports at its top level, read from its source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return defined | imported


def test_every_dotted_name_in_a_page_exists() -> None:
    """A page that names what was moved sends its reader nowhere."""
    names = list(dotted_names())
    assert len(names) > 50
    missing = [f"{page}: {name}" for page, name in names if not exists(name)]
    assert not missing, "\n".join(missing)


def test_a_missing_name_is_noticed() -> None:
    """The check can fail: for modules, for attributes, and for modules of engines that are not installed."""
    assert exists("tierkv.abc.Backend")
    assert not exists("tierkv.abc.Nothing")
    assert not exists("tierkv.nothing.at_all")
