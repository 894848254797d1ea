"""Any fsspec file system, through its blocking interface."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import fsspec  # type: ignore[import-untyped]  # it ships no types

from tierkv_fsspec.options import FsspecOptions, Location
from tierkv_fsspec.store import HEAD_BYTES, TEMPORARY, place
from tierkv_fsspec.troubles import Kind, Trouble, forget_frames

BUCKET_PROTOCOLS = ("s3", "gs", "az", "oss", "oci", "tos", "tosfs")
"""Where directories are not real, and making one could create a bucket."""
CONDITIONAL_PROTOCOLS = ("s3", "gs", "az")
"""Whose file systems let the server decide whether an object is new."""
ONE_CALLER_PROTOCOLS = ("sftp", "ssh")
"""Whose file systems hang when two threads use one of them at once."""
WHOLE_PROTOCOLS = (*BUCKET_PROTOCOLS, "memory", "http", "https")
"""Where an object appears whole; elsewhere it is written under another name and moved."""
S3_TRIES = 2
MKDIR_TRIES = 3


class FsspecStore:
    """Objects below ``location``, for any threads.

    fsspec runs requests on its own thread; where it does not, each caller gets a file system of its own.
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
        self._of_callers: list[Any] = []  # whose connections are ours to close
        if self._local is not None:
            self._local.fs = fs
            self._of_callers.append(fs)
        self._root = root.rstrip("/")
        self._put_arguments = _put_arguments(options, location.protocol)
        self._is_conditional = location.protocol in CONDITIONAL_PROTOCOLS
        self._makes_directories = location.protocol not in BUCKET_PROTOCOLS
        self._moves = location.protocol not in WHOLE_PROTOCOLS

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
        """Ask for the object's metadata."""
        try:
            self._call("info", self._path(name))
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """One GET."""
        return bytes(self._call("cat_file", self._path(name)))

    def read_into(self, name: str, buffer: memoryview) -> int:
        """One GET, and a copy."""
        return place(self._call("cat_file", self._path(name)), buffer)

    def holds(self, name: str, data: memoryview) -> bool:
        """Length by metadata, then the head by a short GET."""
        path = self._path(name)
        try:
            if self._call("info", path)["size"] != len(data):
                return False
            return bool(self._call("cat_file", path, start=0, end=min(len(data), HEAD_BYTES)) == data[:HEAD_BYTES])
        except FileNotFoundError as error:
            forget_frames(error)  # of this frame, which it has passed after all
            return False

    def write(self, name: str, data: memoryview) -> None:
        """One PUT (of a copy: not every file system takes other buffers than bytes)."""
        self._put(name, bytes(data), "overwrite")

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """A conditional PUT where file system and server have it; else a look before."""
        if self._is_conditional:
            try:
                self._put(name, bytes(data), "create")
            except Exception as error:
                forget_frames(error)
                kind = Trouble.of(error).kind
                if kind not in (Kind.TAKEN, Kind.NOT_SERVED):
                    raise
                if kind is Kind.TAKEN:
                    return False
                self._is_conditional = False
            else:
                return True
        if self.exists(name):
            return False
        self._put(name, bytes(data), "overwrite")
        return True

    def delete(self, name: str) -> None:
        """One DELETE."""
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            return

    def pages(self) -> Iterator[Sequence[str]]:
        """One directory at a time."""
        for directory in sorted(self._call("ls", self._root, detail=False)):
            last = directory.rstrip("/").rpartition("/")[2]
            if len(last) == 2:  # noqa: PLR2004  two hex digits; manifest and temporary files have longer names
                yield self._call("ls", directory, detail=False)

    def close(self) -> None:
        """Most file systems close their connections when they are collected; those with a thread each never are."""
        self._shared = None
        self._local = None
        self._close_connections()

    def _close_connections(self) -> None:
        while self._of_callers:
            with contextlib.suppress(Exception):  # it may be lost already, with the server; or another is closing it
                self._of_callers.pop().client.close()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, verb: str, *arguments: object, **more: object) -> Any:  # noqa: ANN401  what the verb returns
        try:
            return getattr(self._fs, verb)(*arguments, **more)
        except Exception as error:
            forget_frames(error)
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
        """Make it and its parents; others may make some of them at the same time, which some file systems refuse."""
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


def _open(location: Location, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """A file system of its own for the caller, and the path of ``location`` in it."""
    fs, root = fsspec.core.url_to_fs(location.url, skip_instance_cache=True, **arguments)
    # Listings that are remembered would hide what other processes store and delete.
    fs.dircache = fsspec.dircache.DirCache(use_listings_cache=False)
    if location.protocol == "s3":
        fs.retries = S3_TRIES
    return fs, root


def _put_arguments(options: FsspecOptions, protocol: str) -> dict[str, Any]:
    """What goes with each object, in s3fs's words; other file systems have none."""
    if protocol != "s3":
        return {}
    arguments: dict[str, Any] = {}
    if options.storage_class is not None:
        arguments["StorageClass"] = options.storage_class
    if options.tags:
        arguments["Tagging"] = urlencode(options.tags)
    return arguments


def _s3_arguments(options: FsspecOptions) -> dict[str, Any]:
    """The options in s3fs's words; what the user wrote in storage_options wins."""
    arguments = dict(options.storage_options)
    config = {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.read_timeout_s,
        "retries": {"max_attempts": 0},
        "max_pool_connections": options.concurrent_requests,
    }
    arguments["config_kwargs"] = config | dict(arguments.get("config_kwargs", {}))
    if options.endpoint_url is not None:
        arguments.setdefault("endpoint_url", options.endpoint_url)
    if options.region is not None:
        arguments["client_kwargs"] = {"region_name": options.region} | dict(arguments.get("client_kwargs", {}))
    return arguments
