"""Write ``docs/reference/api.md``: every public name with its signature and contract, read from the sources.

Sources are parsed, never imported: an engine that an adapter needs may be missing where the page is made.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PUBLIC: dict[str, str] = {
    "tierkv": "The face: what an engine author needs. Names load on first use; `import tierkv` is cheap.",
    "tierkv.abc": "The plugin interface: what the author of a backend, codec or policy implements.",
    "tierkv.types": "Values that pass between an engine, tierkv and its plugins. Standard library only.",
    "tierkv.errors": "Every error that tierkv raises; [Errors](errors.md) draws the tree.",
    "tierkv.hookspecs": "Hooks of a plugin; [Hooks](hooks.md) has the contract of each.",
    "tierkv.plugins": "Discovery of installed plugins.",
    "tierkv.testing": "The conformance kit and fault injection, for tests of plugins.",
    "tierkv.integrations.vllm": "Both seams into vLLM.",
    "tierkv.integrations.sglang": "A storage backend of SGLang's hierarchical cache.",
    "tierkv.integrations.transformers": "A prefix cache for transformers.",
    "tierkv.metrics.prometheus": "Export of metrics.",
}
"""Public package or module and one sentence about it. Everything else may change in any release."""

MODULES = {"tierkv.abc": ("held_locks", "places", "unlisted"), "tierkv.testing": ("faults", "manual_clock")}
"""Modules of a package that are public beside what its ``__all__`` names."""

GROUPS = {
    "tierkv": {
        "tierkv.stack.views.tiers": ("StackTiers",),
        "tierkv.stack.tier_lifecycle": ("TierChange",),
        "tierkv.stack.views.events": ("StackEvents",),
        "tierkv.stack.views.measurements": ("StackMetrics",),
        "tierkv.stack.remote_worker": ("WorkerSetup", "ProcessWorker"),
        "tierkv.worker.worker": ("Worker",),
    }
}
"""Package to the classes, by module, that its names return or hold: ``stack.tiers``, ``stack.worker`` and the like."""

MADE = {
    *("Stack", "StagedStack", "StackTiers", "TierChange", "StackEvents", "StackMetrics", "Worker", "WorkerSetup"),
    "ProcessWorker",
}
"""Classes that tierkv makes itself: their constructors are not public."""

Definition = ast.ClassDef | ast.FunctionDef

INTRODUCTION = """
The packages and modules on this page are public, with every name that has no leading underscore. Everything else may
change in any release: `tierkv.manager`, `tierkv.scheduler`, `tierkv.dispatch` and their neighbours have no contract
beyond their tests.

**Changes.** Until 1.0 a minor release may rename a public name; its changelog names the old and the new one. From 1.0
on a name is deprecated first: it works for two further minor releases and warns with `DeprecationWarning`, which names
its replacement. `SPI_VERSION` in `tierkv.abc` counts changes that break a plugin. A plugin that states another version
is refused by name.

**Threads.** A call belongs to the engine's scheduler thread unless its text names another thread. Calls of a worker
belong to the thread of that worker. Values are frozen: any thread may read them.

**Units** are the last word of a name: `_s` seconds, `_bytes`, `_tokens`, `_blocks`, `_max` an upper bound.
"""


@dataclass(frozen=True, slots=True)
class Name:
    """A public name: the definition and the module that holds it."""

    name: str
    module: str
    node: Definition


def path_of(module: str) -> Path:
    """The file of a module or package."""
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def tree_of(module: str) -> ast.Module:
    """The parsed source of a module or package."""
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def definitions(module: str) -> Iterator[Name]:
    """Public classes and functions of a module, in order."""
    for node in tree_of(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield Name(node.name, module, node)


def exported(package: str) -> Iterator[Name]:
    """Definitions behind the ``__all__`` of a package, found through its imports, in their order."""
    homes = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree_of(package))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    for name in names_of_all(package):
        if name in homes:
            module, original = homes[name]
            yield from (found for found in definitions(module) if found.name == original)


def names_of_all(package: str) -> list[str]:
    """The ``__all__`` of a package; empty without one."""
    for node in tree_of(package).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def names_of(package: str) -> list[Name]:
    """All public names of a public package or module."""
    if path_of(package).name != "__init__.py":
        return list(definitions(package))
    found = list(exported(package)) + list(definitions(package) if package != "tierkv" else ())
    for module, names in GROUPS.get(package, {}).items():
        found += [name for name in definitions(module) if name.name in names]
    modules: tuple[str, ...] = MODULES.get(package, ())
    if package == "tierkv.types":
        modules = tuple(sorted(path.stem for path in path_of(package).parent.glob("[!_]*.py")))
    for module in modules:
        found += definitions(f"{package}.{module}")
    return found


def page() -> str:
    """The page behind its title."""
    parts = [INTRODUCTION]
    for package, meaning in PUBLIC.items():
        parts.append(f"## {package}\n\n{meaning}\n")
        parts += [section(name) for name in names_of(package)]
    return "\n".join(parts)


def section(name: Name) -> str:
    """One name: where it is, its signature and its contract."""
    node = name.node
    signature = class_signature(node) if isinstance(node, ast.ClassDef) else function_signature(node)
    contract = markdown(ast.get_docstring(node) or "")
    text = f"### {name.name}\n\n`{name.module}`\n\n```text\n{signature}\n```\n\n{contract}\n"
    if isinstance(node, ast.ClassDef):
        text += attributes(node) + "".join(method(item) for item in methods(node))
    return text


def class_signature(node: ast.ClassDef) -> str:
    """``class Name(bases)`` with the fields of a dataclass, or the arguments of a public constructor."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__" and node.name not in MADE:
            return f"{head}:\n    {function_signature(item)}"
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    fields = [f"    {ast.unparse(item)}" for item in node.body if isinstance(item, ast.AnnAssign) and public(item)]
    return "\n".join([f"{head}:", *(fields if is_dataclass and fields else ["    ..."])])


def public(item: ast.AnnAssign) -> bool:
    """Whether a field has a public name."""
    return isinstance(item.target, ast.Name) and not item.target.id.startswith("_")


def function_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """``def name(arguments) -> result``, without ``self``; one argument a line where it is long."""
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(?:self|cls)(?:, |$)", "", arguments)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}def {node.name}({arguments}){result}"


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public methods and properties in order."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not item.name.startswith("_"):
            yield item


def method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A method: signature, then its contract."""
    is_property = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
    result = ast.unparse(node.returns) if node.returns else ""
    head = f"`{node.name}: {result}`" if is_property else f"`{function_signature(node).removeprefix('def ')}`"
    return f"\n**{head}**\n\n{markdown(ast.get_docstring(node) or '')}\n"


def attributes(node: ast.ClassDef) -> str:
    """Texts below fields, as a list."""
    rows = []
    for item, after in zip(node.body, node.body[1:], strict=False):
        value = after.value if isinstance(after, ast.Expr) else None
        if isinstance(item, ast.AnnAssign) and public(item) and isinstance(value, ast.Constant):
            rows.append(f"- `{ast.unparse(item.target)}`: {inline(str(value.value))}")
    return "\n" + "\n".join(rows) + "\n" if rows else ""


def inline(text: str) -> str:
    """Docstring markup on one line: roles and double backticks become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1].rpartition('.')[2]}`", " ".join(text.split()))
    return text.replace("``", "`")


def markdown(docstring: str) -> str:
    """A docstring as Markdown; its sections (Args, Returns, Raises, Attributes) become lists."""
    out: list[str] = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        head, _, rest = part.partition("\n")
        if head.rstrip(":") in {"Args", "Returns", "Raises", "Attributes", "Yields"} and head.endswith(":") and rest:
            whole = head in {"Returns:", "Yields:"}  # one text, not a list of names
            items = [rest] if whole else re.split(r"\n(?=\S)", textwrap.dedent(rest))
            listed = [re.sub(r"^(\*{0,2}[\w., ]+?): ", r"`\1`: ", inline(item)) for item in items]
            out.append(f"{head}\n" + "\n".join(f"- {item}" for item in listed))
        elif part.lstrip().startswith("::") or part.startswith("    "):
            out.append(f"```text\n{inspect.cleandoc(part)}\n```")
        else:
            out.append(inline(part.removesuffix("::")))
    return "\n\n".join(text for text in out if text)
