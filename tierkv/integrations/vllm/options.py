"""Stack description in vLLM's configuration: ``kv_connector_extra_config["tierkv"]``, a path or a mapping."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tierkv.config.loading import load_config, parse_config
from tierkv.config.problems import Problem, raise_problems, unknown_key
from tierkv.config.schema import StackConfig

SOURCE = "kv_connector_extra_config"
"""Name of the setting in vLLM's configuration, for messages."""

KEY = "tierkv"
_EXAMPLE = '{"tierkv": "/etc/tierkv/stack.toml"} or {"tierkv": {"host": {"capacity": "8GiB"}}}'


def read_options(extra_config: Mapping[str, Any], *, known: Collection[str] = ()) -> StackConfig:
    """Read the stack description from vLLM's configuration.

    Args:
        extra_config: ``kv_transfer_config.kv_connector_extra_config``.
        known: other keys of the setting, which vLLM itself reads.

    Raises:
        ConfigError: the key is missing, another key is unknown, or the description is wrong. The message has one line
            per problem, with key, value and allowed values.
    """
    allowed = {KEY, *known}
    problems = [unknown_key(key, key, allowed, value) for key, value in extra_config.items() if key not in allowed]
    if KEY not in extra_config:
        problems.append(Problem(KEY, f"missing, and required; write for example {_EXAMPLE}"))
    raise_problems(SOURCE, problems)
    return _described(extra_config[KEY])


def _described(given: object) -> StackConfig:
    if isinstance(given, str | Path):
        return load_config(given)
    if isinstance(given, Mapping):
        return parse_config(given, source=f"{SOURCE}.{KEY}")
    problem = Problem(
        KEY, f"must be the path of a description, or the description itself; for example {_EXAMPLE}", given
    )
    raise_problems(SOURCE, [problem])
    raise AssertionError  # unreachable: one problem is raised
