"""Files of a stack: three syntaxes, one meaning, and every fault that a file can have."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tierkv.config import load_config
from tierkv.config.reading import FILE_BYTES_MAX
from tierkv.errors import ConfigError

STACK = {
    "version": 1,
    "host": {"capacity": "1GiB"},
    "tiers": [{"backend": "disk", "path": "/var/cache/tierkv", "capacity": "8GiB", "retries": 3}],
}
TOML = """
version = 1
[host]
capacity = "1GiB"
[[tiers]]
backend = "disk"
path = "/var/cache/tierkv"
capacity = "8GiB"
retries = 3
"""


def complaint(path: Path) -> str:
    """Message for an unusable file."""
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path)), "an error names its file"
    return str(caught.value)


def written(folder: Path, name: str, text: str | bytes) -> Path:
    """A file with this content."""
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as an unprivileged user for a while: file permissions do not bind root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_toml_yaml_and_json_mean_the_same(tmp_path: Path) -> None:
    """The syntax is a matter of taste; the stack is not."""
    paths = [
        written(tmp_path, "a.toml", TOML),
        written(tmp_path, "b.yaml", yaml.safe_dump(STACK)),
        written(tmp_path, "c.YML", yaml.safe_dump(STACK)),
        written(tmp_path, "d.json", json.dumps(STACK)),
        written(tmp_path, "e.toml", b"\xef\xbb\xbf" + TOML.replace("\n", "\r\n").encode()),
    ]
    stacks = [load_config(path) for path in paths]
    assert all(stack == stacks[0] for stack in stacks)
    assert stacks[0].tiers[0].retries == 3


def test_a_file_may_be_named_by_text(tmp_path: Path) -> None:
    """Callers have paths as text as often as as paths."""
    assert load_config(str(written(tmp_path, "a.toml", TOML))).host.capacity == 2**30


def test_a_problem_names_the_file_that_it_is_in(tmp_path: Path) -> None:
    """With several stacks, the key path alone does not identify the file."""
    assert "host.capacity: missing" in complaint(written(tmp_path, "a.toml", "[host]"))


def test_a_missing_file(tmp_path: Path) -> None:
    """A relative path is often right, and the working directory wrong; so the message shows it."""
    assert f"no such file (working directory: {Path.cwd()})" in complaint(tmp_path / "absent.toml")


def test_a_directory(tmp_path: Path) -> None:
    """Tab completion stops at the directory."""
    folder = tmp_path / "stacks.toml"
    folder.mkdir()
    assert "is a directory; name the file" in complaint(folder)


def test_a_pipe(tmp_path: Path) -> None:
    """Reading a pipe without a writer would hang forever."""
    path = tmp_path / "pipe.toml"
    os.mkfifo(path)
    assert "is not a regular file" in complaint(path)


def test_a_path_through_a_file(tmp_path: Path) -> None:
    """The operating system's other refusals must be clean messages, too."""
    file = written(tmp_path, "a.toml", TOML)
    assert "cannot be read: Not a directory" in complaint(file / "b.toml")


def test_a_path_that_is_none(tmp_path: Path) -> None:
    """A null character is refused by Python, not by the operating system."""
    with pytest.raises(ConfigError, match="is not a path"):
        load_config("a\0.toml")


@pytest.mark.parametrize("locked", ["file", "folder"])
def test_an_unreadable_file(tmp_path: Path, locked: str) -> None:
    """A service often runs as another user than the one who wrote its file."""
    folder = tmp_path / "etc"
    folder.mkdir()
    path = written(folder, "a.toml", TOML)
    (path if locked == "file" else folder).chmod(0)
    with without_privileges():
        assert "cannot be read: Permission denied" in complaint(path)
    folder.chmod(0o700)


def test_an_unknown_suffix(tmp_path: Path) -> None:
    """Guessing a syntax from the content would turn one error into another."""
    assert "unknown suffix '.ini'; a stack is written in .toml, .yaml, .yml, .json" in complaint(tmp_path / "a.ini")
    assert "unknown suffix ''" in complaint(tmp_path / "stack")


@pytest.mark.parametrize("name", ["a.toml", "a.yaml", "a.json"])
def test_an_empty_file_gets_an_example(tmp_path: Path, name: str) -> None:
    """A user who starts with an empty file needs an example, and it must work."""
    message = complaint(written(tmp_path, name, " \n"))
    assert "is empty" in message
    example = message.partition("\n\n")[2]
    assert load_config(written(tmp_path, "example.toml", example)).tiers[0].backend == "disk"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "[host]\ncapacity = 8GiB\n", "is not valid TOML: .*line 2, column 13"),
        ("a.toml", "[host]\ncapacity = 8GiB\n", 'text and sizes are written in quotes: capacity = "8GiB"$'),
        ("a.toml", "[[tiers]]\nbackend = disk\n", 'text and sizes are written in quotes: backend = "[.]{3}"$'),
        ("a.toml", "[[tiers]]\npassword = hunter2\n", r'\(at line 2, column \d+\); text .* password = "[.]{3}"$'),
        (
            "a.toml",
            "[host]\na = 1\na = 2\nb = 3\n",
            r"line 3, column \d+\); key 'a' occurs twice in one table; keep one$",
        ),
        ("a.toml", "[host]\na = 1\na = 2\n", "is not valid TOML: .*line 3"),
        ("a.toml", "[host]\n[host]\n", r"is not valid TOML: .*line 2.*; keep one \[host\], with the keys of both$"),
        ("a.toml", "[host]\ncapacity = \u201c8GiB\u201d\n", 'line 2, column 12.; TOML takes straight quotes: "$'),
        ("a.toml", f"a = {'9' * 5000}", "is not valid TOML: "),
        ("a.toml", "a = " + "[" * 5000, "is nested too deeply"),
        ("a.json", '{"host": {,}}', r"is not valid JSON: .*\(at line 1, column 11\)"),
        ("a.json", '{"host": {"capacity": 1, "capacity": 2}}', "key 'capacity' occurs twice in one table; keep one"),
        ("a.json", f'{{"a": {"9" * 5000}}}', "is not valid JSON: "),
        ("a.json", "[" * 100_000, "is nested too deeply"),
        ("a.yaml", "host: [1, 2\n", r"is not valid YAML: .*\(at line 2, column 1\)"),
        ("a.yaml", "host:\n\tcapacity: 1\n", r"is not valid YAML: .*\(at line 2, column 1\)"),
        ("a.yaml", "host:\n  a: 1\n  a: 2\n", r"key 'a' occurs twice in one table; keep one \(at line 3, column 3\)"),
        (
            "a.yaml",
            "host: !!python/object/apply:os.getcwd []\n",
            r"could not determine a constructor.*line 1, column 7",
        ),
        ("a.yaml", "host: 2024-02-31\n", "is not valid YAML: "),
        ("a.yaml", "host: \x07\n", "is not valid YAML: "),
        ("a.yaml", "? [a, b]\n: 1\n", "is not valid YAML: .*unhashable"),
        ("a.yaml", "[" * 5000, "is nested too deeply"),
        ("a.yaml", "# nothing\n", "must be a table of keys, not nothing"),
        ("a.yaml", "- host\n", "must be a table of keys, not a list"),
        ("a.json", '"host"', "must be a table of keys, not text"),
        ("a.json", "3", "must be a table of keys, not a number"),
        ("a.toml", b"[host]\n# \xff\n", r"is not UTF-8 text \(byte 9\); save it as UTF-8"),
        ("a.toml", "# " + "x" * FILE_BYTES_MAX, "has more than 1048576 bytes"),
    ],
    ids=lambda value: value[:30].encode() if isinstance(value, str) else None,
)
def test_a_malformed_file_is_told_with_its_place(tmp_path: Path, name: str, text: str | bytes, says: str) -> None:
    """A syntax error must have its position: line and column."""
    message = complaint(written(tmp_path, name, text))
    assert "\n" not in message
    assert re.search(says, message), message


def test_yaml_merges_may_override(tmp_path: Path) -> None:
    """Merging exists to override keys; only a key written twice is a mistake."""
    text = """
base: &base {backend: disk, path: /a, capacity: 1GiB}
host: {capacity: 1GiB}
tiers:
  - &one {<<: *base, capacity: 2GiB}
  - {<<: *one, name: second, capacity: 3GiB}
"""
    path = written(tmp_path, "a.yaml", text)
    message = complaint(path)
    assert "base = " in message, "only the helper key is refused"
    assert "twice" not in message
    without_base = text.replace("base: &base", "host: &base", 1).replace("host: {capacity: 1GiB}\n", "", 1)
    assert "unknown key" in complaint(written(tmp_path, "b.yaml", without_base))
