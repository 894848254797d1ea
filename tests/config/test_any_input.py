"""Any file of a stack: a configuration, or an error that names the file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st
from parser_inputs import any_bytes, any_json, parser_test, written

from tierkv.config import parse_config
from tierkv.config.loading import parse_sound_part
from tierkv.config.reading import read_mapping
from tierkv.config.units import format_size, parse_size
from tierkv.errors import ConfigError

HERE = Path(__file__).parent
STACK = {
    "host": {"capacity": "8GiB"},
    "namespace": {"model": "m", "epoch": "2"},
    "lookup": {"deadline_s": 0.5},
    "tenants": {"tracked_max": 8},
    "tiers": [
        {
            "backend": "disk",
            "path": "/x",
            "capacity": "1GiB",
            "codec": {"name": "zstd", "level": 3},
            "tenant_quota": "1MiB",
        },
        {"backend": "fsspec", "name": "s3", "url": "s3://b"},
    ],
}
TOML = b"""
[host]
capacity = "8GiB"
[lookup]
deadline_s = 1e3
[[tiers]]
backend = "disk"
path = '/x'
seen = 1979-05-27T07:32:00Z
capacity = 100_000
codec = { name = "zstd", level = 3 }
"""
YAML = b"""
base: &base
  backend: disk
  capacity: !!str 1GiB
host: {capacity: 8GiB}
tiers:
- <<: *base
  path: "/x"
  seen: 2001-12-14t21:59:43.10-05:00
- {backend: fsspec, url: s3://b, many: [0x1f, 1_000, 190:20:30, .inf, !!binary aGk=, ~, yes]}
"""
TAGS = (b"!!int ", b"!!float ", b"!!bool ", b"!!timestamp ", b"!!binary ", b"!!set ", b"!!omap ", b"&a ", b"*a ", b"? ")


def yaml_texts() -> st.SearchStrategy[bytes]:
    """Draw YAML with tags, anchors and aliases where none belong."""
    lines = YAML.splitlines(keepends=True)

    def joined(parts: list[tuple[int, bytes, int]]) -> bytes:
        changed = list(lines)
        for line, tag, at in parts:
            text = changed[line]
            place = min(at, len(text) - 1)
            changed[line] = text[:place] + b" " + tag + text[place:]
        return b"".join(changed)

    part = st.tuples(st.integers(0, len(lines) - 1), st.sampled_from(TAGS), st.integers(0, 40))
    return st.lists(part, max_size=3).map(joined)


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json"])
@parser_test(HERE / "corpus" / "file", any_bytes([TOML, YAML, written(STACK)]) | yaml_texts(), share=2)
def test_any_file_is_a_table_or_an_error(tmp_path_factory: pytest.TempPathFactory, suffix: str, data: bytes) -> None:
    """The first thing that a user writes: a mistake gives one message with the file's name, never a traceback."""
    path = tmp_path_factory.getbasetemp() / f"stack{suffix}"
    path.write_bytes(data)
    try:
        assert isinstance(read_mapping(path), dict)
    except ConfigError as error:
        message = str(error)
        assert message.startswith(f"{path}: ")


@parser_test(HERE / "corpus" / "mapping", any_json([STACK]))
def test_any_table_is_a_stack_or_an_error(data: bytes) -> None:
    """Values of every type in every place; the part that is sound is found whatever the rest is."""
    try:
        mapping = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(mapping, dict):
        return
    part = parse_sound_part(mapping)
    try:
        assert parse_config(mapping, source="s.json") == part.config
        assert not part.problems
    except ConfigError as error:
        message = str(error)
        assert message.startswith("s.json: ")
        assert part.problems


@parser_test(
    HERE / "corpus" / "size", any_bytes([b"8GiB", b"1.5 KB", b" 4096 ", b"+0.1PiB", b"9223372036854775807"], 30)
)
def test_any_text_is_a_size_or_none(data: bytes) -> None:
    """Sizes are typed by hand; one that is accepted is shown as the same number of bytes."""
    try:
        size = parse_size(data.decode(errors="replace"))
    except ValueError as error:
        message = str(error)
        assert "units" in message or "8 EiB" in message
        return
    assert parse_size(format_size(size)) == size


def test_the_valid_inputs_are_valid() -> None:
    """Changes of inputs that no parser accepts would test its first line only."""
    assert tomllib.loads(TOML.decode())["host"]
    assert yaml.safe_load(YAML)["tiers"]
    assert parse_config(STACK).tiers
