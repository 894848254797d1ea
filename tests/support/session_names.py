"""Sessions of noxfile.py, for tests of pages that name them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def nox_sessions() -> set[str]:
    """Names of the sessions in noxfile.py, without running it."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return {function.name.rstrip("_").replace("_", "-") for function in functions}
