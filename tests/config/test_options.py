"""Keys of a tier's table that only its plugin knows."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tierkv.abc import BackendPlugin
from tierkv.config.options import describe_options, make_options
from tierkv.errors import PluginError

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]  # what an unreadable annotation looks like


@pytest.fixture
def disk(make_backend: Any) -> BackendPlugin:
    """A backend with an option of each kind."""
    return make_backend("disk")


def complaints(plugin: BackendPlugin, **given: object) -> list[str]:
    """Messages about these options."""
    options, problems = make_options(plugin, given, "tiers[0]")
    assert options is None
    return [str(problem) for problem in problems]


def test_values_take_the_type_that_the_plugin_asks_for(disk: BackendPlugin) -> None:
    """A plugin's author states types once, in a dataclass, and never sees raw text again."""
    given = {
        "path": "/var/x",
        "direct": False,
        "ratio": 1,
        "segment_bytes": "4MiB",
        "spare_bytes": "1KB",
        "mode": "fast",
        "sync": "always",
        "hosts": ["a", "b"],
        "login": {"user": "u"},
        "headers": {"k": "v"},
    }
    options, problems = make_options(disk, given, "tiers[0]")
    assert problems == []
    assert isinstance(options, disk.options)
    assert options.path == Path("/var/x")
    assert (options.direct, options.ratio, options.depth) == (False, 1.0, 4)
    assert (options.segment_bytes, options.spare_bytes) == (4 * 2**20, 1000)
    assert (options.mode.name, options.sync, options.hosts) == ("FAST", "always", ("a", "b"))
    assert (options.login.user, options.headers) == ("u", {"k": "v"})


def test_a_path_object_is_as_good_as_its_text(disk: BackendPlugin, tmp_path: Path) -> None:
    """A stack that is written in Python has paths at hand."""
    options, _ = make_options(disk, {"path": tmp_path}, "tiers[0]")
    assert options.path == tmp_path


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "tiers[0].path: missing; backend 'disk' requires it"),
        ({"path": 3}, "tiers[0].path = 3: must be text in quotes"),
        (
            {"path": "/x", "pth": 1},
            "tiers[0].pth = 1: unknown key; did you mean 'path'?; allowed here: absence_ttl_s, ",
        ),
        ({"path": "/x", "capcity": "1GiB"}, "tiers[0].capcity = \"1GiB\": unknown key; did you mean 'capacity'?"),
        ({"path": "/x", "direct": "no"}, 'tiers[0].direct = "no": must be true or false'),
        ({"path": "/x", "direct": 0}, "tiers[0].direct = 0: must be true or false"),
        ({"path": "/x", "depth": "3"}, 'tiers[0].depth = "3": must be a whole number'),
        ({"path": "/x", "depth": 3.5}, "tiers[0].depth = 3.5: must be a whole number"),
        ({"path": "/x", "depth": "3MiB"}, 'tiers[0].depth = "3MiB": must be a whole number'),
        ({"path": "/x", "segment_bytes": "3 apples"}, "tiers[0].segment_bytes = \"3 apples\": unknown unit 'apples'"),
        ({"path": "/x", "mode": "fats"}, "tiers[0].mode = \"fats\": must be 'fast' or 'safe'"),
        ({"path": "/x", "sync": "on"}, "tiers[0].sync = \"on\": must be 'always' or 'never'"),
        ({"path": "/x", "hosts": ["a", 5]}, "tiers[0].hosts = ['a', 5]: must be text in quotes (at [1])"),
        ({"path": "/x", "login": {"user": 1}}, "tiers[0].login = {'user': 1}: must be text in quotes (at user)"),
        ({"path": "/x", "ratio": object}, "tiers[0].ratio = <class 'object'>: must be a plain value"),
        ({"path": "/x", "depth": 9}, "tiers[0]: backend 'disk' refuses its options: depth is at most 8"),
    ],
)
def test_each_kind_of_bad_option_is_told(disk: BackendPlugin, given: dict[str, object], says: str) -> None:
    """Options deserve the same errors as common keys; a user does not know which is which."""
    (line,) = complaints(disk, **given)
    assert line.startswith(says)


def test_every_bad_option_is_told_at_once(disk: BackendPlugin) -> None:
    """A missing, an unknown and a wrong option are three problems: all are reported."""
    lines = complaints(disk, depth="x", nonsense=1)
    assert sorted(line.partition(" ")[0].strip(":") for line in lines) == [
        "tiers[0].depth",
        "tiers[0].nonsense",
        "tiers[0].path",
    ]


def test_a_bad_password_is_not_repeated(disk: BackendPlugin) -> None:
    """Options carry credentials more often than any other part of a stack."""
    (line,) = complaints(disk, path="/x", proxy_password="hunter2")
    assert "hunter2" not in line


def test_a_value_that_contains_itself(disk: BackendPlugin) -> None:
    """YAML can write a list into itself; that must be an error, not a crash."""
    circle: list[object] = []
    circle.append(circle)
    (line,) = complaints(disk, path="/x", hosts=circle)
    assert "must be a plain value" in line


def test_options_are_described(disk: BackendPlugin) -> None:
    """`tierkv plugins --json` is where a user looks options up."""
    described = {option.name: option for option in describe_options(disk)}
    assert described["path"].required
    assert not described["depth"].required
    assert (described["depth"].kind, described["depth"].default) == ("int", 4)
    assert not described["headers"].required


class TestPluginsAtFault:
    """A fault of the plugin is reported as one, with the name of the plugin."""

    def test_an_option_with_the_name_of_a_common_key(self, make_backend: Any) -> None:
        """The user could never set it: the framework would take the key for itself."""

        @dataclass
        class Greedy:
            capacity: int = 1

        with pytest.raises(PluginError, match="'greedy' declares options that every tier has: capacity"):
            make_options(make_backend("greedy", Greedy), {}, "tiers[0]")

    def test_an_annotation_that_cannot_be_read(self, make_backend: Any) -> None:
        """Names imported for type checkers only do not exist when options are validated."""

        @dataclass
        class Shy:
            thing: Unknown

        with pytest.raises(PluginError, match=r"'shy': annotations of its options cannot be read: .*Unknown"):
            make_options(make_backend("shy", Shy), {"thing": 1}, "tiers[0]")

    def test_an_annotation_that_nobody_can_validate(self, make_backend: Any) -> None:
        """A socket cannot be written in a file."""

        class Socket:
            pass

        odd = make_dataclass("Odd", [("socket", Socket)])
        with pytest.raises(PluginError, match=r"'odd': option 'socket' cannot be validated"):
            make_options(make_backend("odd", odd), {"socket": 1}, "tiers[0]")

    def test_a_check_of_its_own_that_crashes(self, make_backend: Any) -> None:
        """A KeyError in a plugin's __post_init__ must not reach the user as a traceback."""

        @dataclass
        class Clumsy:
            value: int = 0

            def __post_init__(self) -> None:
                {}["absent"]

        (line,) = complaints(make_backend("clumsy", Clumsy))
        assert line == "tiers[0]: backend 'clumsy' refuses its options: 'absent'"
