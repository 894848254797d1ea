"""From a file, a mapping or the embedded default to a :class:`StackConfig`, or one error that lists every problem."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tierkv.config.problems import problems_of, refuse
from tierkv.config.reading import read_mapping
from tierkv.config.schema import StackConfig
from tierkv.errors import ConfigError

DEFAULT_STACK = "default_stack.toml"


def load_config(path: str | PathLike[str]) -> StackConfig:
    """Read and check the description of a stack in TOML, YAML or JSON, told by its suffix.

    Raises:
        ConfigError: the file cannot be used; every problem stands on a line of its own.
    """
    return parse_config(read_mapping(Path(path)), source=str(path))


def parse_config(mapping: Mapping[str, Any], source: str = "<inline>") -> StackConfig:
    """Check the description of a stack that is at hand. ``source`` names it in messages.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    try:
        return StackConfig.model_validate(mapping)
    except ValidationError as error:
        refuse(source, problems_of(error, StackConfig))
        raise ConfigError(f"{source}: {error}") from error  # unreachable while pydantic names what it refuses


def default_mapping(workdir: str | PathLike[str]) -> dict[str, Any]:
    """The embedded default stack with its places under ``workdir``, ready to be changed and given to parse_config."""
    text = resources.files("tierkv.config").joinpath(DEFAULT_STACK).read_text(encoding="utf-8")
    return {key: _fill(value, str(workdir)) for key, value in tomllib.loads(text).items()}


def load_default(workdir: str | PathLike[str]) -> StackConfig:
    """The embedded default stack: host, disk and a file-based object store, the last two under ``workdir``."""
    return parse_config(default_mapping(workdir), source=DEFAULT_STACK)


def _fill(value: object, workdir: str) -> object:
    """Put ``workdir`` in place of ``{workdir}`` in every text, after parsing: a quote in a path would end the text."""
    if isinstance(value, str):
        return value.replace("{workdir}", workdir)
    if isinstance(value, list):
        return [_fill(item, workdir) for item in value]
    if isinstance(value, dict):
        return {key: _fill(item, workdir) for key, item in value.items()}
    return value
