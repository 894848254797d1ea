"""Entry point of the ``tierkv`` program.

``tierkv --help`` must be fast. So the table of commands has their summaries, and a command's module is imported when
the command runs. Commands of plugins are searched only for names that the table lacks, because the search imports every
plugin. ``tierkv plugins`` lists them.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tierkv import __version__
from tierkv.cli.streams import HAS_JSON, prepare_streams
from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended: 128 and the number of the signal."""


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported on use."""

    target: str
    """Location of the command: ``module:attribute``."""
    summary: str
    """Line in the help."""

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            click.ClickException: the module cannot be imported, mostly because an extra is not installed.
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
    "copy": LazyCommand("tierkv.cli.stores.copying:copy", "Copy chunks between tiers, or to and from a folder."),
    "demo": LazyCommand("tierkv.cli.demo:demo", "Serve conversations through a stack, twice, and compare."),
    "du": LazyCommand("tierkv.cli.stores.listing:du", "Add up stored chunks by model, tenant, group, age or codec."),
    "explain": LazyCommand("tierkv.cli.explain:explain", "Show the events of a chunk or a request from a record."),
    "gc": LazyCommand("tierkv.cli.stores.removing:gc", "Remove the oldest chunks, down to a size or an age."),
    "inspect": LazyCommand("tierkv.cli.stores.inspect:inspect", "Show one stored chunk, and whether it is whole."),
    "ls": LazyCommand("tierkv.cli.stores.listing:ls", "List what a tier keeps: models, chunks, bytes, ages."),
    "new-plugin": LazyCommand("tierkv.cli.new_plugin:new_plugin", "Write the distribution of a new backend."),
    "plan": LazyCommand("tierkv.cli.planning.plan:plan_command", "Compare what stacks would save and cost."),
    "plugins": LazyCommand("tierkv.cli.plugins:plugins", "List backends, codecs, policies and commands."),
    "replay": LazyCommand("tierkv.cli.planning.replay:replay_command", "Play a trace against policies or stacks."),
    "rm": LazyCommand("tierkv.cli.stores.removing:rm", "Remove stored chunks by model, tenant, age or key."),
    "top": LazyCommand("tierkv.cli.top.command:top", "Watch a running stack: tiers, hits, speeds, what happened."),
    "trace": LazyCommand("tierkv.cli.planning.trace:trace_command", "Turn the record of a stack into a trace."),
    "verify": LazyCommand("tierkv.cli.stores.verify:verify", "Read and check every stored chunk; remove damaged ones."),
    "warm": LazyCommand("tierkv.cli.stores.copying:warm", "Copy chunks up the tiers of a stack."),
}


class LazyGroup(click.Group):
    """Group with names and summaries of its commands, which it does not import.

    A :class:`TierKVError` or an OSError raised by a command is shown as one message, with exit code 2. ``--debug`` adds
    the traceback. Behind ``--json`` the message is on standard output as well, as an object. An interrupted command
    ends with exit code 130, as in a shell.
    """

    lazy: Mapping[str, LazyCommand] = COMMANDS

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401  click's
    ) -> click.Context:
        """Parse the words before a command. Help that cannot be printed ends as a command does."""
        with _one_message(None):
            return super().make_context(info_name, args, parent, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the table, sorted."""
        return sorted({*self.lazy, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command: from the table, otherwise from a plugin."""
        if cmd_name in self.lazy:
            return self.lazy[cmd_name].load()
        return super().get_command(ctx, cmd_name) or _command_of_a_plugin(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does; the message for an unknown name has the nearest one."""
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
        """Write the table without importing commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.lazy[name].summary) for name in sorted(self.lazy)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of the table without importing commands."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415  only used for completion

        names = [CompletionItem(name, help=lazy.summary) for name, lazy in self.lazy.items()]
        return [item for item in names if item.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; show an error of tierkv or of the system as one message."""
        wants_json = "--json" in ctx.args
        try:
            with _one_message(ctx):
                return super().invoke(ctx)
        except click.ClickException as error:
            if wants_json and not ctx.meta.get(HAS_JSON):
                with suppress(OSError):  # of standard output itself; the message follows on the other stream
                    click.echo(json.dumps({"ok": False, "error": error.format_message()}))
            raise
        except (KeyboardInterrupt, RuntimeError) as error:
            # Before Python 3.12, an interruption of an import may arrive as the cause of a RuntimeError.
            if not any(isinstance(one, KeyboardInterrupt) for one in (error, error.__cause__)):
                raise
            click.echo("Interrupted. What was done until here stays done.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


@contextmanager
def _one_message(ctx: click.Context | None) -> Iterator[None]:
    """Turn an error of tierkv or of the system into one that click shows."""
    try:
        yield
    except TierKVError as error:
        raise _shown(ctx, error, str(error)) from error
    except BrokenPipeError:
        raise  # the reader of the output has enough: click ends the program quietly
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        raise _shown(ctx, error, f"{where}{error.strerror or error}") from error


def _shown(ctx: click.Context | None, error: Exception, message: str) -> click.ClickException:
    if ctx is not None and ctx.params.get("debug"):
        click.echo("".join(traceback.format_exception(error)), err=True)
    return _WrongInput(message)


class _WrongInput(click.ClickException):
    """Wrong input. The message includes the fix."""

    exit_code = 2


def _command_of_a_plugin(name: str) -> click.Command | None:
    from tierkv.plugins.loading import load_plugins  # noqa: PLC0415 - plugins are loaded only for unknown commands

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
    """Keep the KV cache of LLM servers in a stack of tiers, and load it back bit for bit.

    \b
    Examples:
      tierkv demo                 run a demonstration on this machine
      tierkv check stack.toml     check a stack and its storage
      tierkv ls stack.toml        list what the tiers keep
      tierkv plugins              list backends, codecs and policies
      tierkv explain --help       find the reason for a miss
      tierkv top :9400            watch a running stack
    """  # noqa: D301  click reads the control character, and does not wrap the rest


def main() -> None:
    """Run the program and end the process with its exit code."""
    prepare_streams()
    cli(prog_name="tierkv")


if __name__ == "__main__":
    main()
