"""A description meets the installed plugins."""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

from tierkv.config import parse_config, resolve
from tierkv.errors import ConfigError
from tierkv.plugins.loading import EntryPoint, load_plugins
from tierkv.plugins.registry import OWN_BACKENDS, PluginRegistry

ROOT = Path(__file__).resolve().parents[2]
DISK = {"backend": "disk", "path": "/x", "capacity": "1GiB"}


def stack(*tiers: dict[str, Any], **host: object) -> Any:
    """Stack with these tiers."""
    return parse_config({"host": {"capacity": "1GiB", **host}, "tiers": tiers})


def complaints(registry: PluginRegistry, *tiers: dict[str, Any], **host: object) -> list[str]:
    """Messages about these tiers, without the name of the source."""
    with pytest.raises(ConfigError) as caught:
        resolve(stack(*tiers, **host), registry, "s.toml")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("s.toml: ") for line in lines)
    return [line.removeprefix("s.toml: ") for line in lines]


def test_names_become_plugins(registry: PluginRegistry) -> None:
    """Code that opens a stack must not look up anything again, nor find it missing."""
    resolved = resolve(stack({**DISK, "codec": "zstd"}, {"backend": "bucket", "io_threads": 1}), registry)
    disk, bucket = resolved.tiers
    assert resolved.host_policy.name == "lru"
    assert (disk.backend.name, disk.codec.name, disk.policy.name) == ("disk", "zstd", "lru")
    assert disk.options.path == Path("/x")
    assert disk.config.capacity == 2**30
    assert disk.io_threads == disk.backend.capabilities.preferred_concurrency
    assert (bucket.backend.name, bucket.io_threads) == ("bucket", 1)


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        ({**DISK, "backend": "Disk"}, "tiers[0].backend = \"Disk\": unknown backend 'Disk'; did you mean 'disk'?"),
        (
            {**DISK, "codec": "zstdd"},
            "tiers[0].codec = \"zstdd\": unknown codec 'zstdd'; did you mean 'zstd'?; installed: aes-256-gcm, bf16, ",
        ),
        ({**DISK, "policy": "lur"}, "tiers[0].policy = \"lur\": unknown policy 'lur'; did you mean 'lru'?"),
        (
            {**DISK, "codec": "rough"},
            'tiers[0].codec = "rough": is lossy: values would come back as approximations; write lossy = true for ',
        ),
        ({**DISK, "codec": {"name": "rough"}}, 'tiers[0].codec = "rough": is lossy'),
        (
            {**DISK, "codec": {"name": "zstdd"}},
            "tiers[0].codec = \"zstdd\": unknown codec 'zstdd'; did you mean 'zstd'?",
        ),
        (
            {**DISK, "codec": {"name": "zstd", "lvl": 3}},
            "tiers[0].codec.lvl = 3: unknown key; did you mean 'level'?; allowed here: level, name",
        ),
        (
            {**DISK, "codec": {"name": "zstd", "level": "3"}},
            'tiers[0].codec.level = "3": must be a whole number',
        ),
        (
            {**DISK, "codec": {"name": "zstd", "level": 99}},
            "tiers[0].codec: codec 'zstd' refuses its options: level = 99 is not one of 1 to 22",
        ),
        ({**DISK, "codec": {"name": "none", "level": 1}}, "tiers[0].codec.level = 1: unknown key; allowed here: name"),
        (
            {**DISK, "codec": "aes-256-gcm"},
            "tiers[0].codec: codec 'aes-256-gcm' refuses its options: give either key_env, the name of an environment",
        ),
        (
            {**DISK, "codec": {"name": "aes-256-gcm", "key_env": "A", "key_file": "/b"}},
            "tiers[0].codec: codec 'aes-256-gcm' refuses its options: give either key_env",
        ),
        (
            {**DISK, "codec": {"name": "aes-256-gcm", "key_env": "A", "inner": "fp8"}},
            "tiers[0].codec.inner = \"fp8\": must be 'none', 'zstd' or 'bf16'",
        ),
        (
            {"backend": "disk", "path": "/x"},
            "tiers[0].capacity: missing; backend 'disk' needs a limit, such as capacity = ",
        ),
        (
            {"backend": "bucket", "capacity": "1GiB"},
            "tiers[0].capacity = \"1GiB\": backend 'bucket' is shared with other processes",
        ),
        (
            {"backend": "archive"},
            'tiers[0].write = "through": backend \'archive\' never writes; set write = "read_only"',
        ),
        ({**DISK, "io_threads": 99}, "tiers[0].io_threads = 99: backend 'disk' takes at most 2 calls at once"),
        ({**DISK, "pth": "/y"}, "tiers[0].pth = \"/y\": unknown key; did you mean 'path'?"),
        ({**DISK, "depth": 9}, "tiers[0]: backend 'disk' refuses its options: depth is at most 8"),
    ],
)
def test_each_kind_of_mismatch_is_told(registry: PluginRegistry, tier: dict[str, Any], says: str) -> None:
    """Faults that only the plugins know must be found before anything starts."""
    (line,) = complaints(registry, tier)
    assert line.startswith(says)


@pytest.mark.parametrize(
    "codec", [{"name": "rough"}, "rough", "none", {"name": "zstd", "level": 7}, {"name": "aes-256-gcm", "key_env": "A"}]
)
def test_a_codec_by_name_or_with_options(registry: PluginRegistry, codec: Any) -> None:
    """A lossy tier accepts every codec: earlier frames must stay readable after a change of the codec."""
    (tier,) = resolve(stack({**DISK, "codec": codec, "lossy": True}), registry).tiers
    assert tier.codec.name == (codec if isinstance(codec, str) else codec["name"])
    wanted = {} if isinstance(codec, str) else {name: value for name, value in codec.items() if name != "name"}
    assert all(getattr(tier.codec_options, name) == value for name, value in wanted.items())


SECRET = "a1" * 32


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "aes-256-gcm", "key": SECRET},
        {"name": "aes-256-gcm", "key_env": SECRET},
        {"name": "aes-256-gcm", "key_env": [SECRET]},
        {"name": "aes-256-gcm", "key_env": "A", "previous_key_env": [SECRET]},
        {"name": "aes-256-gcm", "key_env": "A", "previous_key_env": SECRET},
    ],
)
def test_a_key_in_the_configuration_is_refused_and_not_repeated(registry: PluginRegistry, codec: Any) -> None:
    """A key written in place of an option must not appear in the log of every start."""
    lines = complaints(registry, {**DISK, "codec": codec})
    assert lines
    assert SECRET[:8] not in "".join(lines)


def test_an_unknown_backend_comes_with_what_there_is_and_how_to_get_more(registry: PluginRegistry) -> None:
    """Its plugin may be a `pip install` away; a user should not have to know how plugins are named."""
    (line,) = complaints(registry, {"backend": "Mem_cached"})
    assert "unknown backend 'Mem_cached'; installed: archive, bucket, disk; if a plugin provides it: " in line
    assert line.endswith("pip install tierkv-mem-cached")


def test_a_misspelt_backend_does_not_come_with_a_package_to_install(registry: PluginRegistry) -> None:
    """A package of that name would be a foreign one."""
    (line,) = complaints(registry, {"backend": "dsik"})
    assert "did you mean 'disk'?" in line
    assert "pip install" not in line


@pytest.mark.parametrize(("name", "own"), [("redis", "valkey"), ("S3", "fsspec"), ("nvme", "disk")])
def test_the_name_of_a_product_leads_to_the_backend_that_serves_it(
    registry: PluginRegistry, name: str, own: str
) -> None:
    """A user of Redis was asked for a disk, and for a package of that name that this project does not have."""
    (line,) = complaints(registry, {"backend": name})
    assert f"unknown backend {name!r}; backend {own!r} serves it; installed: " in line
    assert f"tierkv-{name.lower()}" not in line
    assert ("pip install" in line) == (own not in registry.backends)


def test_a_file_of_a_later_format_is_refused() -> None:
    """After a downgrade, keys with another meaning must not be guessed."""
    with pytest.raises(ConfigError, match="version = 2"):
        parse_config({"version": 2, "host": {"capacity": "1GiB"}})


def test_a_backend_of_this_project_is_installed_from_its_folder(registry: PluginRegistry) -> None:
    """No index has it: under its name there, a user would get the package of a stranger."""
    (line,) = complaints(registry, {"backend": "lmdb"})
    assert line.endswith("in a checkout of tierkv: pip install . ./plugins/tierkv-lmdb")
    assert all((ROOT / f"plugins/tierkv-{name}/pyproject.toml").is_file() for name in OWN_BACKENDS)


def test_one_command_installs_all_missing_backends(registry: PluginRegistry) -> None:
    """A newcomer copies the first command of the message, and must not meet a second message."""
    lines = complaints(registry, {"backend": "lmdb"}, {"backend": "redis"}, {"backend": "lmdb", "name": "again"})
    command = "in a checkout of tierkv: pip install . ./plugins/tierkv-lmdb ./plugins/tierkv-valkey"
    assert [line.endswith(command) for line in lines] == [True, True, True]


def test_an_unknown_policy_of_the_host_tier(registry: PluginRegistry) -> None:
    """The host tier names a plugin, too."""
    (line,) = complaints(registry, policy="fifo")
    assert line.startswith("host.policy = \"fifo\": unknown policy 'fifo'; did you mean 's3-fifo'?; installed: ada")


def test_problems_of_all_tiers_are_told_at_once(registry: PluginRegistry) -> None:
    """One bad tier must not hide the next; an unknown backend must not hide a bad codec."""
    lines = complaints(
        registry,
        {"backend": "dsk", "codec": "gzip"},
        {"backend": "disk", "io_threads": 99, "depth": "x"},
        {"backend": "archive", "name": "old"},
        policy="fifo",
    )
    assert [line.partition(" ")[0].strip(":") for line in lines] == [
        "host.policy",
        "tiers[0].codec",
        "tiers[0].backend",
        "tiers[1].capacity",
        "tiers[1].io_threads",
        "tiers[1].depth",
        "tiers[1].path",
        "tiers[2].write",
    ]


def test_a_read_only_backend_that_is_read_only(registry: PluginRegistry) -> None:
    """The fix that the message proposes must work."""
    resolved = resolve(stack({"backend": "archive", "write": "read_only"}), registry)
    assert resolved.tiers[0].config.write == "read_only"


class TestBrokenPlugins:
    """A broken plugin stops the stack that names it, and no other."""

    BROKEN = EntryPoint("lame", "no_such_module_of_tierkv", "tierkv")

    def test_the_stack_that_asks_for_it_hears_its_error(self) -> None:
        """`unknown backend` would send the user to install what is installed."""
        registry = load_plugins(entry_points=lambda group: [self.BROKEN])
        (line,) = complaints(registry, {"backend": "lame"})
        assert line.startswith(
            "tiers[0].backend = \"lame\": backend 'lame': its plugin lame (no_such_module_of_tierkv)"
        )
        assert "is broken: ModuleNotFoundError: No module named 'no_such_module_of_tierkv'" in line

    def test_a_stack_without_it_runs(self) -> None:
        """One bad upgrade must not take down every service of a machine."""
        registry = load_plugins(entry_points=lambda group: [self.BROKEN])
        assert resolve(stack(), registry).host_policy.name == "lru"

    def test_an_unknown_name_mentions_that_some_plugin_is_broken(self) -> None:
        """A plugin may register names other than its own; the missing one may be there."""
        registry = load_plugins(entry_points=lambda group: [self.BROKEN])
        (line,) = complaints(registry, {"backend": "zig"})
        assert line.endswith("installed but broken: lame (`tierkv plugins` says why)")

    def test_options_that_only_their_author_can_mend(self, make_backend: Any, make_registry: Any) -> None:
        """The dataclass is checked when a stack needs it; the fault is reported with the backend's name."""
        odd = make_backend("odd", make_dataclass("Odd", [("name", str)]), bounded=False)
        (line,) = complaints(make_registry(odd), {"backend": "odd"})
        assert line.endswith("backend 'odd' declares options that every tier has: name")
