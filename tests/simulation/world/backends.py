"""Plugins that put a storage under a real tier: a blocking backend, and an async one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulation.world.storage import Storage
from tierkv.abc import (
    AsyncBackend,
    Backend,
    BackendContext,
    BackendPlugin,
    Capabilities,
    Entry,
    ReadRequest,
    ReadResult,
    WriteRequest,
    WriteResult,
)
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry
from tierkv.types.keys import Key

HANG_POLL_S = 0.05
"""Seconds between two looks of a hanging async call at the fault."""


class ThreadBackend:
    """Blocking backend. The executor decides the duration of calls; they take effect at their end."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._opening = storage.open()

    @property
    def storage(self) -> Storage:
        """Storage for a call that ends now; a call that ends after the close of the backend gets an error."""
        self._opening.check()
        return self._storage

    def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Report the presence of each key."""
        return self.storage.contains(keys)

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Read frames."""
        return self.storage.read_into(requests)

    def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Write frames."""
        return self.storage.write(requests)

    def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Delete frames."""
        return self.storage.delete(keys)

    def scan(self) -> Iterable[Entry]:
        """List all frames."""
        return self.storage.scan()

    def close(self) -> None:
        """Close the storage."""
        self._storage.close(self._opening)


class LoopBackend:
    """Async backend: calls take time on the loop, and reads fill the buffer in two parts.

    The reply to a write or a deletion takes as long again, so effects and replies may have different orders.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._opening = storage.open()

    @property
    def storage(self) -> Storage:
        """Storage for a call that takes effect now, as of :class:`ThreadBackend`."""
        self._opening.check()
        return self._storage

    async def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Report the presence of each key, after some time."""
        await self._travel(len(keys))
        return self.storage.contains(keys)

    async def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Read frames, each in two parts."""
        await self._travel()
        for request in requests:
            frame = self.storage.frames.get(request.key, b"")
            half = min(len(frame) // 2, len(request.buffer))
            request.buffer[:half] = frame[:half]
        await self._travel()
        return self.storage.read_into(requests)

    async def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Write frames; the reply takes time as well."""
        call = object()
        self.storage.under_way[call] = requests
        try:
            await self._travel()
            results = self.storage.write(requests)
            await self._travel()
            return results
        finally:
            self._storage.under_way.pop(call, None)

    async def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Delete frames; the reply takes time as well."""
        call = object()
        self.storage.deletes_under_way[call] = keys
        try:
            await self._travel()
            results = self.storage.delete(keys)
            await self._travel()
            return results
        finally:
            self._storage.deletes_under_way.pop(call, None)

    def scan(self) -> Iterable[Entry]:
        """List all frames."""
        return self.storage.scan()

    async def close(self) -> None:
        """Close the storage."""
        self._storage.close(self._opening)

    async def _travel(self, probed_keys: int = 0) -> None:
        seconds = self.storage.fault_schedule.duration(probed_keys)
        while math.isinf(seconds):
            await asyncio.sleep(HANG_POLL_S)
            seconds = self.storage.fault_schedule.duration()
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class NoOptions:
    """No options: each plugin has its storage."""


def plugin_of(name: str, capabilities: Capabilities, storage: Storage, *, asynchronous: bool) -> BackendPlugin:
    """Backend plugin of one storage."""

    def open_backend(_context: BackendContext, _options: object) -> Backend | AsyncBackend:
        return LoopBackend(storage) if asynchronous else ThreadBackend(storage)

    return BackendPlugin(name, f"simulated, at {storage.name}", NoOptions, capabilities, open_backend)


def registry_of(plugins: Sequence[BackendPlugin]) -> PluginRegistry:
    """Plugins installed on a simulated machine: the built-in ones and these."""

    class Simulated:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_backends(self) -> Sequence[BackendPlugin]:
            return plugins

    return load_plugins([Simulated()], entry_points=lambda **_: ())


__all__ = ["LoopBackend", "ThreadBackend", "plugin_of", "registry_of"]
