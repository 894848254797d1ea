"""A real backend of one page for testing the kit: one file per chunk, published by rename.

It is the least that the contract asks for, in the form that a plugin author would write first.
"""

from __future__ import annotations

import asyncio
import fcntl
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierkv.abc import (
    BackendContext,
    BackendPlugin,
    Capabilities,
    Entry,
    ReadRequest,
    ReadResult,
    WriteRequest,
    WriteResult,
)
from tierkv.abc.places import absolute_path, make_private_directory, open_private
from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.types.keys import Key


@dataclass(frozen=True, slots=True)
class PlainOptions:
    """Directory of the files."""

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_path(self.path))


class PlainFiles:
    """Blocking. One directory per namespace, one file per key, a lock file."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        self.root = Path(options.path) / context.namespace.fingerprint().hex()
        self.capacity_bytes = context.capacity_bytes
        self.used = threading.Lock()
        self.used_bytes: dict[Key, int] = {}
        try:
            self.prepare(Path(options.path))
            self.root.mkdir(0o700, exist_ok=True)
            self.lock = open(self.root / "lock", "w", opener=open_private)  # noqa: SIM115 - the lock outlives this call
        except OSError as error:
            raise BackendError(f"cannot use {options.path}: {error}; give a directory of your own") from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.lock.close()
            raise BackendError(f"{options.path} is in use; give a directory of your own") from error
        self.used_bytes = {entry.key: entry.frame_bytes for entry in self.scan()}

    def prepare(self, place: Path) -> None:
        make_private_directory(place)

    def path(self, key: Key) -> Path:
        return self.root / f"{key.hex()}.frame"

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return [self.path(key).exists() for key in keys]

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        return [self.read_one(request) for request in requests]

    def read_one(self, request: ReadRequest) -> ReadResult:
        try:
            with self.path(request.key).open("rb") as file:
                return file.readinto(request.buffer)
        except FileNotFoundError:
            return None
        except OSError as error:
            return BackendError(str(error), key=request.key)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        return [self.write_one(request) for request in requests]

    def write_one(self, request: WriteRequest) -> WriteResult:
        with self.used:
            before = self.used_bytes.get(request.key, 0)
            used = sum(self.used_bytes.values()) - before + len(request.frame)
            if self.capacity_bytes is not None and used > self.capacity_bytes:
                return OutOfSpaceError("full", key=request.key)
            self.used_bytes[request.key] = len(request.frame)
        temporary = self.root / f"{threading.get_ident()}.tmp"
        try:
            with open(temporary, "wb", opener=open_private) as file:
                file.write(request.frame)
            temporary.rename(self.path(request.key))
        except OSError as error:
            with self.used:
                self.used_bytes[request.key] = before
            return BackendError(str(error), key=request.key)
        return None

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        for key in keys:
            self.path(key).unlink(missing_ok=True)
            with self.used:
                self.used_bytes.pop(key, None)
        return [None] * len(keys)

    def scan(self) -> Iterable[Entry]:
        for path in sorted(self.root.glob("*.frame")):
            try:
                yield Entry(Key(bytes.fromhex(path.stem)), path.stat().st_size)
            except FileNotFoundError:
                continue

    def close(self) -> None:
        self.lock.close()


class AsyncPlainFiles:
    """The same behind coroutines."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        self.files = PlainFiles(context, options)

    async def contains(self, keys: Sequence[Key]) -> list[bool]:
        return await asyncio.to_thread(self.files.contains, keys)

    async def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        return await asyncio.to_thread(self.files.read_into, requests)

    async def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        return await asyncio.to_thread(self.files.write, requests)

    async def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        return await asyncio.to_thread(self.files.delete, keys)

    def scan(self) -> Iterable[Entry]:
        return self.files.scan()

    async def close(self) -> None:
        self.files.close()


CAPABILITIES = Capabilities(durable=True, authoritative_index=True, scan=True, preferred_batch=4)
PLUGIN = BackendPlugin("plain", "one file per chunk", PlainOptions, CAPABILITIES, PlainFiles)
ASYNC_PLUGIN = BackendPlugin("plain-async", "one file per chunk", PlainOptions, CAPABILITIES, AsyncPlainFiles)


class SharedPlainFiles(PlainFiles):
    """Without the lock: any number of processes, none of which knows everything."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.lock.close()


class ReadOnlyPlainFiles(PlainFiles):
    """Changes nothing."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        return BackendError("read only", key=request.key)

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        return [BackendError("read only", key=key) for key in keys]


SHARED = Capabilities(durable=True, shared=True, scan=True, bounded=False, preferred_batch=4)
SHARED_PLUGIN = BackendPlugin("plain-shared", "one file per chunk", PlainOptions, SHARED, SharedPlainFiles)
READ_ONLY = Capabilities(durable=True, shared=True, read_only=True)
READ_ONLY_PLUGIN = BackendPlugin("plain-read-only", "one file per chunk", PlainOptions, READ_ONLY, ReadOnlyPlainFiles)


class PlainRaw:
    """Past the backend: the files themselves."""

    def __init__(self, place: Path, context: BackendContext) -> None:
        self.root = place / context.namespace.fingerprint().hex()

    def path(self, key: Key) -> Path:
        return self.root / f"{key.hex()}.frame"

    def read(self, key: Key) -> bytes:
        return self.path(key).read_bytes()

    def write(self, key: Key, data: bytes) -> None:
        self.path(key).write_bytes(data)

    def remove(self, key: Key) -> None:
        self.path(key).unlink()

    def count(self) -> int:
        return len(list(self.root.glob("*.frame")))
