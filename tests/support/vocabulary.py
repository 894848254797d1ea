"""Words of public docstrings and pages, reduced to stems, for the test that the glossary is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import api

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs/explanation/words.md"
GENERATED = {"api.md", "behaviour.md", "changelog.md"}
"""Pages that repeat other texts."""

_CODE = re.compile(
    r"^(```+|~~~+).*?^\1\s*$|``[^`]*``|`[^`]*`|:\w+:`[^`]*`|\]\([^)]*\)|https?://\S+|<[^>]*>", re.MULTILINE | re.DOTALL
)
_WORD = re.compile(r"(?<![\w.@/-])[A-Za-z][a-z]{2,}(?![\w/@-]|\.\w)")
_START = re.compile(r"(?:[.!?:|*]\s*|\n\s*[-#|]*\s*)$")
_SUFFIX = re.compile(r"(?:ings?|edly|ed|ers?|ors?|ions?|ations?|ies|es|ly|s|e|y)$")


def stem(word: str) -> str:
    """A word without its usual endings: forms of one word become equal."""
    short = word.lower()
    for _ in range(2):
        cut = _SUFFIX.sub("", short)
        if len(cut) < 3:
            break
        short = cut
    return short


def words_of(text: str) -> Iterator[str]:
    """Words of a text outside code, links and names."""
    prose = _CODE.sub(" ", text)
    for match in _WORD.finditer(prose):
        word = match[0]
        if word.islower() or _START.search(prose[max(0, match.start() - 12) : match.start()] or "\n"):
            yield word


def texts() -> Iterator[tuple[str, str]]:
    """Place and text of every public docstring and every page."""
    for package in api.PUBLIC:
        for name in api.names_of(package):
            for node in ast.walk(name.node):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{name.module}.{name.name}", ast.get_docstring(node) or ""
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        if page.name not in GENERATED and page != GLOSSARY:
            yield str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")


def terms() -> set[str]:
    """Stems of all words that the glossary defines: its headwords and the names in italics."""
    text = GLOSSARY.read_text(encoding="utf-8")
    heads = re.findall(r"^(?![#:\s])(.+)\n: ", text, flags=re.MULTILINE)
    defined = " ".join([*heads, *re.findall(r"\*([^*]+)\*", text)])
    return {stem(word) for word in re.findall(r"[A-Za-z]{2,}", defined)}


_EMPTY = {
    "a",
    "an",
    "and",
    "as",
    "by",
    "for",
    "from",
    "in",
    "is",
    "it",
    "its",
    "number",
    "of",
    "on",
    "or",
    "return",
    "returns",
    "that",
    "the",
    "this",
    "to",
    "whether",
    "with",
}


def repeats_signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether every word of a docstring is in the name, the arguments or the result already."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return False
    signature = [node.name]
    if not isinstance(node, ast.ClassDef):
        signature += [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        signature += [ast.unparse(node.returns)] if node.returns else []
    known = {stem(part) for name in signature for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    words = {word.lower() for word in re.findall(r"[A-Za-z]+", docstring)} - _EMPTY
    return all(stem(word) in known for word in words)
