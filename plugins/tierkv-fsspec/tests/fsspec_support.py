"""Helpers shared by the tests of this plugin."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import obstore.store
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

import tierkv_fsspec
from tierkv.abc import BackendContext, CheckResult, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace
from tierkv_fsspec import FsspecOptions

CHILD_TIMEOUT_S = 60


class S3Server:
    """moto on 127.0.0.1. Its objects live in this process, so that they outlast a stop and a start.

    Requests are served one at a time: moto's threads interfere if an object is read and overwritten at once, unlike
    real stores.

    Attributes:
        requests: "METHOD path" of all requests.
        headers: WSGI environment of each request.
        refuse: end of a path, or of one with a query -> status line, and XML body, of the response to requests for it.
        refuse_conditions: whether conditional requests are refused as not implemented.
        in_flight_max: largest number of requests that waited or were served at once.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.headers: list[dict[str, Any]] = []
        self.refuse: dict[str, str] = {}
        self.refuse_conditions = False
        self.in_flight_max = 0
        self._in_flight = 0
        self._app = DomainDispatcherApplication(create_backend_app)
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._port = 0
        self.start()

    def start(self) -> None:
        """Listen; after the first time on the same port."""
        self._server = make_server("127.0.0.1", self._port, self._serve, threaded=True, request_handler=QuietHandler)
        self._port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections, and refuse new ones."""
        self._server.shutdown()
        self._thread.join()
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        self._sockets.add(environ["werkzeug.socket"])
        path = environ["PATH_INFO"]
        # Threads of the server: without the lock a peak may be missed, and a test would wait for it for ever.
        with self._counting:
            self.requests.append(f"{environ['REQUEST_METHOD']} {path}")
            self.headers.append(environ)
            self._in_flight += 1
            self.in_flight_max = max(self.in_flight_max, self._in_flight)
        try:
            with self._turn:
                return self._answer(path, environ, start_response)
        finally:
            with self._counting:
                self._in_flight -= 1

    def _answer(self, path: str, environ: dict[str, Any], start_response: Any) -> Any:
        refused = {**self.refuse, **({"": "501 Not Implemented"} if self.refuse_conditions else {})}
        asked = f"{path}?{environ.get('QUERY_STRING', '')}"
        for end, status in refused.items():
            if (asked if "?" in end else path).endswith(end) and (end or "HTTP_IF_NONE_MATCH" in environ):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                line, xml, body = status.partition("<")
                content = f"{xml}{body}".encode() if environ["REQUEST_METHOD"] != "HEAD" else b""
                start_response(line.strip(), [("Content-Length", str(len(content)))])
                return [content]
        return self._app(environ, start_response)

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def client(self) -> Any:
        """Client of another library than those under test, to read and change objects behind the backend's back."""
        return boto3.client("s3", endpoint_url=self.endpoint)

    def new_bucket(self) -> str:
        """Name of a new bucket."""
        name = f"tierkv-{uuid.uuid4().hex[:16]}"
        self.client.create_bucket(Bucket=name)
        return name

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Within the block, requests arrive and none is answered."""
        with self._turn:
            yield

    @contextlib.contextmanager
    def enforcing_rights(self) -> Iterator[None]:
        """Within the block, the server checks credentials and permissions."""
        self._reset_auth("0")
        try:
            yield
        finally:
            self._reset_auth("inf")

    def _reset_auth(self, allowed_without: str) -> None:
        text = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset-auth", allowed_without.encode(), text)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200


@dataclass(frozen=True, slots=True)
class ObjectServer:
    """Object server whose content tests access behind the backend's back, through a separate client.

    Attributes:
        url: an existing bucket or container.
        endpoint: address of the server; None for the default one.
    """

    url: str
    endpoint: str | None

    def new_place(self) -> str:
        """URL of a new prefix."""
        return f"{self.url}/{uuid.uuid4().hex[:16]}/pre fix"

    def options(self, implementation: str) -> dict[str, Any]:
        """Options of a tier on the server. adlfs gets its address from the environment."""
        timeouts = {"connect_timeout_s": 5.0, "read_timeout_s": 30.0}
        place = {} if self.url.startswith("az:") and implementation == "fsspec" else {"endpoint_url": self.endpoint}
        return {"implementation": implementation, **timeouts, **place}

    @property
    def client(self) -> Any:
        """Client of the bucket."""
        protocol, _, bucket = self.url.partition("://")
        kind = {"s3": obstore.store.S3Store, "az": obstore.store.AzureStore}[protocol]
        config = {} if self.endpoint is None else {"endpoint": self.endpoint}
        allow_http = (self.endpoint or "").startswith("http://")
        return kind(bucket, config=config, client_options={"allow_http": allow_http})

    def path(self, place: str, name: str = "") -> str:
        """Full name in the bucket."""
        return f"{place.removeprefix(self.url + '/')}/{name}"

    def names(self, place: str) -> list[str]:
        """Names of all objects below a URL, relative to it."""
        prefix = self.path(place)
        pages = list(self.client.list(prefix))
        return sorted(entry["path"].removeprefix(prefix) for page in pages for entry in page)

    def get(self, place: str, name: str) -> bytes:
        """Read an object."""
        return bytes(self.client.get(self.path(place, name)).bytes())

    def put(self, place: str, name: str, content: bytes) -> None:
        """Write an object."""
        self.client.put(self.path(place, name), content)

    def remove(self, place: str, name: str) -> None:
        """Delete an object."""
        self.client.delete(self.path(place, name))


class QuietHandler(WSGIRequestHandler):
    """Connections stay open; a log line for each request would hide a failure."""

    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002  werkzeug's name
        pass


def namespace(model: str = "tests") -> Namespace:
    """Namespace of a model; another model has another one."""
    return Namespace(model, "r1", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 4, 16)


def open_at(url: str, model: str = "tests", **options: Any) -> Any:
    """Open the backend through the plugin, as the framework does."""
    context = BackendContext("remote", namespace(model), 64 * 1024, None)
    return tierkv_fsspec.PLUGIN.open(context, FsspecOptions(url=url, **options))


def check(url: str, **options: Any) -> dict[str, CheckResult]:
    """Check results by subject; each bad one has a fix."""
    assert tierkv_fsspec.PLUGIN.check is not None
    check_results = list(tierkv_fsspec.PLUGIN.check(FsspecOptions(url=url, **options), None))
    assert all(check_result.fix for check_result in check_results if not check_result.ok)
    return {check_result.subject: check_result for check_result in check_results}


def key(number: int) -> Key:
    """Key number ``number``, 36 bytes."""
    return Key(number.to_bytes(36, "big"))


def object_name(k: Key, model: str = "tests") -> str:
    """Name of a key's object below the tier's URL, as documented."""
    digest = hashlib.blake2b(k, digest_size=16).hexdigest()
    return f"{namespace(model).fingerprint().hex()}/{digest[:2]}/{digest}"


def put(backend: Any, frames: dict[Key, bytes]) -> list[WriteResult]:
    """Write a batch."""
    results: list[WriteResult] = backend.write([WriteRequest(k, memoryview(frame)) for k, frame in frames.items()])
    return results


def get(backend: Any, *keys: Key, buffer_bytes: int = 64 * 1024) -> list[bytes | ReadResult]:
    """Read a batch: bytes, or the result without bytes."""
    requests = [ReadRequest(k, memoryview(bytearray(buffer_bytes))) for k in keys]
    results = backend.read_into(requests)
    return [
        bytes(request.buffer[:result]) if isinstance(result, int) else result
        for request, result in zip(requests, results, strict=True)
    ]


def run_child(code: str, *arguments: object) -> str:
    """Run Python code that may import this module in another process. Returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def names(s3: S3Server, url: str) -> list[str]:
    """All objects in the bucket of ``url``, listed without the backend."""
    listed = s3.client.list_objects_v2(Bucket=url.split("/")[2])
    return [entry["Key"] for entry in listed.get("Contents", [])]
