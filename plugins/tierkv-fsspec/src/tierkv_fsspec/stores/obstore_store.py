"""Store on S3, Google Cloud Storage, Azure or HTTP through obstore: one request per verb, no copy before a PUT."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import obstore
from obstore.store import AzureStore, GCSStore, HTTPStore, ObjectStore, S3Store

from tierkv_fsspec.credentials import aws_from_files
from tierkv_fsspec.failures import Failure, FailureKind, clear_tracebacks
from tierkv_fsspec.options import FsspecOptions, Location
from tierkv_fsspec.stores.plain_http import OBJECT_BYTES_MIN, PlainReads, has_proxy
from tierkv_fsspec.stores.store import HEAD_BYTES, SHORT_BYTES_MAX, ListedObject, TooLongError, copy_into, short

LISTED_AT_ONCE = 1000
"""Names per response of a server."""
SIGNED_FOR = timedelta(minutes=15)
"""Time for which a signed URL is valid. It is used at once; clocks may differ."""
RETRIES = 1
"""Retries, for a connection that the server closed while idle. Further retries are the framework's task."""


class ObstoreStore:
    """Objects below ``location``."""

    is_remote = True

    def __init__(self, location: Location, options: FsspecOptions) -> None:
        self._store = _open(location, options)
        self._prefix = f"{location.prefix}/" if location.prefix else ""
        self._put_arguments = _put_arguments(options)
        self._is_conditional = True
        self._plain = self._plain_reads(options) if reads_plainly(location, options) else None

    def _plain_reads(self, options: FsspecOptions) -> PlainReads:
        store = cast("S3Store", self._store)
        return PlainReads(
            lambda path: obstore.sign(store, "GET", path, SIGNED_FOR),
            connect_timeout_s=options.connect_timeout_s,
            read_timeout_s=options.read_timeout_s,
            kept_max=options.concurrent_requests,
        )

    def exists(self, name: str) -> bool:
        """Send one HEAD."""
        try:
            obstore.head(self._store, self._prefix + name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """Send one GET; a body that is too long is not fetched."""
        answer = obstore.get(self._store, self._prefix + name)
        if answer.meta["size"] > SHORT_BYTES_MAX:
            raise TooLongError(answer.meta["size"], SHORT_BYTES_MAX)
        return short(bytes(answer.bytes()))

    def read_into(self, name: str, buffer: memoryview) -> int:
        """Send one GET and copy the body; a body that is too long is not fetched."""
        plain = self._plain
        if plain is None or len(buffer) < OBJECT_BYTES_MIN or plain.rests:
            return self._received_into(name, buffer)
        length = plain.read_into(self._prefix + name, buffer)
        if length is None:
            length = self._received_into(name, buffer)
            plain.fell_back()
        return length

    def _received_into(self, name: str, buffer: memoryview) -> int:
        answer = obstore.get(self._store, self._prefix + name)
        if answer.meta["size"] > len(buffer):
            raise TooLongError(answer.meta["size"], len(buffer))
        return copy_into(memoryview(answer.bytes()), buffer)

    def holds_same(self, name: str, data: memoryview) -> bool:
        """Compare length and head by one ranged GET."""
        head = data[:HEAD_BYTES]
        try:
            answer = obstore.get(self._store, self._prefix + name, options={"range": (0, len(head))})
            return answer.meta["size"] == len(data) and memoryview(answer.bytes()) == head
        except FileNotFoundError:
            return False
        except Exception as error:
            if Failure.of(error).kind is not FailureKind.NO_RANGE:  # of an empty object
                raise
            clear_tracebacks(error)
            return False

    def write(self, name: str, data: memoryview) -> None:
        """Send one PUT, never in parts."""
        obstore.put(self._store, self._prefix + name, data, use_multipart=False, **self._put_arguments)

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Send a conditional PUT; on servers without conditions, look up, then PUT."""
        if self._is_conditional:
            try:
                obstore.put(
                    self._store, self._prefix + name, data, mode="create", use_multipart=False, **self._put_arguments
                )
            except Exception as error:
                kind = Failure.of(error).kind
                if kind not in (FailureKind.TAKEN, FailureKind.NOT_SERVED):
                    raise
                clear_tracebacks(error)
                if kind is FailureKind.TAKEN:
                    return False
                self._is_conditional = False
            else:
                return True
        if self.exists(name):
            return False
        self.write(name, memoryview(data))
        return True

    def delete(self, name: str) -> None:
        """Send one DELETE; some stores report an absent object as an error."""
        try:
            obstore.delete(self._store, self._prefix + name)
        except FileNotFoundError:
            return

    def list_names(self) -> Iterator[Sequence[str]]:
        """Send one LIST per page."""
        for page in obstore.list(self._store, self._prefix, chunk_size=LISTED_AT_ONCE):
            yield [entry["path"] for entry in page]

    def list_objects(self) -> Iterator[Sequence[ListedObject]]:
        """Send one LIST per page."""
        start = len(self._prefix)
        for page in obstore.list(self._store, self._prefix, chunk_size=LISTED_AT_ONCE):
            yield [ListedObject(each["path"][start:], each["size"], each["last_modified"].timestamp()) for each in page]

    def list_children(self) -> Iterator[str]:
        """Send LIST requests with a delimiter."""
        found = obstore.list_with_delimiter(self._store, self._prefix)
        for prefix in found["common_prefixes"]:
            yield prefix.rstrip("/").rpartition("/")[2]

    def read_head(self, name: str) -> bytes:
        """Send one GET of a range."""
        return bytes(obstore.get(self._store, self._prefix + name, options={"range": (0, HEAD_BYTES)}).bytes())

    def close(self) -> None:
        """Close the connections of plain reads; the others close when the store is collected."""
        if self._plain is not None:
            self._plain.close()


def reads_plainly(location: Location, options: FsspecOptions) -> bool:
    """Whether objects are received into buffers over plain HTTP (:mod:`tierkv_fsspec.stores.plain_http`)."""
    endpoint = _endpoint(location, options) or ""
    is_signed = not options.storage_options.get("anon")
    return location.protocol == "s3" and endpoint.startswith("http://") and is_signed and not has_proxy(endpoint)


def _put_arguments(options: FsspecOptions) -> dict[str, Any]:
    """Arguments of each PUT."""
    arguments: dict[str, Any] = {}
    if options.storage_class is not None:
        arguments["attributes"] = {"Storage-Class": options.storage_class}
    if options.tags:
        arguments["tags"] = dict(options.tags)
    return arguments


def _endpoint(location: Location, options: FsspecOptions) -> str | None:
    """Configured endpoint; for S3 otherwise the one in the environment, as in every AWS tool."""
    if location.protocol == "s3":
        return options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return options.endpoint_url


def _open(location: Location, options: FsspecOptions) -> ObjectStore:
    endpoint = _endpoint(location, options)
    address = location.url if location.protocol == "http" else endpoint or ""
    arguments: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=options.connect_timeout_s),
            "timeout": timedelta(seconds=options.read_timeout_s),
            "allow_http": address.startswith("http://"),
        },
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=options.read_timeout_s),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
        },
    }
    if location.protocol in ("http", "https"):
        return HTTPStore(f"{location.protocol}://{location.bucket}", **arguments)
    config = dict(options.storage_options)
    if config.pop("anon", False):
        config["skip_signature"] = True
    if location.protocol == "gs":
        if endpoint is not None:
            config["base_url"] = endpoint
        return GCSStore(location.bucket, config=cast("Any", config), **arguments)
    if location.protocol == "az":
        if endpoint is not None:
            config["endpoint"] = endpoint
        return AzureStore(location.bucket, config=cast("Any", config), **arguments)
    return S3Store(location.bucket, **_s3_arguments(config, endpoint, options), **arguments)


def _s3_arguments(config: dict[str, Any], endpoint: str | None, options: FsspecOptions) -> dict[str, Any]:
    # Frames carry their own checksums, so the payload need not be hashed for its signature.
    config.setdefault("unsigned_payload", True)
    if endpoint is not None:
        config["endpoint"] = endpoint
    if options.region is not None:
        config["region"] = options.region
    if "skip_signature" in config or not aws_from_files():
        return {"config": config}
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415  boto3 is needed only for ~/.aws

    return {"config": config, "credential_provider": Boto3CredentialProvider()}
