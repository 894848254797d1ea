"""Tables of the pages in docs/reference/backends: the options and the capabilities of each backend.

The rest of such a page is written by hand. A line ``<!-- options: FILE CLASS -->`` or ``<!-- capabilities: NAME -->``
begins a table, and ``<!-- end -->`` ends it. Options are read from the source, so no backend has to be installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import conformance

from tierkv.config.units import format_size

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/reference/backends"
_TABLE = re.compile(r"(<!-- (options|capabilities): (.+?) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_SIZES = ("_bytes", "_bytes_max")
_KINDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Mult: lambda left, right: left * right,
    ast.LShift: lambda left, right: left << right,
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option as its source states it."""

    name: str
    kind: str
    default: object
    """Default value; :data:`REQUIRED` where there is none."""
    meaning: str


REQUIRED = object()


def options_of(path: Path, name: str) -> list[Option]:
    """Options of a dataclass, in its order.

    Raises:
        ValueError: the class is not there, or a field has no text below it.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = _constants(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = [
                _option(field, text, constants)
                for field, text in pairwise(node.body)
                if isinstance(field, ast.AnnAssign)
            ]
            if found:
                return found
    raise ValueError(f"{path}: there is no dataclass {name} with fields")


def _option(node: ast.AnnAssign, text: ast.stmt, constants: Mapping[str, object]) -> Option:
    name = ast.unparse(node.target)
    stated = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else None
    if stated is None:
        raise ValueError(f"the option {name} has no text below it")
    meaning = _marked(" ".join(str(stated).replace("``", "`").split()))
    default = REQUIRED if node.value is None else _value(node.value, constants)
    return Option(name, ast.unparse(node.annotation), default, meaning)


def _marked(text: str) -> str:
    """Text with values in quotes and names of keys as code."""
    return re.sub(r'`[^`]*`|"\S+?"|\b[a-z]+(?:_[a-z]+)+\b', lambda part: f"`{part[0].strip('`')}`", text)


def _constants(tree: ast.Module) -> dict[str, object]:
    """Numbers and texts that a module names, which defaults may use."""
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = _value(node.value, found)
            except ValueError:
                continue
    return found


def _value(node: ast.expr, constants: Mapping[str, object]) -> object:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left, constants), _value(node.right, constants)
        if isinstance(left, int) and isinstance(right, int):
            return _OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and ast.unparse(node) == "field(default_factory=dict)":
        return {}
    value: object = ast.literal_eval(node)
    return value


def options_table(source: str) -> str:
    """Table of the options of a class: ``FILE CLASS``."""
    path, name = source.split()
    rows = [
        f"| `{option.name}` | {_kind(option)} | {_default(option)} | {option.meaning.replace('|', chr(92) + '|')} |"
        for option in options_of(ROOT / path, name)
    ]
    return "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *rows])


def _kind(option: Option) -> str:
    kind = option.kind.removesuffix(" | None")
    if choices := re.fullmatch(r"Literal\[(.+)\]", kind):
        return " or ".join(f"`{choice.strip().replace(chr(39), chr(34))}`" for choice in choices[1].split(","))
    if kind == "int" and option.name.endswith(_SIZES):
        return "a size"
    return _KINDS.get(kind, "a table")


def _default(option: Option) -> str:
    value = option.default
    if value is REQUIRED:
        return "**required**"
    if value is None or value == {}:
        return "none" if value is None else "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and option.name.endswith(_SIZES):
        value = format_size(value)
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def capabilities_table(backend: str) -> str:
    """Capabilities that a backend declares, and what it passes of the conformance kit.

    Raises:
        ValueError: no report of a suite of the backend is known.
    """
    suites: dict[str, Mapping[str, Any]] = {
        name: suite
        for known in conformance.known().values()
        for name, suite in sorted(known["suites"].items())
        if suite["backend"] == backend
    }
    if not suites:
        raise ValueError(f"no suite of the conformance kit has run on {backend}; `nox -s conformance`")
    rows = []
    for field in (*conformance.FLAGS, *conformance.NUMBERS):
        values: dict[str, list[str]] = {}
        for name, suite in suites.items():
            values.setdefault(_declared(suite["capabilities"][field]), []).append(name)
        (first, *_) = values
        text = first if len(values) == 1 else "; ".join(f"{value}: {', '.join(of)}" for value, of in values.items())
        rows.append(f"| `{field}` | {text} |")
    passed = [
        f"| {name} | {suite['passed']} | {sum(suite['not_applicable'].values())} |" for name, suite in suites.items()
    ]
    return "\n".join(
        [
            "| capability | declared |\n|---|---|",
            *rows,
            "",
            "| suite of the conformance kit | passed | not applicable |\n|---|---|---|",
            *passed,
        ]
    )


def _declared(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if value else "none"


_MAKERS = {"options": options_table, "capabilities": capabilities_table}


def page(path: Path) -> str:
    """A page with the tables of today."""
    text = path.read_text(encoding="utf-8")
    return _TABLE.sub(lambda part: f"{part[1]}\n{_MAKERS[part[2]](part[3])}\n\n{part[4]}", text)


PAGES: dict[str, Callable[[], str]] = {
    f"backends/{path.name}": partial(page, path) for path in sorted(FOLDER.glob("*.md")) if path.stem != "index"
}
"""Pages by file, from docs/reference on."""
