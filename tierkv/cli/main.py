"""Entry of the ``tierkv`` program.

``tierkv --help`` must be fast: the table of commands below carries their one-line help, and a command's module is
imported when the command runs. Commands of plugins are looked for only where the table lacks a name, because finding
them imports every plugin; ``tierkv plugins`` lists them.
"""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tierkv import __version__
from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is not imported yet. ``target`` is ``module:attribute``; ``summary`` its line in the help."""

    target: str
    summary: str

    def load(self) -> click.Command:
        """Import it.

        Raises:
            click.ClickException: its module cannot be imported, which a missing extra explains best.
        """
        module, _, attribute = self.target.partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise click.ClickException(f"this command cannot be loaded: {error}") from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is not a command")
        return command


COMMANDS: Mapping[str, LazyCommand] = {
    "check": LazyCommand("tierkv.cli.check:check", "Validate a stack and probe its tiers."),
    "demo": LazyCommand("tierkv.cli.demo:demo", "Serve conversations through a stack, twice, and compare."),
    "explain": LazyCommand("tierkv.cli.explain:explain", "Tell the story of a chunk or a request from a record."),
    "plugins": LazyCommand("tierkv.cli.plugins:plugins", "List backends, codecs, policies and commands."),
    "replay": LazyCommand("tierkv.cli.replay:replay_command", "Try policies and capacities on a trace of requests."),
}


class LazyGroup(click.Group):
    """A group that knows names and summaries of its commands without importing them.

    A :class:`TierKVError` that escapes a command is the user's to mend: one message, exit code 2, and the traceback
    only with ``--debug``.
    """

    lazy: Mapping[str, LazyCommand] = COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the table, sorted."""
        return sorted({*self.lazy, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command: of the table, else of a plugin."""
        if cmd_name in self.lazy:
            return self.lazy[cmd_name].load()
        return super().get_command(ctx, cmd_name) or _command_of_a_plugin(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown name is answered with the nearest one."""
        name = args[0]
        command = self.get_command(ctx, name)
        if command is not None:
            return name, command, args[1:]
        if name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(name, self.lazy, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise click.UsageError(f"No such command {name!r}.{hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's
        """Write the table; nothing is imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.lazy[name].summary) for name in sorted(self.lazy)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of the table; nothing is imported."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415  only a completing shell needs it

        names = [CompletionItem(name, help=lazy.summary) for name, lazy in self.lazy.items()]
        return [item for item in names if item.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; turn an error of tierkv into one clean message."""
        try:
            return super().invoke(ctx)
        except TierKVError as error:
            if ctx.params.get("debug"):
                click.echo("".join(traceback.format_exception(error)), err=True)
            raise _WrongInput(str(error)) from error


class _WrongInput(click.ClickException):
    """What the user gave is wrong: the message says how to mend it."""

    exit_code = 2


def _command_of_a_plugin(name: str) -> click.Command | None:
    from tierkv.plugins.loading import load_plugins  # noqa: PLC0415 - plugins are asked only when a command is unknown

    commands, broken = load_plugins().commands(click.Command)
    for plugin in broken:
        click.echo(f"Warning: commands of plugin {plugin.origin} cannot be used: {plugin.error}", err=True)
    return next((found.plugin for found in commands if found.plugin.name == name), None)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Installed plugins may add commands; `tierkv plugins` lists them.",
)
@click.version_option(__version__, prog_name="tierkv", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error, for a report.")
def cli(*, debug: bool) -> None:
    """Keep the KV cache of LLM servers alive in a stack of tiers, and get it back bit-exact.

    \b
    Examples:
      tierkv demo                 see it work, on this machine
      tierkv check stack.toml     is this stack right, and are its places usable?
      tierkv plugins              what may a stack name?
      tierkv explain --help       why was this a miss?
    """  # noqa: D301  click reads the control character: what follows is not wrapped


def main() -> None:
    """Run the program and end the process with its exit code."""
    cli(prog_name="tierkv")


if __name__ == "__main__":
    main()
