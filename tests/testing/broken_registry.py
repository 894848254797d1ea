"""Mistakes by name, each with the kit's test that must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from plain_files import CAPABILITIES, PlainOptions

from tierkv.abc import AsyncBackend, Backend, BackendPlugin

Open = Callable[..., Backend | AsyncBackend]
BROKEN: dict[str, tuple[str, BackendPlugin]] = {}
"""Name of the mistake -> the kit's test that must fail, and the plugin that makes it."""

_OF_THE_PLUGIN = {field.name for field in fields(BackendPlugin)}


def noticed_by(*tests: str, **changes: Any) -> Callable[[Any], Any]:
    """Register a mistake, with the capabilities that it declares beyond the usual, or other fields of its plugin.

    Several tests may notice one mistake.
    """

    def register(broken: Any) -> Any:
        name = broken.__name__
        of_plugin = {key: value for key, value in changes.items() if key in _OF_THE_PLUGIN}
        declared = {key: value for key, value in changes.items() if key not in _OF_THE_PLUGIN}
        plugin = BackendPlugin("broken", name, PlainOptions, replace(CAPABILITIES, **declared), broken)
        for test in tests:
            key = name if len(tests) == 1 else f"{name}-{test.removeprefix('test_')}"
            assert key not in BROKEN, key
            BROKEN[key] = (test, replace(plugin, **of_plugin))
        return broken

    return register
