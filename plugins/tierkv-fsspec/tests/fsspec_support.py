"""What the tests of this plugin share."""

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

    Requests are served one at a time: moto's own threads trip over each other where an object is read and overwritten
    at once, which real stores do not.

    requests: "METHOD path" of all that came.
    headers: the environment in which each came.
    refuse: end of a path -> status line, and XML behind it, that requests for it get.
    refuse_conditions: whether a request that has one is refused as something not known.
    in_flight_max: the most requests that waited or were served at once.
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
        """Listen, after the first time on the same port."""
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
        with self._counting:  # threads of the server: without it a peak may be lost, and a test waits for it for ever
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
        for end, status in refused.items():
            if path.endswith(end) and (end or "HTTP_IF_NONE_MATCH" in environ):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                line, xml, body = status.partition("<")
                content = f"{xml}{body}".encode() if environ["REQUEST_METHOD"] != "HEAD" else b""
                start_response(line.strip(), [("Content-Length", str(len(content)))])
                return [content]
        return self._app(environ, start_response)

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def client(self) -> Any:
        """A client of another kind than those under test, to look and reach behind the backend's back."""
        return boto3.client("s3", endpoint_url=self.endpoint)

    def new_bucket(self) -> str:
        """A bucket that nobody else has."""
        name = f"tierkv-{uuid.uuid4().hex[:16]}"
        self.client.create_bucket(Bucket=name)
        return name

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Inside the block requests come in and none is answered."""
        with self._turn:
            yield

    @contextlib.contextmanager
    def enforcing_rights(self) -> Iterator[None]:
        """Inside the block the server checks who asks, and what for."""
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
    """A server of objects that tests look into behind the backend's back, through a client of their own.

    url: a bucket or container that is there. endpoint: where the server listens; None for the usual place.
    """

    url: str
    endpoint: str | None

    def new_place(self) -> str:
        """A prefix that nobody else has."""
        return f"{self.url}/{uuid.uuid4().hex[:16]}/pre fix"

    def options(self, implementation: str) -> dict[str, Any]:
        """Options of a tier on the server. adlfs learns its address from the environment."""
        timeouts = {"connect_timeout_s": 5.0, "read_timeout_s": 30.0}
        place = {} if self.url.startswith("az:") and implementation == "fsspec" else {"endpoint_url": self.endpoint}
        return {"implementation": implementation, **timeouts, **place}

    @property
    def client(self) -> Any:
        """A client for the bucket."""
        protocol, _, bucket = self.url.partition("://")
        kind = {"s3": obstore.store.S3Store, "az": obstore.store.AzureStore}[protocol]
        config = {} if self.endpoint is None else {"endpoint": self.endpoint}
        allow_http = (self.endpoint or "").startswith("http://")
        return kind(bucket, config=config, client_options={"allow_http": allow_http})

    def path(self, place: str, name: str = "") -> str:
        """Full name in the bucket."""
        return f"{place.removeprefix(self.url + '/')}/{name}"

    def names(self, place: str) -> list[str]:
        """All objects below a place, without it."""
        prefix = self.path(place)
        pages = list(self.client.list(prefix))
        return sorted(entry["path"].removeprefix(prefix) for page in pages for entry in page)

    def get(self, place: str, name: str) -> bytes:
        """What lies there."""
        return bytes(self.client.get(self.path(place, name)).bytes())

    def put(self, place: str, name: str, content: bytes) -> None:
        """Lay something there."""
        self.client.put(self.path(place, name), content)

    def remove(self, place: str, name: str) -> None:
        """Take it away."""
        self.client.delete(self.path(place, name))


class QuietHandler(WSGIRequestHandler):
    """Connections stay open; a line for each request would hide a failure."""

    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002  werkzeug's name
        pass


def namespace(model: str = "tests") -> Namespace:
    """A namespace; another model makes another one."""
    return Namespace(model, "r1", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 4, 16)


def open_at(url: str, model: str = "tests", **options: Any) -> Any:
    """The backend, through the plugin, as the framework opens it."""
    context = BackendContext("remote", namespace(model), 64 * 1024, None)
    return tierkv_fsspec.PLUGIN.open(context, FsspecOptions(url=url, **options))


def check(url: str, **options: Any) -> dict[str, CheckResult]:
    """Findings by subject; each that is not good has a fix."""
    assert tierkv_fsspec.PLUGIN.check is not None
    findings = list(tierkv_fsspec.PLUGIN.check(FsspecOptions(url=url, **options), None))
    assert all(finding.fix for finding in findings if not finding.ok)
    return {finding.subject: finding for finding in findings}


def key(number: int) -> Key:
    """The ``number``-th key, 36 bytes."""
    return Key(number.to_bytes(36, "big"))


def object_name(k: Key, model: str = "tests") -> str:
    """Name of a key's object below the tier's URL, by the documentation."""
    digest = hashlib.blake2b(k, digest_size=16).hexdigest()
    return f"{namespace(model).fingerprint().hex()}/{digest[:2]}/{digest}"


def put(backend: Any, frames: dict[Key, bytes]) -> list[WriteResult]:
    """Write a batch."""
    results: list[WriteResult] = backend.write([WriteRequest(k, memoryview(frame)) for k, frame in frames.items()])
    return results


def get(backend: Any, *keys: Key, buffer_bytes: int = 64 * 1024) -> list[bytes | ReadResult]:
    """Read a batch: bytes, or what was answered instead."""
    requests = [ReadRequest(k, memoryview(bytearray(buffer_bytes))) for k in keys]
    results = backend.read_into(requests)
    return [
        bytes(request.buffer[:result]) if isinstance(result, int) else result
        for request, result in zip(requests, results, strict=True)
    ]


def run_child(code: str, *arguments: object) -> str:
    """Run Python code that may import this module in a process of its own; its output."""
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
    """All objects in the bucket of ``url``, looked at from outside."""
    listed = s3.client.list_objects_v2(Bucket=url.split("/")[2])
    return [entry["Key"] for entry in listed.get("Contents", [])]
