"""Helpers shared by the tests of this plugin."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tierkv_lmdb
from tierkv.abc import BackendContext, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace
from tierkv_lmdb import LmdbOptions

KIB, MIB = 1024, 1024**2
CHILD_TIMEOUT_S = 60
WAIT_S = 30.0
FRAME = bytes(range(256)) * 200


def namespace(model: str = "tests") -> Namespace:
    """Namespace of a model; another model has another one."""
    return Namespace(model, "r1", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 4, 16)


def context(
    capacity_bytes: int | None = 16 * MIB, frame_bytes_max: int = 64 * KIB, model: str = "tests"
) -> BackendContext:
    """Context that the framework would pass at open."""
    return BackendContext("cold", namespace(model), frame_bytes_max, capacity_bytes)


def open_at(place: Path, ctx: BackendContext | None = None, **options: Any) -> Any:
    """Open the backend through the plugin, as the framework does."""
    return tierkv_lmdb.PLUGIN.open(ctx or context(), LmdbOptions(path=str(place), **options))


def directory(place: Path, model: str = "tests") -> Path:
    """Directory of the namespace."""
    return place / namespace(model).fingerprint().hex()


def key(number: int) -> Key:
    """Key number ``number``, 36 bytes."""
    return Key(number.to_bytes(36, "big"))


def put(backend: Any, frames: dict[Key, bytes]) -> list[WriteResult]:
    """Write a batch."""
    results: list[WriteResult] = backend.write([WriteRequest(k, memoryview(frame)) for k, frame in frames.items()])
    return results


def get(backend: Any, *keys: Key, buffer_bytes: int = 64 * KIB) -> list[bytes | ReadResult]:
    """Read a batch: bytes, or the result without bytes."""
    requests = [ReadRequest(k, memoryview(bytearray(buffer_bytes))) for k in keys]
    results = backend.read_into(requests)
    return [
        bytes(request.buffer[:result]) if isinstance(result, int) else result
        for request, result in zip(requests, results, strict=True)
    ]


def put_once(backend: Any, number: int) -> list[object]:
    """Write one frame; an exception is its result."""
    try:
        return put(backend, {key(number): FRAME})  # type: ignore[return-value]
    except BackendError as error:
        return [error]


def write_until_stored(backend: Any, number: int) -> None:
    """Repeat a write while the tier pauses; fail after ``WAIT_S``."""
    give_up_s = time.monotonic() + WAIT_S
    while (results := put_once(backend, number)) != [None]:
        assert time.monotonic() < give_up_s, results
        time.sleep(0.02)


def run_child(code: str, *arguments: object, timeout_s: float = CHILD_TIMEOUT_S) -> str:
    """Run Python code that may import this module in another process. Returns its output; a crash fails the test."""
    return _run([sys.executable, "-c", code, *map(str, arguments)], timeout_s)


def run_on_small_disk(code: str, mount_point: Path, *, mib: int) -> None:
    """Run Python code with a file system of ``mib`` MiB mounted at ``mount_point``, for that process alone."""
    alone = ["unshare", "--map-root-user", "--mount"]
    mount = f'mount -t tmpfs -o size={mib}m tmpfs "$0"'
    allowed = subprocess.run([*alone, "sh", "-c", mount, mount_point], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"may not mount here: {allowed.stderr.decode()}")
    _run(
        [*alone, "sh", "-c", f'{mount} && exec "$@"', str(mount_point), sys.executable, "-c", code, f"{mount_point}/t"]
    )


def _run(command: list[str], timeout_s: float = CHILD_TIMEOUT_S) -> str:
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def killed_at_end(code: str, *arguments: object) -> Iterator[int]:
    """Run Python code in a process that prints "ready" and is killed (-9) at the end of the block. Yields its pid."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parent, **pipes) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child.pid
        finally:
            child.kill()
