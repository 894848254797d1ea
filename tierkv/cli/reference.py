"""Generator of docs/reference/cli.md. A test compares the committed page."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from tierkv.cli.main import COMMANDS, cli

_HEAD = """\
# The `tierkv` program

<!-- Made from the commands in tierkv/cli/ by `nox -s generate`; change that, not this page. -->

A command ends with 0, 1 or 2; its help says which means what, and 130 is an interruption. With `--json`, standard
output has one object, or one per line where the help says so. A command that cannot do its work prints one, too:
`{"ok": false, "error": "..."}`, with the message that is on standard error.
"""

_COLUMNS = 100


def render_reference() -> str:
    """Render the help of the program and its built-in commands as Markdown."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    context = click.Context(cli, info_name="tierkv", terminal_width=_COLUMNS, **cli.context_settings)
    yield _section("tierkv", cli.get_help(context))
    for name in sorted(COMMANDS):
        try:
            command = COMMANDS[name].load()
        except click.ClickException:  # its extra is not installed; the test of the page reports that
            continue
        inner = click.Context(command, info_name=name, parent=context, **command.context_settings)
        yield _section(f"tierkv {name}", command.get_help(inner))


def _section(title: str, text: str) -> str:
    return f"## `{title}`\n\n```text\n{inspect.cleandoc(text)}\n```\n"
