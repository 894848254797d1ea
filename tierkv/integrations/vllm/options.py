"""Settings of tierkv in vLLM's ``kv_connector_extra_config``: the stack, and how the adapter behaves.

``"tierkv"`` is the path of a description, or the description itself. The other keys begin with ``tierkv_``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tierkv.config.loading import load_config, parse_config
from tierkv.config.problems import Problem, raise_problems, unknown_key
from tierkv.config.schema import StackConfig
from tierkv.manager.contract import ResetScope

SOURCE = "kv_connector_extra_config"
"""Name of the setting in vLLM's configuration, for messages."""

KEY = "tierkv"
RESET_SCOPE = "tierkv_reset_scope"
STRICT = "tierkv_strict"
_OFFLOADING_BYTES = "cpu_bytes_to_use"
_EXAMPLE = '{"tierkv": "/etc/tierkv/stack.toml"} or {"tierkv": {"host": {"capacity": "8GiB"}}}'


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Settings of one adapter."""

    stack: StackConfig
    """Description of the stack."""
    source: str
    """Name of the description in messages: its path, or the key that holds it."""
    reset_scope: ResetScope = "all"
    """Tiers that a reset asked through vLLM empties: "all", or "host" for the host tier only."""
    strict: bool = False
    """Whether versions of vLLM are refused that this version of tierkv was not tested with."""


def read_options(extra_config: Mapping[str, Any], *, known: Collection[str] = ()) -> AdapterOptions:
    """Read the settings from vLLM's configuration.

    Args:
        extra_config: ``kv_transfer_config.kv_connector_extra_config``.
        known: other keys of the setting, which vLLM itself reads.

    Raises:
        ConfigError: the stack is missing, a key is unknown, or a value is wrong. The message has one line per problem,
            with key, value and allowed values.
    """
    allowed = {KEY, RESET_SCOPE, STRICT, *known}
    problems = [_unknown(key, allowed, value) for key, value in extra_config.items() if key not in allowed]
    if KEY not in extra_config:
        problems.append(Problem(KEY, f"missing, and required; write for example {_EXAMPLE}"))
    scope, strict = extra_config.get(RESET_SCOPE, "all"), extra_config.get(STRICT, False)
    if scope not in get_args(ResetScope):
        problems.append(Problem(RESET_SCOPE, 'must be "all" or "host"', scope))
    if not isinstance(strict, bool):
        problems.append(Problem(STRICT, "must be true or false", strict))
    raise_problems(SOURCE, problems)
    return AdapterOptions(*_described(extra_config[KEY]), scope, strict)


def _unknown(key: str, allowed: Collection[str], value: object) -> Problem:
    if key != _OFFLOADING_BYTES:
        return unknown_key(key, key, allowed, value)
    text = (
        "is the size of vLLM's own host memory, which vLLM adds for --kv-offloading-size: remove it there, or here; "
        "the size of tierkv's is host.capacity of the stack"
    )
    return Problem(key, text, value)


def _described(given: object) -> tuple[StackConfig, str]:
    if isinstance(given, str) and (given.lstrip().startswith(("{", "[")) or "\n" in given):
        text = (
            "is the text of a description; write the description as a JSON object without quotes around it, or a path"
        )
        raise_problems(SOURCE, [Problem(KEY, text, given)])
    if isinstance(given, str | Path):
        return load_config(given), str(given)
    if isinstance(given, Mapping):
        source = f"{SOURCE}.{KEY}"
        return parse_config(given, source=source), source
    problem = Problem(
        KEY, f"must be the path of a description, or the description itself; for example {_EXAMPLE}", given
    )
    raise_problems(SOURCE, [problem])
    raise AssertionError  # unreachable: one problem is raised
