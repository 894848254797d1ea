"""Reading of TOML, YAML and JSON files. Syntax errors name line and column."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tierkv.abc.places import exists
from tierkv.errors import ConfigError

FILE_BYTES_MAX = 1024 * 1024
YAML_VALUES_MAX = 100_000
"""Most values of a YAML file, with each alias counted as what it repeats: a page of aliases can mean billions."""

EXAMPLE = """\
[host]
capacity = "8GiB"

[[tiers]]
backend = "disk"
path = "/var/cache/tierkv"
capacity = "100GiB"
"""


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Read a file in the format that its suffix names.

    Raises:
        ConfigError: the file is missing, unreadable, of an unknown format, empty, too large, or not well formed. For a
            syntax error the message names line and column.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises for some paths that cannot exist
            raise ConfigError(f"{path}: is a directory; name the file in it that describes the stack")
        raise ConfigError(f"{path}: unknown suffix {path.suffix!r}; a stack is written in {', '.join(_PARSERS)}")
    text = _read_text(path)
    if not text.strip():
        raise ConfigError(f"{path}: is empty; a small stack is\n\n{EXAMPLE}")
    try:
        data = parse(text)
    except _SyntaxFaultError as fault:
        raise ConfigError(f"{path}: {fault}{_other_format(path, text)}") from fault
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply") from error
    if not isinstance(data, Mapping):
        kind = _KINDS.get(type(data), type(data).__name__)
        raise ConfigError(f"{path}: must be a table of keys, not {kind}{_other_format(path, text)}")
    return data


def _other_format(path: Path, text: str) -> str:
    """Return a hint where a text that its suffix does not fit is a stack in another format; otherwise empty."""
    for suffix in (".toml", ".json", ".yaml"):
        if _PARSERS[suffix] is not _PARSERS[path.suffix.lower()]:
            with suppress(_SyntaxFaultError, RecursionError):
                if isinstance(_PARSERS[suffix](text), Mapping):
                    return f"; its content is {suffix[1:].upper()}: rename it to {path.with_suffix(suffix).name}"
    return ""


_KINDS: Mapping[type, str] = {type(None): "nothing", list: "a list", str: "text", int: "a number", float: "a number"}


class _SyntaxFaultError(Exception):
    """The text is not well formed. The message ends with line and column where the parser knows them."""


def _read_text(path: Path) -> str:
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r}: is not a path: it contains a null character")
    try:
        _refuse_other_kinds(path)
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file (working directory: {Path.cwd()})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: has more than {FILE_BYTES_MAX} bytes; a stack is a page of text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _refuse_other_kinds(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; name the file of the stack")
    if exists(path) and not path.is_file():
        raise ConfigError(f"{path}: is not a regular file")


def _parse_toml(text: str) -> object:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise _SyntaxFaultError(f"is not valid TOML: {error}{_hint(text, str(error))}") from error


_SIZE = re.compile(r"[0-9.]+ ?[KMGTP]?i?B?")


def _hint(text: str, error: str) -> str:
    """Return a hint where the line of a TOML error repeats a key or a table, or has text in other quotes or none."""
    place = re.search(r"\(at line (\d+)", error)
    line = text.splitlines()[int(place[1]) - 1].strip() if place else ""
    key, _, value = (part.strip() for part in line.partition("="))
    if error.startswith("Cannot overwrite a value"):
        return f"; key {key!r} occurs twice in one table; keep one"
    if error.startswith("Cannot declare"):
        return f"; keep one {line}, with the keys of both"
    if "\u201c" in line or "\u201d" in line:
        return '; TOML takes straight quotes: "'
    if not re.fullmatch(r"[\w.-]+", key) or not re.fullmatch(r"[\w./:+ -]+", value):
        return ""
    try:
        tomllib.loads(line)
    except ValueError:
        shown = value if _SIZE.fullmatch(value) else "..."  # any other text may be a secret
        return f'; text and sizes are written in quotes: {key} = "{shown}"'
    return ""


def _parse_json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        message = f"is not valid JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
        raise _SyntaxFaultError(message) from error
    except ValueError as error:  # a number of thousands of digits
        raise _SyntaxFaultError(f"is not valid JSON: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise _SyntaxFaultError(f"key {key!r} occurs twice in one table; keep one")
        table[key] = value
    return table


def _parse_yaml(text: str) -> object:
    try:
        return yaml.load(text, _Loader)  # noqa: S506  a SafeLoader, which builds plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise _SyntaxFaultError(f"is not valid YAML: {error.problem or error.context}{where}") from error
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A date that no calendar has, or a tag such as !!int before another value: the library lets each pass.
        reason = " ".join(str(error).split())
        raise _SyntaxFaultError(f"is not valid YAML: {reason or type(error).__name__}") from error


class _Loader(yaml.SafeLoader):
    """YAML with plain values, unique keys and a bound. The library would keep the last of two equal keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._sizes: dict[int, int] = {}  # values in a node that has an anchor, by its identity

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        before, is_alias = self._values, self.check_event(yaml.AliasEvent)
        mark: Any = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # untyped there
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias is within what it repeats", problem_mark=mark)
        self._values += self._sizes[id(node)] if is_alias else 1
        if self._values > YAML_VALUES_MAX:
            raise yaml.MarkedYAMLError(problem=f"more than {YAML_VALUES_MAX} values", problem_mark=mark)
        if not is_alias:
            self._sizes[id(node)] = self._values - before
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                problem = f"key {name!r} occurs twice in one table; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return node


_PARSERS: Mapping[str, Callable[[str], object]] = {
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json,
}

SUFFIXES = frozenset(_PARSERS)
"""Suffixes of stack files."""
