"""`tierkv plugins`: what is installed, from where, what it can do, what is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from tierkv import __version__

Run = Callable[..., Result]

pytestmark = pytest.mark.usefixtures("site")


def report(tierkv: Run) -> dict[str, Any]:
    """Output of `tierkv plugins --json`."""
    said = tierkv("plugins", "--json")
    assert said.exit_code == 0, said.output
    parsed: dict[str, Any] = json.loads(said.stdout)
    return parsed


def test_the_table_tells_name_origin_and_abilities(tierkv: Run) -> None:
    """Before writing a stack, a user looks here for what it may name."""
    said = tierkv("plugins")
    assert said.exit_code == 0
    line = next(line for line in said.stdout.splitlines() if " folder " in line)
    for part in ("backend", "tierkv-places 4.5", "the folder one", "durable, bounded, batch 8, calls 2"):
        assert part in line
    assert any(
        "codec" in line and " zstd " in line and f"tierkv {__version__}" in line for line in said.stdout.splitlines()
    )
    assert any("policy" in line and " lru " in line for line in said.stdout.splitlines())
    assert any(
        "observer" in line and " places " in line and "tierkv-places 4.5" in line for line in said.stdout.splitlines()
    )
    assert any(
        "command" in line and " greet " in line and "Print a greeting" in line for line in said.stdout.splitlines()
    )


def test_json_tells_everything_about_a_backend(tierkv: Run) -> None:
    """No other command lists the options."""
    (folder,) = [plugin for plugin in report(tierkv)["plugins"] if plugin["name"] == "folder"]
    assert (folder["kind"], folder["distribution"], folder["version"], folder["spi"]) == (
        "backend",
        "tierkv-places",
        "4.5",
        1,
    )
    assert (folder["entry_point"], folder["module"]) == ("places", "installed_places")
    assert folder["load_s"] > 0
    assert folder["capabilities"]["durable"] is True
    assert folder["options"] == [
        {"name": "path", "kind": "Path", "required": True, "default": None},
        {"name": "limit_bytes", "kind": "int", "required": False, "default": 1},
    ]


def test_json_has_the_versions(tierkv: Run) -> None:
    """A report of a bug carries this object."""
    found = report(tierkv)
    assert (found["tierkv"], found["spi"]) == (__version__, 1)
    kinds = {plugin["kind"] for plugin in found["plugins"]}
    assert kinds == {"backend", "codec", "policy", "observer", "command"}


def test_a_broken_plugin_is_named_and_the_rest_is_listed(tierkv: Run, break_plugin: Callable[[str], None]) -> None:
    """Looking for what is wrong must work best when something is."""
    break_plugin("\nraise RuntimeError('[bold]no licence[/bold]')\n")
    said = tierkv("plugins")
    assert said.exit_code == 0
    assert "broken: tierkv-places 4.5 (places = installed_places): RuntimeError: [bold]no licence[/bold]" in said.stdout
    assert "Traceback" not in said.stdout
    assert " zstd " in said.stdout
    (broken,) = [plugin for plugin in report(tierkv)["broken"] if plugin["name"] == "places"]
    assert broken == {
        "name": "places",
        "distribution": "tierkv-places",
        "version": "4.5",
        "error": "RuntimeError: [bold]no licence[/bold]",
    }


def test_debug_shows_an_author_where_it_broke(tierkv: Run, break_plugin: Callable[[str], None]) -> None:
    """One line is enough for a user, and useless to the plugin's author."""
    break_plugin("\nraise RuntimeError('no licence')\n")
    said = tierkv("--debug", "plugins")
    assert "Traceback (most recent call last)" in said.stdout
    assert "installed_places.py" in said.stdout


def test_options_that_cannot_be_told_do_not_hide_the_backend(tierkv: Run, break_plugin: Callable[[str], None]) -> None:
    """The list is for finding such faults."""
    break_plugin("""
@dataclass
class Greedy:
    capacity: int = 1

@hookimpl
def tierkv_backends():
    return [BackendPlugin("greedy", "", Greedy, Capabilities(), opened)]
""")
    (greedy,) = [plugin for plugin in report(tierkv)["plugins"] if plugin["name"] == "greedy"]
    assert "declares options that every tier has: capacity" in greedy["options_error"]
