"""Options of a backend or codec: the keys of a table that only its plugin defines.

A plugin declares them as a dataclass. Each value is validated by the annotation of its field, as strictly as JSON. Text
may become a path or an enum member, and a list a tuple; a number in quotes is an error. Whole-number fields whose name
ends in ``_bytes`` or ``_bytes_max`` also accept sizes such as ``"4MiB"``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from tierkv.abc import BackendPlugin, CodecPlugin
from tierkv.config.problems import Problem, key_path, unknown_key
from tierkv.config.tier_schema import TIER_KEYS
from tierkv.config.units import parse_size
from tierkv.errors import PluginError

ConfigurablePlugin = BackendPlugin | CodecPlugin
"""A plugin with options."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option of a plugin."""

    name: str
    """Name of the key."""
    kind: str
    """Annotation of the field, as text."""
    required: bool
    """Whether the option has no default."""
    default: object
    """Default value; None where it is not a constant."""


def describe_options(plugin: ConfigurablePlugin) -> list[Option]:
    """Describe the options of a backend or codec, in the order of its dataclass."""
    described = []
    for item in _fields(plugin):
        kind = item.type if isinstance(item.type, str) else getattr(item.type, "__name__", str(item.type))
        default = None if item.default is dataclasses.MISSING else item.default
        described.append(Option(item.name, kind, _is_required(item), default))
    return described


def make_options(plugin: ConfigurablePlugin, given: Mapping[str, Any], path: str) -> tuple[Any, list[Problem]]:
    """Build the options object of a plugin from the keys of a table.

    Args:
        plugin: the backend or codec.
        given: keys and values of the table, without the keys that every such table has.
        path: key path of the table, such as ``tiers[0]`` or ``tiers[0].codec``.

    Returns:
        The options object and no problems; or None and every problem.

    Raises:
        PluginError: the plugin's dataclass itself is wrong.
    """
    fields = {item.name: item for item in _fields(plugin)}
    hints = _hints(plugin)
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in fields:
            problems.append(unknown_key(f"{path}.{name}", name, _common_keys(plugin).union(fields), value))
            continue
        try:
            values[name] = _validate(plugin, name, hints, value)
        except ValidationError as error:
            problems += [_problem(f"{path}.{name}", detail["loc"], detail["msg"], value) for detail in error.errors()]
        except ValueError as error:
            problems.append(Problem(f"{path}.{name}", str(error), value))
    for name, item in fields.items():
        if _is_required(item) and name not in given:
            problems.append(Problem(f"{path}.{name}", f"missing; {_named(plugin)} requires it"))
    if problems:
        return None, problems
    try:
        return plugin.options(**values), []
    except Exception as error:  # noqa: BLE001  plugin code may raise anything; its text is shown to the user
        return None, [Problem(path, f"{_named(plugin)} refuses its options: {error}")]


def _named(plugin: ConfigurablePlugin) -> str:
    return f"{'backend' if isinstance(plugin, BackendPlugin) else 'codec'} {plugin.name!r}"


def _common_keys(plugin: ConfigurablePlugin) -> frozenset[str]:
    """Keys that every table of this kind has."""
    return TIER_KEYS if isinstance(plugin, BackendPlugin) else frozenset({"name"})


def _fields(plugin: ConfigurablePlugin) -> list[dataclasses.Field[Any]]:
    fields = [item for item in dataclasses.fields(plugin.options) if item.init]
    taken = sorted(_common_keys(plugin).intersection(item.name for item in fields))
    if taken:
        every = "tier" if isinstance(plugin, BackendPlugin) else "codec"
        raise PluginError(f"{_named(plugin)} declares options that every {every} has: {', '.join(taken)}")
    return fields


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _hints(plugin: ConfigurablePlugin) -> dict[str, Any]:
    try:
        return get_type_hints(plugin.options, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise PluginError(f"{_named(plugin)}: annotations of its options cannot be read: {error}") from error


def _validate(plugin: ConfigurablePlugin, name: str, hints: Mapping[str, Any], value: object) -> object:
    hint = hints[name]
    if name.endswith(("_bytes", "_bytes_max")) and isinstance(value, str) and (hint is int or int in get_args(hint)):
        value = parse_size(value)
    try:
        text = json.dumps(value, default=os.fspath)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("must be a plain value: text, number, true or false, list or table") from error
    try:
        return TypeAdapter(hint).validate_json(text, strict=True)
    except PydanticUserError as error:
        raise PluginError(f"{_named(plugin)}: option {name!r} cannot be validated: {error.message}") from error


_VALUES = {"a valid string": "text in quotes", "a valid boolean": "true or false", "a valid integer": "a whole number"}
"""Kinds of values in pydantic's words, and in those of our other messages."""


def _problem(path: str, location: tuple[str | int, ...], message: str, value: object) -> Problem:
    text = message.removeprefix("Value error, ").replace("Input should be", "must be", 1)
    for theirs, ours in _VALUES.items():
        text = text.replace(f"must be {theirs}", f"must be {ours}")
    inside = key_path(location)
    return Problem(path, f"{text} (at {inside})" if inside else text, value)
