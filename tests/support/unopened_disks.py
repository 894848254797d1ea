"""Disks that cannot be opened before a test says so: one hangs, the other one refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tierkv.abc import BackendContext, BackendPlugin
from tierkv.errors import BackendUnavailableError
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry

PATIENCE_S = 60.0

Open = Callable[[BackendContext, Any], Any]


def registry_with(name: str, wrap: Callable[[Open], Open]) -> PluginRegistry:
    """Return a registry in which the backend ``name`` is a disk whose open is wrapped."""
    inner = load_plugins().require_backend("disk").plugin
    plugin = replace(inner, name=name, open=wrap(inner.open), check=None)

    class Wrapping:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_backends(self) -> list[BackendPlugin]:
            return [plugin]

    return load_plugins([Wrapping()])


class HangingDisk:
    """Registry in which the backend ``hanging`` is a disk that is not opened before ``release``."""

    def __init__(self) -> None:
        self._may_open = threading.Event()
        self.closed = threading.Event()
        self.tries = 0
        self.registry = registry_with("hanging", self._late)

    def _late(self, inner: Open) -> Open:
        def open_late(context: BackendContext, options: Any) -> Any:
            self.tries += 1
            assert self._may_open.wait(PATIENCE_S)
            backend = inner(context, options)
            close = backend.close

            def close_and_tell() -> None:
                close()
                self.closed.set()

            backend.close = close_and_tell
            return backend

        return open_late

    def release(self) -> None:
        """Let every open go on."""
        self._may_open.set()


class RefusingDisk:
    """Registry in which the backend ``refusing`` is a disk that cannot be opened before ``works`` is true.

    Args:
        error: raised until then.
    """

    def __init__(self, error: type[BaseException] = BackendUnavailableError) -> None:
        self._error = error
        self.works = False
        self.tries = 0
        self.registry = registry_with("refusing", self._refusing)

    def _refusing(self, inner: Open) -> Open:
        def refuse(context: BackendContext, options: Any) -> Any:
            self.tries += 1
            if not self.works:
                raise self._error("the file system is gone")
            return inner(context, options)

        return refuse
