"""What the tests of this plugin share."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import boto3
import tierkv_fsspec
from moto.server import ThreadedMotoServer
from tierkv_fsspec import FsspecOptions

from tierkv.abc import BackendContext, Finding, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace

CHILD_TIMEOUT_S = 60


class S3Server:
    """moto on 127.0.0.1. Its objects live in this process, so that they outlast a stop and a start."""

    def __init__(self) -> None:
        self._port = 0
        self._server: ThreadedMotoServer | None = None

    def start(self) -> None:
        """Listen, after the first time on the same port."""
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()

    def stop(self) -> None:
        """Refuse connections."""
        assert self._server is not None
        self._server.stop()

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


def namespace(model: str = "tests") -> Namespace:
    """A namespace; another model makes another one."""
    return Namespace(model, "r1", "bfloat16", "page", ((16, (4096,)),), 4, 16)


def open_at(url: str, model: str = "tests", **options: Any) -> Any:
    """The backend, through the plugin, as the framework opens it."""
    context = BackendContext("remote", namespace(model), 64 * 1024, None)
    return tierkv_fsspec.PLUGIN.open(context, FsspecOptions(url=url, **options))


def check(url: str, **options: Any) -> dict[str, Finding]:
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
