"""Store on any fsspec file system, through its blocking interface."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import fsspec  # type: ignore[import-untyped]  # it ships no types
import fsspec.asyn  # type: ignore[import-untyped]  # it ships no types

from tierkv_fsspec.failures import Failure, FailureKind, clear_tracebacks
from tierkv_fsspec.options import FsspecOptions, Location
from tierkv_fsspec.stores.store import (
    FOLDER_CHARS,
    HEAD_BYTES,
    SHORT_BYTES_MAX,
    TEMPORARY,
    ListedObject,
    copy_into,
    short,
)

BUCKET_PROTOCOLS = ("s3", "gs", "az", "oss", "oci", "tos", "tosfs")
"""Protocols without real directories; creating one could create a bucket."""
CONDITIONAL_PROTOCOLS = ("s3", "gs", "az")
"""Protocols whose file systems support conditional creation."""
ONE_CALLER_PROTOCOLS = ("sftp", "ssh")
"""Protocols whose file systems hang when two threads use one at once."""
WHOLE_PROTOCOLS = (*BUCKET_PROTOCOLS, "memory", "http", "https")
"""Protocols whose writes are atomic; elsewhere an object is written under a temporary name and moved."""
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
S3_TRIES = 2
NAME_S = 1
"""Seconds for which the S3 client keeps the addresses of a name: a server that moves is found again as soon as that."""
MKDIR_TRIES = 3


class FsspecStore:
    """Objects below ``location``, for any threads.

    fsspec runs requests on its own thread. For protocols where it does not, each thread gets its own file system.
    """

    is_remote = True

    def __init__(self, location: Location, options: FsspecOptions) -> None:
        arguments = _s3_arguments(options) if location.protocol == "s3" else dict(options.storage_options)
        if location.protocol == "gs" and options.endpoint_url is not None:
            arguments.setdefault("endpoint_url", options.endpoint_url)
        self._open: Callable[[], tuple[Any, str]] = lambda: _open(location, arguments)
        self._local = threading.local() if location.protocol in ONE_CALLER_PROTOCOLS else None
        fs, root = self._open()
        self._shared: Any = fs
        self._of_callers: list[Any] = []  # their connections are closed by this object
        if self._local is not None:
            self._local.fs = fs
            self._of_callers.append(fs)
        self._root = root.rstrip("/")
        self._put_arguments = _put_arguments(options, location.protocol)
        self._is_conditional = location.protocol in CONDITIONAL_PROTOCOLS
        self._makes_directories = location.protocol not in BUCKET_PROTOCOLS
        self._moves = location.protocol not in WHOLE_PROTOCOLS
        self._call_s = options.connect_timeout_s + options.read_timeout_s

    @property
    def _fs(self) -> Any:  # noqa: ANN401  file systems of fsspec have no types
        local = self._local
        if local is None:
            return self._shared
        if not hasattr(local, "fs"):
            local.fs, _ = self._open()
            self._of_callers.append(local.fs)
            if self._local is None:  # closed while this caller was connecting
                self._close_connections()
        return local.fs

    def exists(self, name: str) -> bool:
        """Send one request for the object's metadata."""
        try:
            self._call("info", self._path(name))
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """Send one GET of a range, up to one byte too many."""
        try:
            return short(bytes(self._call("cat_file", self._path(name), start=0, end=SHORT_BYTES_MAX + 1)))
        except Exception as error:
            if Failure.of(error).kind is not FailureKind.NO_RANGE:  # servers refuse any range of an empty object
                raise
            clear_tracebacks(error)
            return b""

    def read_into(self, name: str, buffer: memoryview) -> int:
        """Send one GET and copy the body."""
        return copy_into(self._call("cat_file", self._path(name)), buffer)

    def holds_same(self, name: str, data: memoryview) -> bool:
        """Compare the length by metadata, then the head by a short GET."""
        path = self._path(name)
        try:
            if self._call("info", path)["size"] != len(data):
                return False
            return bool(self._call("cat_file", path, start=0, end=min(len(data), HEAD_BYTES)) == data[:HEAD_BYTES])
        except FileNotFoundError as error:
            clear_tracebacks(error)  # they include this stack frame
            return False

    def write(self, name: str, data: memoryview) -> None:
        """Send one PUT, of a copy: not every file system accepts other buffers than bytes."""
        self._put(name, bytes(data), "overwrite")

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Send a conditional PUT if file system and server support it; otherwise look up, then PUT."""
        if self._is_conditional:
            try:
                self._put(name, bytes(data), "create")
            except Exception as error:
                clear_tracebacks(error)
                kind = Failure.of(error).kind
                if kind not in (FailureKind.TAKEN, FailureKind.NOT_SERVED):
                    raise
                if kind is FailureKind.TAKEN:
                    return False
                self._is_conditional = False
            else:
                return True
        if self.exists(name):
            return False
        self._put(name, bytes(data), "overwrite")
        return True

    def delete(self, name: str) -> None:
        """Send one DELETE."""
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            return

    def list_names(self) -> Iterator[Sequence[str]]:
        """List one directory at a time."""
        for directory in sorted(self._call("ls", self._root, detail=False)):
            last = directory.rstrip("/").rpartition("/")[2]
            if len(last) == FOLDER_CHARS:  # manifest and temporary files have longer names
                yield self._call("ls", directory, detail=False)

    def list_objects(self) -> Iterator[Sequence[ListedObject]]:
        """List one directory at a time."""
        for folder in sorted(self.list_children()):
            if len(folder) == FOLDER_CHARS:
                found = self._call("ls", self._path(folder), detail=True)
                yield [_listed(folder, each) for each in found if each.get("type") == "file"]

    def list_children(self) -> Iterator[str]:
        """List the root."""
        for each in self._call("ls", self._root, detail=True):
            if each.get("type") == "directory":
                yield each["name"].rstrip("/").rpartition("/")[2]

    def read_head(self, name: str) -> bytes:
        """Send one GET of a range."""
        return bytes(self._call("cat_file", self._path(name), start=0, end=HEAD_BYTES))

    def close(self) -> None:
        """Close connections. Most file systems do so when collected; those with a thread each are never collected."""
        self._shared = None
        self._local = None
        self._close_connections()

    def _close_connections(self) -> None:
        while self._of_callers:
            with contextlib.suppress(Exception):  # it may be broken, or another thread is closing it
                self._of_callers.pop().client.close()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, verb: str, *arguments: object, **more: object) -> Any:  # noqa: ANN401  what the verb returns
        """Call a verb. A library's own timeouts have gaps, such as a server that never sends ``100 Continue``.

        A listing has no bound as a whole: it takes as many requests as it has pages.
        """
        fs = self._fs
        try:
            if verb != "ls" and isinstance(fs, fsspec.asyn.AsyncFileSystem) and hasattr(fs, f"_{verb}"):
                in_time = {**more, "timeout": self._call_s}
                return fsspec.asyn.sync(fs.loop, getattr(fs, f"_{verb}"), *arguments, **in_time)
            return getattr(fs, verb)(*arguments, **more)
        except Exception as error:
            clear_tracebacks(error)
            raise

    def _put(self, name: str, data: bytes, mode: str) -> None:
        path = self._path(name)
        if not self._moves:
            self._with_parent(path, lambda: self._call("pipe_file", path, data, mode=mode, **self._put_arguments))
            return
        temporary = self._path(f"{TEMPORARY}/{uuid.uuid4().hex}")
        self._with_parent(temporary, lambda: self._call("pipe_file", temporary, data))
        self._with_parent(path, lambda: self._call("mv", temporary, path))

    def _with_parent(self, path: str, action: Callable[[], None]) -> None:
        try:
            action()
        except FileNotFoundError:
            if not self._makes_directories:
                raise
            self._make_directory(path.rpartition("/")[0])
            action()

    def _make_directory(self, path: str) -> None:
        """Create a directory and its parents. Some file systems fail if another engine creates one meanwhile."""
        for tries_left in reversed(range(MKDIR_TRIES)):
            try:
                self._call("makedirs", path, exist_ok=True)
            except Exception:
                if self._call("exists", path):
                    return
                if not tries_left:
                    raise
            else:
                return


def _listed(folder: str, found: Mapping[str, Any]) -> ListedObject:
    """Translate an entry of a listing. Each file system has its own name for the time."""
    modified = next((found[name] for name in _TIMES if found.get(name) is not None), None)
    if isinstance(modified, str):
        with contextlib.suppress(ValueError):
            modified = datetime.fromisoformat(modified)
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    name = str(found["name"]).rpartition("/")[2]
    seconds = float(modified) if isinstance(modified, int | float) else None
    return ListedObject(f"{folder}/{name}", int(found.get("size") or 0), seconds)


def _open(location: Location, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """Open a new file system. Returns it, and the path of ``location`` in it."""
    fs, root = fsspec.core.url_to_fs(location.url, skip_instance_cache=True, **arguments)
    # Cached listings would hide objects that other processes store and delete.
    fs.dircache = fsspec.dircache.DirCache(use_listings_cache=False)
    if location.protocol == "s3":
        fs.retries = S3_TRIES
    return fs, root


def _put_arguments(options: FsspecOptions, protocol: str) -> dict[str, Any]:
    """Arguments of each PUT, in s3fs's terms; other file systems have none."""
    if protocol != "s3":
        return {}
    arguments: dict[str, Any] = {}
    if options.storage_class is not None:
        arguments["StorageClass"] = options.storage_class
    if options.tags:
        arguments["Tagging"] = urlencode(options.tags)
    return arguments


def _s3_arguments(options: FsspecOptions) -> dict[str, Any]:
    """Options in s3fs's terms; storage_options take precedence."""
    arguments = dict(options.storage_options)
    config = {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.read_timeout_s,
        "retries": {"max_attempts": 0},
        "max_pool_connections": options.concurrent_requests,
        "connector_args": {"ttl_dns_cache": NAME_S},
    }
    arguments["config_kwargs"] = config | dict(arguments.get("config_kwargs", {}))
    if options.endpoint_url is not None:
        arguments.setdefault("endpoint_url", options.endpoint_url)
    if options.region is not None:
        arguments["client_kwargs"] = {"region_name": options.region} | dict(arguments.get("client_kwargs", {}))
    return arguments
