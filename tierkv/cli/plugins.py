"""``tierkv plugins``: list installed plugins, their origin and abilities, and broken plugins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from rich.text import Text

from tierkv import __version__
from tierkv.abc import SPI_VERSION, BackendPlugin, Capabilities, CodecPlugin
from tierkv.cli.output import BAD, DIM, Cell, console, print_json, print_table
from tierkv.config.options import describe_options
from tierkv.errors import PluginError
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.origins import BrokenPlugin, Origin
from tierkv.plugins.registry import PluginRegistry

_FLAGS = ("durable", "shared", "authoritative_index", "scan", "read_only", "bounded")


@dataclass(frozen=True, slots=True)
class Row:
    """One registered value, observer or command."""

    kind: str
    """Kind: backend, codec, policy, observer or command."""
    name: str
    """Registered name."""
    summary: str
    """One line of description."""
    origin: Origin
    """Origin of the plugin."""
    abilities: str = ""
    """Capabilities in words."""
    details: dict[str, Any] = field(default_factory=dict)
    """Capabilities and options for the JSON output."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the options of every backend.")
@click.pass_context
def plugins(ctx: click.Context, *, as_json: bool) -> None:
    """List the installed backends, codecs and policies, and the observers and commands that plugins add.

    Each row has version, origin, abilities and load time. Installed but broken plugins follow with their errors.
    `tierkv --debug plugins` shows their tracebacks.

    \b
    Examples:
      tierkv plugins
      tierkv plugins --json | jq '.plugins[] | select(.kind == "backend") | .options'
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    registry = load_plugins()
    commands, broken_commands = registry.commands(click.Command)
    rows = [*_rows(registry)]
    rows += [Row("observer", found.origin.name, "events of chunks", found.origin) for found in registry.observers]
    rows += [
        Row("command", found.plugin.name or "?", found.plugin.get_short_help_str(), found.origin) for found in commands
    ]
    broken = [*registry.broken, *broken_commands]
    if as_json:
        print_json({"tierkv": __version__, "spi": SPI_VERSION, "plugins": [_as_json(row) for row in rows], "broken": [
            {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version, "error": plugin.error}
            for plugin in broken
        ]})  # fmt: skip
        return
    columns = ("kind", "name", "from", "SPI", "load ms", "summary", "abilities")
    print_table(f"tierkv {__version__}, plugin interface {SPI_VERSION}", columns, [_cells(row) for row in rows])
    _print_broken(broken, with_traceback=bool(ctx.find_root().params.get("debug")))


def _rows(registry: PluginRegistry) -> Iterator[Row]:
    for backend in registry.backends.values():
        plugin = backend.plugin
        capabilities = plugin.capabilities
        details = {"capabilities": asdict(capabilities), **_options(plugin)}
        yield Row("backend", plugin.name, plugin.summary, backend.origin, _abilities(capabilities), details)
    for codec in registry.codecs.values():
        abilities = ", ".join(["lossy" if codec.plugin.lossy else "lossless", *["conceals"] * codec.plugin.conceals])
        details = _options(codec.plugin)
        yield Row("codec", codec.plugin.name, codec.plugin.summary, codec.origin, abilities, details)
    for policy in registry.policies.values():
        yield Row("policy", policy.plugin.name, policy.plugin.summary, policy.origin)


def _abilities(capabilities: Capabilities) -> str:
    flags = [name for name in _FLAGS if getattr(capabilities, name)]
    return ", ".join([*flags, f"batch {capabilities.preferred_batch}", f"calls {capabilities.preferred_concurrency}"])


def _options(plugin: BackendPlugin | CodecPlugin) -> dict[str, Any]:
    try:
        return {"options": [asdict(option) for option in describe_options(plugin)]}
    except PluginError as error:
        return {"options_error": str(error)}


def _cells(row: Row) -> list[Cell]:
    origin = row.origin
    source = f"{origin.distribution} {origin.version}".strip() or origin.target
    load_ms = f"{origin.load_s * 1e3:.1f}"
    return [row.kind, Text(row.name, "bold"), source, str(SPI_VERSION), load_ms, row.summary, Text(row.abilities, DIM)]


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "name": row.name,
        "summary": row.summary,
        "spi": SPI_VERSION,
        "distribution": row.origin.distribution,
        "version": row.origin.version,
        "entry_point": row.origin.name,
        "module": row.origin.target,
        "load_s": row.origin.load_s,
        **row.details,
    }


def _print_broken(broken: Iterable[BrokenPlugin], *, with_traceback: bool) -> None:
    out = console()
    for plugin in broken:
        out.print(Text(f"broken: {plugin.origin}: {plugin.error}", BAD))
        if with_traceback:
            out.print(Text(plugin.traceback, DIM))
