"""Checker of the prose rules: banned phrases in docstrings, comments, messages and pages, each with its replacement.

``python tests/support/prose.py PATH...`` prints one line per finding. tests/house/test_prose.py runs it over the
repository.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FIRST_LINE_WORDS_MAX = 30
"""Words of a docstring's first sentence."""

FIRST_PHRASES = re.compile(r"(?:The same(?:[,.:]| for| but| as| and| in)|See (?::|the |\S+\.(?:md|py)))")
"""First words of a docstring that points elsewhere in place of stating a contract."""

BANNED: dict[str, str] = {
    r"\b(?:somebody|someone|anybody|anyone|everybody|everyone|nobody|no one|whoever|whomever)\b": (
        "name the component, or the user"
    ),
    r"\b(?:he|she|him|his)\b": "name the component, or use 'they'",
    r"\btold\b": "reported, notified, logged, given",
    r"\bhears?\b|\bheard\b": "receives",
    r"\bow(?:es?|ed)\b": "pending, must still send",
    r"\bshelter(?:s|ed|ing)?\b": "pinned while dirty",
    r"\brob(?:s|bed)?\b": "takes slots from",
    r"\bforsake\w*\b": "unpin",
    r"\bso many\b": "up to N",
    r"\bof before\b": "previous",
    r"\bin vain\b": "without effect",
    r"\bnews\b": "completion, report",
    r"\bnaps?\b": "sleep",
    r"\bshall\b": "must, may or will",
    r"(?:[,;]|\bor) else\b": "otherwise",
    r"\bstands? (?:in|at|for|still|behind|before|here|there|on|under|beside|alone|for)\b": "is in, is at, represents",
    r"\blies? (?:in|at|on|below|above|beside|between|before|behind|there|here|under)\b": "is in, is stored in",
    r"\b(?:chunk|tier|frame|key|request|load|plugin|backend|it|that|which)s? (?:hears?|owes?|leaves|comes)\b": (
        "evicted, detached, arrives, completes"
    ),
    r"\bthe house\b|\bfour rooms\b": "the package tree, the layers",
}
"""Regular expression of a phrase (case is ignored) and its replacement."""

FIRST_WORDS = re.compile(r"(?:What|Who|Whoever|Whom|Whose|How|Where|When|Why|Which)\b")
"""First words of a docstring that make it a clause."""

_ANY = re.compile("|".join(BANNED), flags=re.IGNORECASE)
_PHRASES = [(re.compile(phrase, flags=re.IGNORECASE), instead) for phrase, instead in BANNED.items()]


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a rule."""

    line: int
    phrase: str
    instead: str


def check(text: str, line: int = 1) -> Iterator[Finding]:
    """Find banned phrases in one piece of prose that begins at ``line``."""
    if not _ANY.search(text):
        return
    prose = re.sub(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`|https?://\S+", lambda match: re.sub(r"[^\n]", "_", match[0]), text)
    for phrase, instead in _PHRASES:
        for match in phrase.finditer(prose):
            yield Finding(line + prose.count("\n", 0, match.start()), match[0].replace("\n", " "), instead)


def check_docstring(text: str, line: int) -> Iterator[Finding]:
    """Find banned phrases in a docstring, and a first line that is a clause or too long."""
    yield from check(text, line)
    first = re.split(r"(?<=[.:])\s|\n\n", text.strip(), maxsplit=1)[0]
    if match := FIRST_WORDS.match(first):
        yield Finding(line, match[0], "a verb phrase, or a noun phrase that names the thing")
    if match := FIRST_PHRASES.match(first):
        yield Finding(line, match[0], "state the contract, or delete the docstring")
    if len(first.split()) > FIRST_LINE_WORDS_MAX:
        yield Finding(line, f"{len(first.split())} words", "one idea a sentence")


def check_python(source: str) -> Iterator[Finding]:
    """Check docstrings, attribute docstrings, comments, and text constants of three words or more."""
    seen: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            value = item.value if isinstance(item, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                seen.add((value.lineno, value.col_offset))
                yield from check_docstring(value.value, value.lineno)
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1
        if is_text and (node.lineno, node.col_offset) not in seen:
            yield from check(node.value, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from check(token.string.lstrip("# "), token.start[0])


def check_page(text: str) -> Iterator[Finding]:
    """Check a Markdown page outside its code blocks."""
    blank = re.sub(r"^(```+|~~~+).*?^\1\s*$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    for number, line in enumerate(blank.splitlines(), start=1):
        yield from check(re.sub(r"\]\([^)]*\)|^#+ ", "", line), number)


def check_file(path: Path) -> list[Finding]:
    """Check a file by its kind, sorted by line."""
    text = path.read_text(encoding="utf-8")
    return sorted(check_python(text) if path.suffix == ".py" else check_page(text), key=lambda finding: finding.line)


def files_of(*paths: Path) -> list[Path]:
    """Python and Markdown files at or below the paths."""
    return sorted(
        {
            file
            for path in paths
            for file in ([path] if path.is_file() else path.rglob("*"))
            if file.suffix in {".py", ".md"} and not {".nox", "build", "__pycache__"}.intersection(file.parts)
        }
    )


if __name__ == "__main__":
    count = 0
    for name in files_of(*map(Path, sys.argv[1:] or ["."])):
        for found in check_file(name):
            count += 1
            sys.stdout.write(f"{name}:{found.line}: {found.phrase!r}: {found.instead}\n")
    sys.stdout.write(f"{count} findings\n")
    sys.exit(bool(count))
