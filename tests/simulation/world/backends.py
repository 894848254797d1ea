"""The plugins that put a storage under a real tier: a blocking backend, and an async one."""

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
"""How often an async call that hangs looks whether it still does."""


class ThreadBackend:
    """A blocking backend. How long its calls take is the executor's business; they take effect at their end."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._opening = storage.open()

    @property
    def storage(self) -> Storage:
        """Where a call that ends now takes effect. One that ends after the backend was closed finds it shut."""
        self._opening.check()
        return self._storage

    def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See :class:`tierkv.abc.Backend`."""
        return self.storage.contains(keys)

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """See :class:`tierkv.abc.Backend`."""
        return self.storage.read_into(requests)

    def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """See :class:`tierkv.abc.Backend`."""
        return self.storage.write(requests)

    def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """See :class:`tierkv.abc.Backend`."""
        return self.storage.delete(keys)

    def scan(self) -> Iterable[Entry]:
        """See :class:`tierkv.abc.SupportsScan`."""
        return self.storage.scan()

    def close(self) -> None:
        """See :class:`tierkv.abc.Backend`."""
        self._storage.close(self._opening)


class LoopBackend:
    """An async backend: calls take their time on the loop, and reads arrive in two parts.

    The word of what was written or deleted takes as long again: in which order things happen, and in which one hears of
    it, are two orders.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._opening = storage.open()

    @property
    def storage(self) -> Storage:
        """See :class:`ThreadBackend`."""
        self._opening.check()
        return self._storage

    async def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See :class:`tierkv.abc.AsyncBackend`."""
        await self._travel()
        return self.storage.contains(keys)

    async def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """See :class:`tierkv.abc.AsyncBackend`."""
        await self._travel()
        for request in requests:
            frame = self.storage.frames.get(request.key, b"")
            half = min(len(frame) // 2, len(request.buffer))
            request.buffer[:half] = frame[:half]
        await self._travel()
        return self.storage.read_into(requests)

    async def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """See :class:`tierkv.abc.AsyncBackend`."""
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
        """See :class:`tierkv.abc.AsyncBackend`."""
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
        """See :class:`tierkv.abc.SupportsScan`."""
        return self.storage.scan()

    async def close(self) -> None:
        """See :class:`tierkv.abc.AsyncBackend`."""
        self._storage.close(self._opening)

    async def _travel(self) -> None:
        seconds = self.storage.fault_schedule.duration()
        while math.isinf(seconds):
            await asyncio.sleep(HANG_POLL_S)
            seconds = self.storage.fault_schedule.duration()
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class NoOptions:
    """These backends need no option: they are handed their storage."""


def plugin_of(name: str, capabilities: Capabilities, storage: Storage, *, asynchronous: bool) -> BackendPlugin:
    """A kind of tier that has one storage alone."""

    def open_backend(_context: BackendContext, _options: object) -> Backend | AsyncBackend:
        return LoopBackend(storage) if asynchronous else ThreadBackend(storage)

    return BackendPlugin(name, f"simulated, at {storage.name}", NoOptions, capabilities, open_backend)


def registry_of(plugins: Sequence[BackendPlugin]) -> PluginRegistry:
    """What a simulated machine has installed: tierkv and these."""

    class Simulated:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_backends(self) -> Sequence[BackendPlugin]:
            return plugins

    return load_plugins([Simulated()], entry_points=lambda **_: ())


__all__ = ["LoopBackend", "ThreadBackend", "plugin_of", "registry_of"]
