"""Options of the adapter, from SGLang's extra configuration of the storage backend. Does not import SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv.config.loading import load_config, parse_config
from tierkv.config.schema import StackConfig
from tierkv.errors import ConfigError

TIMEOUT_S = 30.0
"""Seconds that a load or a store of a batch may take, unless ``timeout_s`` is given."""
PROBE_TIMEOUT_S = 2.0
"""Seconds that a question for existence may take, unless ``probe_timeout_s`` is given."""


def read_stack(options: Mapping[str, Any]) -> StackConfig:
    """Return the description of the stack.

    Raises:
        ConfigError: it is missing or wrong, no tier is written to at once, or SGLang would not pass positions.
    """
    if not options.get("interface_v1"):
        raise ConfigError(
            'interface_v1 is not 1, so SGLang would pass copies of pages: give "interface_v1": 1 in '
            "--hicache-storage-backend-extra-config"
        )
    stack = options.get("stack")
    if isinstance(stack, Mapping):
        config = parse_config(stack, "stack in --hicache-storage-backend-extra-config")
    elif isinstance(stack, str):
        config = load_config(Path(stack))
    else:
        raise ConfigError(
            f"stack = {stack!r}: give the path of a stack description, or its tables, as "
            '"stack" in --hicache-storage-backend-extra-config'
        )
    if not any(tier.write in {"through", "read_only"} for tier in config.tiers):
        raise ConfigError(
            'no tier has write = "through", but a page counts as stored only when a lower tier holds it; '
            'set write = "through" for one tier'
        )
    return config


def read_seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number of seconds.

    Raises:
        ConfigError: it is not a positive number.
    """
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} = {value!r}: give a number of seconds above 0")
    return float(value)
