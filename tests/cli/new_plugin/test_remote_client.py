"""The remote template of ``tierkv new-plugin`` on answers that its own test server never gives."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from filled_stores import model_namespace

from tierkv.abc import BackendContext, ReadRequest, WriteRequest
from tierkv.cli.new_plugin import rendered
from tierkv.errors import BackendUnavailableError, OutOfSpaceError
from tierkv.testing.frames import make_frame
from tierkv.types.keys import make_key

KEY = make_key(b"a chunk", 0)
FRAME = make_frame(b"a chunk", 0, 3000)


class Answers(BaseHTTPRequestHandler):
    """Answers as the test sets them."""

    protocol_version = "HTTP/1.1"
    put_status = 201
    pieces: tuple[bytes, ...] = ()
    ends = True

    def do_HEAD(self) -> None:
        self._answer(404)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.put_status)

    def do_GET(self) -> None:
        """Send a value in pieces, without a length."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in self.pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if self.ends:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = not self.ends

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def answers() -> type[Answers]:
    """Answers of this test's server."""
    return type("TheseAnswers", (Answers,), {})


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: type[Answers]) -> Iterator[Any]:
    """The generated backend on a server of this test."""
    for path, text in rendered("by-hand", "remote").items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    package = importlib.import_module("tierkv_by_hand")
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    options = package.PLUGIN.options(url=f"http://127.0.0.1:{server.server_port}/values")
    opened = package.PLUGIN.open(BackendContext("values", model_namespace(), 4096, None), options)
    yield opened
    opened.close()
    server.shutdown()
    server.server_close()
    thread.join()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tierkv_by_hand"]:
        del sys.modules[name]


def read(backend: Any, room: int = 4096) -> tuple[object, bytes]:
    """Result of a read of one chunk, and the buffer."""
    buffer = bytearray(room)
    (result,) = backend.read_into([ReadRequest(KEY, memoryview(buffer))])
    return result, bytes(buffer)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (507, OutOfSpaceError),
        (429, BackendUnavailableError),
        (503, BackendUnavailableError),
        (404, BackendUnavailableError),
    ],
)
def test_a_refused_write_is_no_stored_chunk(
    backend: Any, answers: type[Answers], status: int, error: type[Exception]
) -> None:
    """A full server is no broken one: its chunks are still read. A folder that is gone answers 404 to a write, which
    counted as stored."""
    answers.put_status = status
    (result,) = backend.write([WriteRequest(KEY, memoryview(FRAME))])
    assert type(result) is error
    assert f"HTTP {status}" in str(result)


def test_a_write_may_be_answered_as_created(backend: Any) -> None:
    """Most servers of files answer 201 to a new one. That was an error, and no chunk was stored."""
    assert backend.write([WriteRequest(KEY, memoryview(FRAME))]) == [None]


def test_a_value_may_come_without_its_length(backend: Any, answers: type[Answers]) -> None:
    """A proxy that compresses or filters sends pieces. That was read as a value of no bytes: a damaged chunk, which
    would be deleted."""
    answers.pieces = (FRAME[:1000], FRAME[1000:])
    assert read(backend) == (3000, FRAME + bytes(1096))
    assert read(backend, 3000) == (3000, FRAME), "and the connection can be used again"


def test_a_value_in_pieces_is_whole_or_an_error(backend: Any, answers: type[Answers]) -> None:
    """One that is longer than a frame, or ends early."""
    answers.pieces = (FRAME, bytes(1097))
    assert "more bytes" in str(read(backend)[0])
    answers.pieces, answers.ends = (FRAME[:1000],), False
    assert isinstance(read(backend)[0], OSError)
