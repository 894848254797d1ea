"""Table of the layers in decision 1, made from the contract in pyproject.toml and the packages' first lines."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/decisions/0001-layers.md"
BEGIN = "<!-- layers: made from pyproject.toml by `nox -s generate` -->\n"
END = "<!-- end of layers -->\n"


def layers() -> list[list[str]]:
    """Packages and modules of each layer, the highest layer first."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    (contract,) = [contract for contract in tool["importlinter"]["contracts"] if contract["id"] == "layers"]
    return [re.split(r" [|:] ", layer) for layer in contract["layers"]]


def meaning(name: str) -> str:
    """First sentence of the docstring of a package or module of tierkv."""
    path = ROOT / "tierkv" / name
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split()).partition(". ")[0].removesuffix(".")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first).replace("``", "`")


def table() -> str:
    """One row per package, numbered by layer from the bottom."""
    rows = ["| layer | package | what it is |", "|---|---|---|"]
    found = layers()
    for height, names in zip(range(len(found), 0, -1), found, strict=True):
        rows += [f"| {height} | `{name}` | {meaning(name)} |" for name in names]
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page of decision 1 with the table of today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"
