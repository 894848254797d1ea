"""Loading of a :class:`StackConfig` from a file, a mapping or the embedded default stack.

A wrong description has a *sound part*: what is left without its wrong values. Checks run on it, so that one pass finds
the mistakes of the file and those of the machine.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tierkv.config.problems import Problem, problems_of, raise_problems, without_consequences
from tierkv.config.reading import read_mapping
from tierkv.config.schema import StackConfig
from tierkv.errors import ConfigError

DEFAULT_STACK = "default_stack.toml"

_MENDS_MAX = 100
"""Largest number of times that wrong values are taken out of a description. Each of its tables can hide others."""

_STAND_IN_CAPACITY = "1GiB"
_STAND_IN_BACKEND = "?"
_STAND_IN_PATHS = frozenset({"host", "host.capacity"})


@dataclass(frozen=True, slots=True)
class SoundPart:
    """Part of a description that can be checked further, and the problems of the rest."""

    config: StackConfig | None
    """The description without its wrong values; None: nothing is left of it."""
    problems: tuple[Problem, ...]
    """Problems of the description; none: the part is the whole."""

    @property
    def knows_host(self) -> bool:
        """Whether the host tier's capacity is the described one."""
        return self.config is not None and not any(problem.path in _STAND_IN_PATHS for problem in self.problems)


def load_config(path: str | PathLike[str]) -> StackConfig:
    """Read and check the description of a stack. The suffix selects TOML, YAML or JSON.

    Raises:
        ConfigError: the file cannot be used. The message has one line per problem.
    """
    return parse_config(read_mapping(Path(path)), source=str(path))


def parse_config(mapping: Mapping[str, Any], source: str = "<inline>") -> StackConfig:
    """Check the description of a stack given as a mapping.

    Args:
        mapping: the description.
        source: name of the description in messages.

    Raises:
        ConfigError: the description is wrong. The message has one line per problem.
    """
    try:
        return StackConfig.model_validate(mapping)
    except ValidationError as error:
        raise_problems(source, problems_of(error, StackConfig))
        raise ConfigError(f"{source}: {error}") from error  # unreachable: pydantic reports a problem


def load_sound_part(path: str | PathLike[str]) -> SoundPart:
    """Read the description of a stack, and take its wrong values out.

    Raises:
        ConfigError: the file is no table of keys at all.
    """
    return parse_sound_part(read_mapping(Path(path)))


def parse_sound_part(mapping: Mapping[str, Any]) -> SoundPart:
    """Check the description of a stack, as read from a file, and take its wrong values out. Tiers keep their numbers.

    A tier without a usable `backend` gets one that no plugin has, so that
    :func:`~tierkv.config.resolving.resolve_parts` leaves it out.
    """
    data = copy.deepcopy(dict(mapping))
    problems: list[Problem] = []
    for _ in range(_MENDS_MAX):
        try:
            return SoundPart(StackConfig.model_validate(data), tuple(problems))
        except ValidationError as error:
            problems += without_consequences(problems_of(error, StackConfig), problems)
            locations = dict.fromkeys(_location(detail) for detail in error.errors(include_url=False))
            mended = [_mend(data, location) for location in locations]
            if not all(mended):
                break
    return SoundPart(None, tuple(problems))


def default_mapping(workdir: str | PathLike[str]) -> dict[str, Any]:
    """Return the embedded default stack as a mapping for :func:`parse_config`, with its storage under ``workdir``."""
    text = resources.files("tierkv.config").joinpath(DEFAULT_STACK).read_text(encoding="utf-8")
    return {key: _fill(value, str(workdir)) for key, value in tomllib.loads(text).items()}


def load_default(workdir: str | PathLike[str]) -> StackConfig:
    """Load the embedded default stack: host, disk and a file-based object store, the last two under ``workdir``."""
    return parse_config(default_mapping(workdir), source=DEFAULT_STACK)


def _fill(value: object, workdir: str) -> object:
    """Replace ``{workdir}`` in every text. Done after parsing, because a quote in a path would end the text."""
    if isinstance(value, str):
        return value.replace("{workdir}", workdir)
    if isinstance(value, list):
        return [_fill(item, workdir) for item in value]
    if isinstance(value, dict):
        return {key: _fill(item, workdir) for key, item in value.items()}
    return value


def _location(detail: ErrorDetails) -> tuple[str | int, ...]:
    if detail["type"] == "tier_name_twice":
        return (*detail["loc"], detail["ctx"]["index"], "name")
    return detail["loc"]


def _mend(data: dict[str, Any], location: Sequence[str | int]) -> bool:
    """Take out the value at a location, or put a stand-in where one is required. Returns whether it was possible."""
    match location:
        case ["host"] | ["host", "capacity"]:
            host = data.get("host")
            data["host"] = {**(host if isinstance(host, dict) else {}), "capacity": _STAND_IN_CAPACITY}
            return True
        case ["tiers", int(number), *inside]:
            tier = data["tiers"][number]
            if not (isinstance(tier, dict) and _mend_tier(tier, number, inside)):
                data["tiers"][number] = {"backend": _STAND_IN_BACKEND, "name": _stand_in_name(number)}
            return True
    return _take_out(data, location)


def _mend_tier(tier: dict[str, Any], number: int, location: Sequence[str | int]) -> bool:
    match location:
        case ["name"]:
            tier["name"] = _stand_in_name(number)
        case ["backend"]:
            tier["backend"] = _STAND_IN_BACKEND
        case ["capacity"]:  # quotas need one
            for key in ("capacity", "tenant_quota", "tenant_quotas"):
                tier.pop(key, None)
        case _:
            return _take_out(tier, location)
    return True


def _take_out(table: dict[str, Any], location: Sequence[str | int]) -> bool:
    """Remove the innermost value on the way to a location. Models rename some keys, so the way may end before it."""
    holder: dict[Any, Any] = {}
    last, value = None, cast("object", table)
    for part in location:
        if not isinstance(value, dict) or part not in value:
            break
        holder, last, value = value, part, value[part]
    return holder.pop(last, None) is not None


def _stand_in_name(number: int) -> str:
    """Name for a tier whose own cannot be used: as near to `tiers[1]` of the messages as a name can be."""
    return f"tiers-{number}"
