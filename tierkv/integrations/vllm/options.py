"""The stack's description as vLLM's user gives it: ``kv_connector_extra_config["tierkv"]``, a path or a mapping."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tierkv.config.loading import load_config, parse_config
from tierkv.config.problems import Problem, raise_problems, unknown_key
from tierkv.config.schema import StackConfig

SOURCE = "kv_connector_extra_config"
"""Where vLLM's user writes it; the first word of every message."""

KEY = "tierkv"
_EXAMPLE = '{"tierkv": "/etc/tierkv/stack.toml"} or {"tierkv": {"host": {"capacity": "8GiB"}}}'


def read_options(extra_config: Mapping[str, Any], *, known: Collection[str] = ()) -> StackConfig:
    """The stack that vLLM's user asks for.

    Args:
        extra_config: ``kv_transfer_config.kv_connector_extra_config``.
        known: keys beside ``tierkv`` that vLLM itself reads there.

    Raises:
        ConfigError: the key is missing, another is unknown, or the description is wrong; each problem on a line of its
            own, with its key, its value and what is allowed.
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
