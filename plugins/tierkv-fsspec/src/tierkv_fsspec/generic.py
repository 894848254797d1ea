"""Any fsspec file system, through its blocking interface."""

from __future__ import annotations

from typing import Any

import fsspec  # type: ignore[import-untyped]  # it ships no types

from tierkv_fsspec.options import FsspecOptions, Location
from tierkv_fsspec.store import HEAD_BYTES, place
from tierkv_fsspec.troubles import forget_frames

BUCKET_PROTOCOLS = ("s3", "gs", "az", "oss", "oci", "tos", "tosfs")
"""Where directories are not real, and making one could create a bucket."""
S3_TRIES = 2


class FsspecStore:
    """Objects below ``location``. fsspec runs its requests on its own thread; any thread may call."""

    is_remote = True

    def __init__(self, location: Location, options: FsspecOptions) -> None:
        arguments = _s3_arguments(options) if location.protocol == "s3" else dict(options.storage_options)
        fs, root = fsspec.core.url_to_fs(location.url, skip_instance_cache=True, **arguments)
        # Listings that are remembered would hide what other processes store and delete.
        fs.dircache = fsspec.dircache.DirCache(use_listings_cache=False)
        if location.protocol == "s3":
            fs.retries = S3_TRIES
        self._fs: Any = fs
        self._root = root.rstrip("/")
        self._makes_directories = location.protocol not in BUCKET_PROTOCOLS

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

    def create(self, name: str, data: bytes) -> bool:
        """A conditional PUT where the file system has it; else a look before."""
        if self.exists(name):
            return False
        try:
            self._put(name, data, "create")
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        """One DELETE."""
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            return

    def close(self) -> None:
        """The file system closes its connections when it is collected."""
        self._fs = None

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
        try:
            self._call("pipe_file", path, data, mode=mode)
        except FileNotFoundError:
            if not self._makes_directories:
                raise
            self._call("makedirs", path.rpartition("/")[0], exist_ok=True)
            self._call("pipe_file", path, data, mode=mode)


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
