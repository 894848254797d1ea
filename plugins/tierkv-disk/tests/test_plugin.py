"""The plugin as tierkv finds it: entry point, version, options."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import tierkv_disk
from tierkv.abc import SPI_VERSION
from tierkv.config import load_config, parse_config, resolve
from tierkv.errors import ConfigError
from tierkv.plugins.loading import load_plugins
from tierkv_disk import DiskOptions

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_entry_point() -> None:
    """`pip install tierkv-disk` and `backend = "disk"` are connected by this entry point."""
    (point,) = entry_points(group="tierkv", name="disk")
    assert point.load() is tierkv_disk
    assert tierkv_disk.TIERKV_SPI == SPI_VERSION
    assert list(tierkv_disk.tierkv_backends()) == [tierkv_disk.PLUGIN]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "path = '': give the directory of this tier"),
        ({"path": "x", "durability": "often"}, "durability = 'often' is not one of 'none', 'batch', 'always'"),
        ({"path": "x", "direct_io": "yes"}, "direct_io = 'yes' is not one of 'auto', 'on', 'off'"),
        ({"path": "x", "min_free_bytes": -1}, "min_free_bytes = -1 is negative"),
        ({"path": "x", "directory_bytes_max": 5}, "directory_bytes_max = 5 is below 1 MiB"),
        ({"path": "x", "low_watermark": 0.99}, "low_watermark = 0.99, high_watermark = 0.95: give shares"),
        ({"path": "x", "high_watermark": 1.2}, "high_watermark = 1.2: give shares"),
        ({"path": "x", "low_watermark": 0}, "low_watermark = 0,"),
        ({"path": "x", "quarantine_bytes_max": -1}, "quarantine_bytes_max = -1 is negative"),
        ({"path": "x", "segment_bytes": 1000}, "segment_bytes = 1000 is below 1 MiB"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, str], message: str) -> None:
    """The framework adds file and key path; key, value and allowed values come from here."""
    with pytest.raises(ValueError, match=message):
        DiskOptions(**options)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [("direct_io", True, "'auto', 'on' or 'off'"), ("durability", "fsync", "'none', 'batch' or 'always'")],
)
def test_a_choice_of_another_type_is_answered_with_the_choices(option: str, value: object, allowed: str) -> None:
    """`direct_io = true` was answered with "must be text in quotes", which names no value that is allowed."""
    tier = {"backend": "disk", "path": "x", "capacity": "1GiB", option: value}
    with pytest.raises(ConfigError, match=rf"tiers\[0\]\.{option} = .*: must be {allowed}$"):
        resolve(parse_config({"host": {"capacity": "1GiB"}, "tiers": [tier]}), load_plugins())


def test_readme_lists_every_option_with_its_default(tmp_path: Path) -> None:
    """Users read the table; a default changed in the code alone would make it wrong."""
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.+?)`|required|none) \|", README, re.MULTILINE)
    options = {field.name: field for field in dataclasses.fields(DiskOptions)}
    assert [name for name, _ in rows] == list(options)
    for name, default in rows:
        tier = {"backend": "disk", "path": "x", "capacity": "1GiB"} | ({name: json.loads(default)} if default else {})
        stack = tmp_path / "stack.json"
        stack.write_text(json.dumps({"host": {"capacity": "1GiB"}, "tiers": [tier]}))
        (resolved,) = resolve(load_config(stack), load_plugins()).tiers
        assert resolved.options == DiskOptions("x"), f"the default of {name} is not {default}"


def test_readme_stack_is_valid(tmp_path: Path) -> None:
    """The block that users copy first."""
    (block,) = re.findall(r"^```toml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    stack = tmp_path / "stack.toml"
    stack.write_text(block)
    (tier,) = resolve(load_config(stack), load_plugins()).tiers
    assert tier.options == DiskOptions("/var/cache/tierkv/disk")
