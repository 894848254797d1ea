"""S3, Google Cloud Storage and Azure through obstore: one request per verb, no copy before a PUT, no event loop."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, cast

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from tierkv_fsspec.credentials import aws_from_files
from tierkv_fsspec.options import FsspecOptions, Location
from tierkv_fsspec.store import HEAD_BYTES, TooLongError, place

RETRIES = 1
"""For a connection that the server closed while it was idle. More is the framework's business."""


class ObstoreStore:
    """Objects below ``location``."""

    is_remote = True

    def __init__(self, location: Location, options: FsspecOptions) -> None:
        self._store = _open(location, options)
        self._prefix = f"{location.prefix}/" if location.prefix else ""

    def exists(self, name: str) -> bool:
        """One HEAD."""
        try:
            obstore.head(self._store, self._prefix + name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """One GET."""
        return bytes(obstore.get(self._store, self._prefix + name).bytes())

    def read_into(self, name: str, buffer: memoryview) -> int:
        """One GET, and a copy; a body that is too long is not fetched."""
        answer = obstore.get(self._store, self._prefix + name)
        if answer.meta["size"] > len(buffer):
            raise TooLongError(answer.meta["size"], len(buffer))
        return place(memoryview(answer.bytes()), buffer)

    def holds(self, name: str, data: memoryview) -> bool:
        """Length and head in one ranged GET."""
        head = data[:HEAD_BYTES]
        try:
            answer = obstore.get(self._store, self._prefix + name, options={"range": (0, len(head))})
            return answer.meta["size"] == len(data) and memoryview(answer.bytes()) == head
        except FileNotFoundError:
            return False

    def write(self, name: str, data: memoryview) -> None:
        """One PUT, never in parts."""
        obstore.put(self._store, self._prefix + name, data, use_multipart=False)

    def create(self, name: str, data: bytes) -> bool:
        """A conditional PUT."""
        try:
            obstore.put(self._store, self._prefix + name, data, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        """One request; some stores do not know deletes of absent objects."""
        try:
            obstore.delete(self._store, self._prefix + name)
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Connections close when the store is collected."""


def _endpoint(options: FsspecOptions) -> str | None:
    """The configured one, or the one that every AWS tool takes from the environment."""
    return options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _open(location: Location, options: FsspecOptions) -> ObjectStore:
    arguments: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=options.connect_timeout_s),
            "timeout": timedelta(seconds=options.read_timeout_s),
            "allow_http": (_endpoint(options) or "").startswith("http://"),
        },
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=options.read_timeout_s),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
        },
    }
    config = dict(options.storage_options)
    if config.pop("anon", False):
        config["skip_signature"] = True
    if location.protocol == "gs":
        return GCSStore(location.bucket, config=cast("Any", config), **arguments)
    if location.protocol == "az":
        return AzureStore(location.bucket, config=cast("Any", config), **arguments)
    # Frames carry their own checksums, so the payload need not be hashed for its signature.
    config.setdefault("unsigned_payload", True)
    endpoint = _endpoint(options)
    if endpoint is not None:
        config["endpoint"] = endpoint
    if options.region is not None:
        config["region"] = options.region
    if "skip_signature" not in config and aws_from_files():
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415  boto3 is needed for ~/.aws alone

        arguments["credential_provider"] = Boto3CredentialProvider()
    return S3Store(location.bucket, config=cast("Any", config), **arguments)
