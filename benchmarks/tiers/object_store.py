"""The object tier, through dispatcher, tier, plugin and obstore, with frames checked: beside plain HTTP.

The limit is Python's HTTP client with signed URLs on as many connections, to the same server in the same rounds; it
checks nothing and moves bytes between the slots and the sockets. The server is another process, so processor time is
the client's alone. It is one of our own that does next to nothing (:mod:`benchmarks.tiers.object_server`), or what
``TIERKV_TEST_OBJECT_URL`` and ``TIERKV_TEST_OBJECT_ENDPOINT`` name::

    python plugins/tierkv-fsspec/tests/servers/radosgw.py FOLDER python -m benchmarks object_store

A put is of frames that a lookup has just found absent, as an engine's stores are; "not asked for" is without that.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Self
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from benchmarks.measure import Cost, Settings, medians, take_turns, timed
from benchmarks.rows import Row, Target
from benchmarks.tiers.bandwidth import GB, MIB, Limit, bandwidth_row, frame_sizes
from benchmarks.tiers.rig import Frames, opened

REQUESTS = 16
PUT_SHARE, GET_SHARE = 0.90, 0.80
CPU_S_PER_GB_MAX = 0.8
NOBODY = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def run(settings: Settings) -> Iterator[Row]:
    """Measure put and get, for two sizes of frames."""
    with served_bucket() as (url, endpoint):
        for size, frames in frame_sizes(settings):
            yield from _rows(size, frames, url, endpoint, settings.rounds)


def _rows(size: str, frames: Frames, url: str, endpoint: str, rounds: int) -> Iterator[Row]:
    options: dict[str, object] = {
        "backend": "fsspec",
        "url": f"{url}/tier",
        "endpoint_url": endpoint,
        "concurrent_requests": REQUESTS,
        "warm_up_keys_max": 0,
    }
    with opened(options, frames) as tier, _RawHttp(url, endpoint, frames) as raw:

        def put_after(prepare: Callable[[Frames], None]) -> Cost:
            tier.delete(frames)
            prepare(frames)
            return timed(lambda: tier.put(frames))

        def raw_put() -> Cost:
            raw.delete()
            return timed(raw.put)

        puts = take_turns([lambda: put_after(tier.probe), raw_put, lambda: put_after(lambda _: None)], rounds)
        gets = take_turns([lambda: timed(lambda: tier.get(frames)), lambda: timed(raw.get)], rounds)
        frames.wipe()
        tier.get(frames)
        frames.verify()
        frames.wipe()
        raw.get()
        frames.verify()
        tier.delete(frames)
        raw.delete()
    extra = {"connections": REQUESTS, "verified, MiB": frames.total_bytes / MIB}
    total = frames.total_bytes
    put_limit = Limit(raw.name, puts[1], PUT_SHARE)
    yield bandwidth_row(f"put, {size}", total, puts[0], put_limit, extra)
    yield bandwidth_row(f"put not asked for, {size}", total, puts[2], Limit(raw.name, puts[1], 0.0), extra)
    yield bandwidth_row(f"get, {size}", total, gets[0], Limit(raw.name, gets[1], GET_SHARE), extra)
    yield _cpu_row(f"put, {size}", total, puts[0], puts[1])
    yield _cpu_row(f"get, {size}", total, gets[0], gets[1])


def _cpu_row(what: str, total_bytes: int, ours: Sequence[Cost], raw: Sequence[Cost]) -> Row:
    gigabytes = total_bytes / GB
    measured, limit = medians(ours).cpu_s / gigabytes, medians(raw).cpu_s / gigabytes
    target = Target("measured", "<=", CPU_S_PER_GB_MAX)
    ratios = [a.cpu_s / b.cpu_s for a, b in zip(ours, raw, strict=True)]
    return Row(f"processor time of a {what}", "s/GB", measured, "plain HTTP client", limit, ratios, target)


class _RawHttp:
    """Frames as objects through Python's HTTP client, a connection for each of as many threads."""

    name = "plain HTTP client"

    def __init__(self, url: str, endpoint: str, frames: Frames) -> None:
        self._address = urlsplit(endpoint).netloc
        self._buffers = [frames.arena.slot(ref.slot) for ref in frames.slots]
        self._pool = ThreadPoolExecutor(REQUESTS, "raw")
        self._local = threading.local()
        store = S3Store(url.removeprefix("s3://"), config={"endpoint": endpoint}, client_options={"allow_http": True})
        names = [f"raw/{number}" for number in range(len(frames.keys))]
        self._signed = {
            method: [urlsplit(signed) for signed in obstore.sign(store, method, names, timedelta(hours=12))]
            for method in ("PUT", "GET", "DELETE")
        }

    def put(self) -> None:
        """Store all frames."""
        self._each("PUT")

    def get(self) -> None:
        """Read all frames into their slots."""
        self._each("GET")

    def delete(self) -> None:
        """Delete all frames."""
        self._each("DELETE")

    def _each(self, method: str) -> None:
        list(self._pool.map(lambda number: self._ask(method, number), range(len(self._buffers))))

    def _ask(self, method: str, number: int) -> None:
        url, buffer = self._signed[method][number], self._buffers[number]
        connection = self._connection()
        connection.request(method, f"{url.path}?{url.query}", body=buffer if method == "PUT" else None)
        answer = connection.getresponse()
        if answer.status not in (200, 204, 404):
            raise RuntimeError(f"{method}: HTTP {answer.status} {answer.read(500)!r}")
        done = 0
        while method == "GET" and done < len(buffer):
            got = answer.readinto(buffer[done:])
            if not got:
                raise RuntimeError(f"GET: {done} of {len(buffer)} bytes")
            done += got
        answer.read()

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(self._address, timeout=60.0)
        connection: http.client.HTTPConnection = self._local.connection
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown()


@contextmanager
def served_bucket() -> Iterator[tuple[str, str]]:
    """URL of a bucket and endpoint of a running server, or of one that is started for the benchmark."""
    if "TIERKV_TEST_OBJECT_URL" in os.environ:
        yield os.environ["TIERKV_TEST_OBJECT_URL"], os.environ["TIERKV_TEST_OBJECT_ENDPOINT"]
        return
    before = {name: os.environ.get(name) for name in NOBODY}
    command = [sys.executable, "-m", "benchmarks.tiers.object_server"]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)  # noqa: S603  it is this package's own
    try:
        os.environ.update(NOBODY)
        port = int(server.stdout.readline()) if server.stdout is not None else 0
        yield "s3://benchmark", f"http://127.0.0.1:{port}"
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        server.communicate()
