"""Loading of a :class:`StackConfig` from a file, a mapping or the embedded default stack."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tierkv.config.problems import problems_of, raise_problems
from tierkv.config.reading import read_mapping
from tierkv.config.schema import StackConfig
from tierkv.errors import ConfigError

DEFAULT_STACK = "default_stack.toml"


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
