"""Write the pages of docs/reference that are made from the code: ``python -m nox -s generate``.

``--check`` writes nothing and ends with 1 where a page is not what the code says; a test does the same. Names of pages
limit it to those.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path

import api
import backends
import behaviour
import conformance
import figures_page
import grafana
import layers
import logs_page
import metrics_page
import pictures
import plots
import states

from tierkv import errors, hookspecs
from tierkv.abc import capabilities
from tierkv.cli.reference import render_reference as cli_page
from tierkv.config.reference import render_reference as configuration_page
from tierkv.types import hints

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
FIELDS = ("When", "Thread", "Return", "Failure")
AS_FOR = re.compile(r"When, thread, return and failure as for :func:`(\w+)`\.")


def head(title: str, source: str) -> str:
    """Title of a page, and where to change it."""
    return f"# {title}\n\n<!-- Made from {source} by `nox -s generate`; change that, not this page. -->\n"


def plain(text: str) -> str:
    """Docstring markup as Markdown: roles and double backticks become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


def paragraphs(text: str) -> str:
    """Docstring as Markdown, one line per paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in plain(inspect.cleandoc(text)).split("\n\n"))


@dataclasses.dataclass(frozen=True, slots=True)
class Hook:
    """One hook: its signature as written, its first sentence, and its contract by field."""

    name: str
    signature: str
    summary: str
    contract: dict[str, str]


def hooks() -> list[Hook]:
    """All hooks in the order of the module.

    Raises:
        ValueError: a hook does not document when, on which thread, what it returns, or what a failure means.
    """
    tree = ast.parse(inspect.getsource(hookspecs))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    return [_hook(function, functions) for function in functions.values()]


def _hook(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> Hook:
    docstring = ast.get_docstring(function) or ""
    summary = docstring.partition("\n\n")[0]
    if reference := AS_FOR.search(docstring):
        summary = summary.removesuffix(reference[0]).strip()
        docstring = ast.get_docstring(functions[reference[1]]) or ""
    contract = contract_of(docstring)
    if missing := [name for name in FIELDS if not contract.get(name)]:
        raise ValueError(f"hook {function.name} does not say: {', '.join(missing)}")
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    signature = f"def {function.name}({ast.unparse(function.args)}){returns}"
    return Hook(function.name, signature, plain(summary), contract)


def contract_of(docstring: str) -> dict[str, str]:
    """The sentences behind ``When:``, ``Thread:``, ``Return:`` and ``Failure:``."""
    _, *parts = re.split(rf"\b({'|'.join(FIELDS)}): ", docstring)
    texts = [plain(" ".join(text.split())) for text in parts[1::2]]
    return {name: text[:1].upper() + text[1:] for name, text in zip(parts[::2], texts, strict=True)}


HOOKS_HEAD = """
A plugin is a module or an object that an entry point of the group `tierkv` names, that states the version of the
interface it was written for, and whose functions carry the mark `@hookimpl`. This one counts what happens to chunks:

```python
# my_plugin.py
from __future__ import annotations

from collections import Counter

from tierkv.hookspecs import hookimpl

TIERKV_SPI = 1

seen = Counter()


@hookimpl
def tierkv_observe(events):
    seen.update(type(event).__name__ for event in events)
```

Its distribution announces it:

```toml
[project.entry-points.tierkv]
my-plugin = "my_plugin"
```

Hooks register and notify; no chunk passes through one. A hook that is not implemented costs nothing.
`tierkv plugins` shows what was found, and what is wrong with what was not.
"""


def hooks_page() -> str:
    """``hooks.md``."""
    parts = [head("Hooks", "tierkv/hookspecs.py") + HOOKS_HEAD]
    for hook in hooks():
        rows = "\n".join(f"| {name} | {hook.contract[name]} |" for name in FIELDS)
        parts.append(
            f"## {hook.name}\n\n{hook.summary}\n\n```python\n{hook.signature}: ...\n```\n\n| | |\n|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def errors_page() -> str:
    """``errors.md``."""
    docstring = inspect.cleandoc(errors.__doc__ or "")
    _, tree, after = re.split(r"::\n\n|\n\n(?=\S)", docstring.partition("\n\n")[2], maxsplit=2)
    parts = [
        head("Errors", "tierkv/errors.py"),
        f"```text\n{inspect.cleandoc(tree)}\n```\n",
        f"{paragraphs(after)}\n",
        "| error | also a | doing it again may help | meaning |\n|---|---|---|---|",
    ]
    for error in _classes():
        also = [f"`{base.__name__}`" for base in error.__bases__ if base.__module__ == "builtins"]
        meaning = paragraphs((error.__doc__ or "").partition("\n\n")[0])
        parts.append(f"| `{error.__name__}` | {', '.join(also)} | {'yes' if error.retryable else ''} | {meaning} |")
    return "\n".join(parts) + "\n"


def _classes() -> Iterator[type[errors.TierKVError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.TierKVError):
            yield value


def capabilities_page() -> str:
    """``capabilities.md``."""
    record = capabilities.Capabilities
    meanings = described_fields(record)
    rows = [
        f"| `{field.name}` | {str(field.type).replace(' | ', ' or ')} | `{field.default}` | {meanings[field.name]} |"
        for field in dataclasses.fields(record)
    ]
    lead = paragraphs(capabilities.__doc__ or "")
    table = "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])
    title = head("Capabilities of a backend", "tierkv/abc/capabilities.py and docs/_generate/conformance.json")
    return f"{title}\n{lead}\n\n{table}\n{conformance.section(conformance.known())}"


def described_fields(record: type) -> dict[str, str]:
    """Field name to text, from the string literal below each field of a dataclass."""
    (class_,) = ast.parse(inspect.getsource(record)).body
    body = class_.body if isinstance(class_, ast.ClassDef) else []
    return {
        field.target.id: plain(" ".join(text.value.value.split()))
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def behaviour_page() -> str:
    """``behaviour.md``."""
    title = head("Behaviour, case by case", "docs/_generate/behaviour.toml and the names of the tests")
    return f"{title}\n{behaviour.body()}"


HINTS_HEAD = """
Keys of `kv_transfer_params["tierkv"]`, all optional. How to use them: [give hints](../how-to/give-hints.md).

A value of another type than the one named is ignored, with a warning once per key and kind of fault and a counter
(`hints_ignored`) always; so is an unknown key, and a tier that the stack does not have. `true` is no number, and a
number in quotes is text. `max_offload_tokens` is also understood beside `tierkv`; the one inside counts.

*For policies* means: tierkv itself does nothing with it but hand it to eviction policies that listen
(`tierkv.abc.RequestAwarePolicy`).
"""


def hints_page() -> str:
    """``hints.md``."""
    meanings = described_fields(hints.RequestHints)
    rows = [f"| `{key}` | {allowed} | {meanings[key]} |" for key, allowed in hints.ALLOWED.items()]
    table = "\n".join(["| key | value | meaning |", "|---|---|---|", *rows])
    return f"{head('Hints of a request', 'tierkv/types/hints.py')}{HINTS_HEAD}\n{table}\n"


def metrics_reference() -> str:
    """``metrics.md``."""
    return f"{head('Metrics', 'tierkv/metrics/definitions.py')}\n{metrics_page.body()}"


def logs_reference() -> str:
    """``logs.md``."""
    return f"{head('Log lines', 'tierkv/logs/definitions.py')}\n{logs_page.body()}"


def states_page() -> str:
    """``states.md``."""
    return f"{head('States', 'the tables in the modules that it names')}\n{states.body()}"


def figures_reference() -> str:
    """``figures.md``."""
    return f"{head('Figures of the latest runs', 'docs/_generate/measured.json')}{figures_page.body()}"


def api_page() -> str:
    """``api.md``."""
    return head("Public API", "the docstrings of the public packages") + api.page()


PAGES: dict[str, Callable[[], str]] = {
    "../explanation/decisions/0001-layers.md": layers.page,
    "../operate/board.json": grafana.board,
    "api.md": api_page,
    "hooks.md": hooks_page,
    "errors.md": errors_page,
    "capabilities.md": capabilities_page,
    "hints.md": hints_page,
    "configuration.md": configuration_page,
    "cli.md": cli_page,
    "behaviour.md": behaviour_page,
    "logs.md": logs_reference,
    "metrics.md": metrics_reference,
    "states.md": states_page,
    "figures.md": figures_reference,
    **backends.PAGES,
    **plots.PLOTS,
    **pictures.PICTURES,
    **states.PICTURES,
}


def outdated(folder: Path, names: Collection[str] = ()) -> list[str]:
    """Names of pages in ``folder`` that are missing, or not what the code says; of those named, if any are."""
    pages = {name: page for name, page in PAGES.items() if name in names or not names}
    texts = {name: (folder / name).read_text(encoding="utf-8") if (folder / name).exists() else "" for name in pages}
    return [name for name, page in pages.items() if texts[name] != page()]


def main(arguments: list[str]) -> int:
    """Write what is outdated, or with ``--check`` only tell."""
    names = outdated(REFERENCE, [name for name in arguments if not name.startswith("--")])
    for name in names:
        if "--check" not in arguments:
            (REFERENCE / name).parent.mkdir(exist_ok=True)
            (REFERENCE / name).write_text(PAGES[name](), encoding="utf-8")
        sys.stdout.write(f"docs/reference/{name}\n")
    return 1 if names and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
