"""Read-only tiers, over HTTP and otherwise: stored chunks are hits, and nothing is ever written."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec_support import check, get, key, namespace, object_name, open_at, put

import tierkv_fsspec
from tierkv.abc import BackendContext
from tierkv.errors import BackendError, BackendUnavailableError, NamespaceMismatchError
from tierkv.testing import BackendConformance
from tierkv_fsspec import FsspecOptions

FRAME = bytes(range(256)) * 200


class Handler(SimpleHTTPRequestHandler):
    """Serve the files of a directory over connections that stay open; record the requests."""

    protocol_version = "HTTP/1.1"
    requests: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  http.server's name
        self.requests.append(f"{self.command} {self.path}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """URL of a directory on the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Handler.requests.clear()
    yield f"http://127.0.0.1:{server.server_port}/a place"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["obstore", "fsspec"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each of the two implementations in turn."""
    name: str = request.param
    return name


def reader(url: str, **options: Any) -> Any:
    """Open a read-only backend, as the framework does."""
    context = BackendContext("remote", namespace(), 64 * 1024, None)
    return tierkv_fsspec.READ_ONLY_PLUGIN.open(context, FsspecOptions(url=url, **options))


def test_frames_of_other_engines_are_read(served: str, implementation: str, tmp_path: Path) -> None:
    """Any web server may publish a directory or bucket that one engine fills, for many readers."""
    writer = open_at(f"file://{tmp_path}/a place")
    put(writer, {key(1): FRAME, key(2): b"x"})
    backend = reader(served, implementation=implementation)
    assert backend.contains([key(1), key(3), key(2)]) == [True, False, True]
    assert get(backend, key(1), key(3), key(2)) == [FRAME, None, b"x"]
    put(writer, {key(3): b"later"})
    assert backend.contains([key(3)]) == [True]
    assert get(backend, key(3)) == [b"later"]
    (too_long,) = get(backend, key(1), buffer_bytes=100)
    assert isinstance(too_long, BackendError)
    assert {request.split()[0] for request in Handler.requests} <= {"GET", "HEAD", "PROPFIND"}
    backend.close()
    writer.close()


def test_place_that_is_still_empty(served: str, implementation: str, tmp_path: Path) -> None:
    """A reader may start before the first writer: all chunks are misses until then."""
    backend = reader(served, implementation=implementation)
    assert backend.contains([key(1)]) == [False]
    assert get(backend, key(1)) == [None]
    writer = open_at(f"file://{tmp_path}/a place")
    put(writer, {key(1): FRAME})
    assert get(backend, key(1)) == [FRAME]
    backend.close()
    writer.close()


def test_foreign_manifest_is_refused(served: str, implementation: str, tmp_path: Path) -> None:
    """A reader compares the manifest as a writer does."""
    file = tmp_path / "a place" / namespace().fingerprint().hex() / "namespace.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(NamespaceMismatchError, match="not a manifest"):
        reader(served, implementation=implementation)


def test_absent_server(implementation: str) -> None:
    """An absent server is reported at open and at check, with a fix."""
    nowhere = {"url": "http://127.0.0.1:9/x", "implementation": implementation, "connect_timeout_s": 1.0}
    with pytest.raises(BackendUnavailableError, match="no connection"):
        reader(**nowhere)
    assert tierkv_fsspec.READ_ONLY_PLUGIN.check is not None
    check_results = {f.subject: f for f in tierkv_fsspec.READ_ONLY_PLUGIN.check(FsspecOptions(**nowhere), None)}
    assert not check_results["access"].ok
    assert check_results["access"].fix


def test_http_is_not_for_writers(served: str) -> None:
    """A tier whose writes all fail would be taken out of service for reads as well: refused at open."""
    with pytest.raises(BackendError, match="fsspec-read-only"):
        open_at(served)
    assert "fsspec-read-only" in check(served)["write"].fix


def test_check_of_a_reader(served: str, implementation: str, tmp_path: Path) -> None:
    """The check reports the implementation, and writes nothing."""
    assert tierkv_fsspec.READ_ONLY_PLUGIN.check is not None
    options = FsspecOptions(url=served, implementation=implementation)  # type: ignore[arg-type]  # one of the two
    check_results = {
        check_result.subject: check_result for check_result in tierkv_fsspec.READ_ONLY_PLUGIN.check(options, None)
    }
    assert all(check_result.ok for check_result in check_results.values())
    assert "write" not in check_results
    assert ("obstore" in check_results["package"].detail) == (implementation == "obstore")
    assert list(tmp_path.iterdir()) == []


def test_reader_of_a_directory_changes_nothing(tmp_path: Path) -> None:
    """The share may be mounted read-only, and belongs to others: no manifest, no removal, no directory."""
    backend = reader(f"file://{tmp_path}/place")
    assert backend.contains([key(1)]) == [False]
    backend.close()
    assert list(tmp_path.iterdir()) == []
    writer = open_at(f"file://{tmp_path}/place")
    put(writer, {key(1): FRAME})
    writer.close()
    backend = reader(f"file://{tmp_path}/place")
    assert get(backend, key(1)) == [FRAME]
    backend.close()
    assert (tmp_path / "place" / object_name(key(1))).is_file()


class TestReadOnly(BackendConformance):
    """The contract's part for read-only backends."""

    plugin = tierkv_fsspec.READ_ONLY_PLUGIN

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"file://{place}")
