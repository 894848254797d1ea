"""Problems of a configuration, each with its key path, its value and the allowed values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tierkv.config.describing import allowed_values, model_at, model_of
from tierkv.errors import ConfigError
from tierkv.plugins.registry import nearest_hint

_VALUE_CHARS_MAX = 80
_SECRET = re.compile(r"secret|password|passphrase|credential|(^|_)key(_env)?$|_token$")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a configuration."""

    path: str
    """Key path such as ``tiers[1].capacity``; empty for the file as a whole."""
    message: str
    """The fault, the allowed values, and the fix."""
    value: object = _ABSENT
    """The given value. Omitted where no value was given, or where it does not help."""

    def __str__(self) -> str:
        """Text such as ``tiers[1].capacity = "0GiB": must be at least 1 byte``."""
        shown = "" if self.value is _ABSENT else f" = {_show(self.path, self.value)}"
        return f"{self.path}{shown}: {self.message}" if self.path else self.message


def raise_problems(source: str, problems: Iterable[Problem]) -> None:
    """Raise all problems as one error, one line each. Without problems, do nothing.

    Raises:
        ConfigError: there is at least one problem.
    """
    lines = [f"{source}: {problem}" for problem in problems]
    if lines:
        raise ConfigError("\n".join(lines))


def problems_of(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Translate the errors of pydantic into problems."""
    return [_translate(detail, root) for detail in error.errors(include_url=False)]


def without_consequences(problems: Iterable[Problem], known: Iterable[Problem]) -> list[Problem]:
    """Leave out problems at, or inside of, a place that has a known one: they may come of it."""
    paths = [problem.path for problem in known]
    return [
        problem
        for problem in problems
        if not any(problem.path == path or problem.path.startswith((f"{path}.", f"{path}[")) for path in paths)
    ]


def key_path(location: Sequence[str | int]) -> str:
    """Key path as text: ``("tiers", 1, "capacity")`` becomes ``tiers[1].capacity``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f"{'.' if path else ''}{part}"
    return path


def unknown_key(path: str, key: str, allowed: Iterable[str], value: object, home: str = "") -> Problem:
    """Report a key that the schema lacks, with the table that has it, or the nearest allowed name.

    home: of a key that is in a wrong table, where it belongs; otherwise empty.
    """
    names = sorted(allowed)
    hint = home or nearest_hint(key, names)
    return Problem(path, "; ".join(filter(None, ["unknown key", hint, f"allowed here: {', '.join(names)}"])), value)


def _translate(detail: ErrorDetails, root: type[BaseModel]) -> Problem:
    location = detail["loc"]
    path, value, kind = key_path(location), detail["input"], detail["type"]
    parent = model_at(root, location[:-1])
    name = str(location[-1]) if location else ""
    if kind == "tier_name_twice":
        context = detail["ctx"]
        return Problem(f"{path}[{context['index']}].name", detail["msg"], context["name"])
    if kind == "invalid_key":
        return Problem(key_path(location[:-1]), f"keys must be text, and {value!r:.80} is not")
    if kind == "extra_forbidden" and parent is not None:
        return unknown_key(path, name, parent.model_fields, value, _home_of(name, root, parent))
    if kind == "value_error":
        return Problem(path, str(detail["ctx"]["error"]), value)
    field = parent.model_fields.get(name) if parent is not None else None
    allowed = allowed_values(name, field) if field is not None else _allowed_elsewhere(location)
    if kind == "missing":
        return Problem(path, f"missing, and required; write {allowed}")
    hint = nearest_hint(value, re.findall(r'"(\w+)"', allowed)) if isinstance(value, str) else ""
    return Problem(path, f"must be {allowed}" + (f"; {hint}" if hint else ""), value)


def _home_of(name: str, root: type[BaseModel], parent: type[BaseModel]) -> str:
    """Say where a key belongs that is in a wrong table, if that is clear; otherwise return an empty string."""
    if name in root.model_fields and parent is not root:
        return "it belongs at the top of the file, before its first [table]"
    sections = {section: model_of(field.annotation) for section, field in root.model_fields.items()}
    homes = [section for section, model in sections.items() if model is not None and name in model.model_fields]
    if len(homes) != 1:
        return ""
    return "it belongs in a table [[tiers]]" if homes == ["tiers"] else f"it belongs in the table [{homes[0]}]"


def _allowed_elsewhere(location: Sequence[str | int]) -> str:
    """Allowed value where there is no field: in a list, or for the whole document."""
    return f"a table; in TOML `[[{location[0]}]]`" if location else "a table of keys"


def _show(path: str, value: object) -> str:
    if _SECRET.search(path.rpartition(".")[2]):
        return "(hidden)"
    text = json.dumps(value, default=str, ensure_ascii=False) if _is_plain(value) else repr(value)
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}..."


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
