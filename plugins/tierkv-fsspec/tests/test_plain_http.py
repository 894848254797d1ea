"""Objects that are received into the caller's buffer over plain HTTP; any answer but a success is left to obstore."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from fsspec_support import S3Server, check, get, key, object_name, open_at, put

from tierkv.errors import BackendUnavailableError
from tierkv.testing.manual_clock import ManualClock
from tierkv_fsspec.failures import Failure, FailureKind
from tierkv_fsspec.stores import obstore_store
from tierkv_fsspec.stores.plain_http import FALLBACKS_MAX, OBJECT_BYTES_MIN, REST_S, PlainReads
from tierkv_fsspec.stores.store import FailedAnswerError, TooLongError

FRAME = bytes(range(256)) * 200
LENGTH = len(FRAME)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LENGTH + FRAME
OBSTORE = {"implementation": "obstore"}


@pytest.fixture
def _all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "OBJECT_BYTES_MIN", 1)


class Scripted:
    """Server whose connections give the answers of a script, one per request, and close at its end.

    Attributes:
        url: of any object.
        asked: requests per connection.
    """

    def __init__(self, scripts: Sequence[Sequence[bytes]], pause_s: float = 0.0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._scripts = scripts
        self._pause_s = pause_s
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/bucket/name?signature=1"
        self.asked: list[list[bytes]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for script in self._scripts:
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                self.asked.append([])
                with connection:
                    self._answer(connection, script)

    def _answer(self, connection: socket.socket, script: Sequence[bytes]) -> None:
        for answer in script:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                got = connection.recv(4096)
                if not got:
                    return
                request += got
            self.asked[-1].append(request)
            for start in range(0, len(answer), 8192):
                connection.sendall(answer[start : start + 8192])
                time.sleep(self._pause_s)

    def close(self) -> None:
        """Refuse further connections."""
        self._listener.close()


@contextlib.contextmanager
def reading(*scripts: Sequence[bytes], pause_s: float = 0.0, timeout_s: float = 30.0) -> Iterator[tuple[Any, Scripted]]:
    """Function that reads the object of a scripted server, and that server."""
    server = Scripted(scripts, pause_s)
    reads = PlainReads(lambda _: server.url, connect_timeout_s=5.0, read_timeout_s=timeout_s, kept_max=2)
    try:
        yield reads, server
    finally:
        reads.close()
        server.close()


def test_an_object_is_received_on_a_connection_that_is_kept() -> None:
    """A new connection per object costs a round trip, and more where a server is far."""
    with reading([OK, OK, OK]) as (reads, server):
        buffer = bytearray(2 * LENGTH)
        for _ in range(3):
            assert reads.read_into("name", memoryview(buffer)) == LENGTH
            assert buffer[:LENGTH] == FRAME
            buffer[:] = bytes(len(buffer))
        assert [len(requests) for requests in server.asked] == [3]
        assert server.asked[0][0].startswith(b"GET /bucket/name?signature=1 HTTP/1.1\r\n")


def test_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    """Servers close idle connections after some seconds: that is no failure."""
    with reading([OK], [OK]) as (reads, server):
        buffer = memoryview(bytearray(LENGTH))
        assert reads.read_into("name", buffer) == LENGTH
        assert reads.read_into("name", buffer) == LENGTH
        assert buffer == FRAME
        assert [len(requests) for requests in server.asked] == [1, 1]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nabcde",
        OK[:-1000],
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
        b"no answer of HTTP\r\n\r\n",
        b"",
    ],
    ids=["refused", "absent", "redirected", "busy", "a part", "short", "no length", "encoded", "no HTTP", "nothing"],
)
def test_any_other_answer_is_left_to_the_storage_library(answer: bytes) -> None:
    """Expired credentials, redirects, retries, short answers: it knows them. No byte of them is taken for a frame."""
    with reading([answer], [OK]) as (reads, server):
        buffer = memoryview(bytearray(LENGTH))
        assert reads.read_into("name", buffer) is None
        assert reads.read_into("name", buffer) == LENGTH, "the next request has a connection of its own"
        assert buffer == FRAME
        assert len(server.asked) == 2


def test_a_long_error_page_is_not_received() -> None:
    """The storage library held several copies of a page of 100 MB, and asked for it twice."""
    answer = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 100000000\r\n\r\n<html>"
    with reading([answer], [OK]) as (reads, server):
        buffer = memoryview(bytearray(LENGTH))
        with pytest.raises(FailedAnswerError) as raised:
            reads.read_into("name", buffer)
        failure = Failure.of(raised.value)
        assert (failure.kind, failure.detail) == (FailureKind.BUSY, "HTTP 500 status code: 500")
        assert reads.read_into("name", buffer) == LENGTH
        assert len(server.asked) == 2


def test_an_object_that_is_too_long_is_not_received() -> None:
    """An object of another program must not be written over the next chunk."""
    with reading([OK], [OK]) as (reads, _):
        buffer = bytearray(LENGTH - 1)
        with pytest.raises(TooLongError):
            reads.read_into("name", memoryview(buffer))
        assert buffer == bytes(LENGTH - 1)


def test_a_slow_object_ends_in_time() -> None:
    """Each part arrives in time, and the whole does not: the limit is for the request."""
    slow = b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n" + bytes(1 << 20)
    with (
        reading([slow], pause_s=0.01, timeout_s=0.5) as (reads, _),
        pytest.raises(TimeoutError, match=r"within 0\.5 s"),
    ):
        reads.read_into("name", memoryview(bytearray(1 << 20)))


def test_a_silent_server_ends_in_time() -> None:
    """Headers came and nothing since, on a connection that a slow object has used before."""
    silent = b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n"
    with reading([OK, silent, b""], timeout_s=0.3) as (reads, server):
        buffer = memoryview(bytearray(1 << 20))
        assert reads.read_into("name", buffer) == LENGTH
        with pytest.raises(TimeoutError):
            reads.read_into("name", buffer)
        assert len(server.asked) == 1


def test_an_answer_that_ends_its_connection_is_used() -> None:
    """Some servers close after each answer: their objects must not be received twice."""
    closing = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    with reading([closing], [closing]) as (reads, server):
        buffer = memoryview(bytearray(LENGTH))
        for _ in range(2):
            assert reads.read_into("name", buffer) == LENGTH
            assert buffer == FRAME
            buffer[:] = bytes(LENGTH)
        assert [len(requests) for requests in server.asked] == [1, 1]


@pytest.mark.parametrize("length", [0, 1, 100, 8191, 8192, 8193, 20_000])
def test_objects_of_any_length_are_received_whole(length: int) -> None:
    """The first bytes come with the headers, in the client's buffer, the rest from the socket."""
    content = FRAME[:length]
    with reading([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (length, content)] * 2) as (reads, _):
        for _ in range(2):
            buffer = bytearray(LENGTH)
            assert reads.read_into("name", memoryview(buffer)) == length
            assert buffer == content + bytes(LENGTH - length)


def test_a_server_that_is_not_there_is_left_to_the_storage_library() -> None:
    """It says what is wrong, in the words of the other verbs."""
    with reading() as (reads, server):
        server.close()
        assert reads.read_into("name", memoryview(bytearray(LENGTH))) is None


@pytest.mark.usefixtures("_all_lengths")
def test_a_tier_reads_with_signed_urls(s3: S3Server, url: str) -> None:
    """The way is chosen by itself, and used for frames only."""
    backend = open_at(url, **OBSTORE, endpoint_url=s3.endpoint)
    put(backend, {key(n): FRAME for n in range(5)})
    s3.headers.clear()
    assert get(backend, *map(key, range(6))) == [FRAME] * 5 + [None]
    signed = [seen["PATH_INFO"] for seen in s3.headers if "X-Amz-Signature" in seen["QUERY_STRING"]]
    assert [path.rpartition("/")[2] for path in sorted(signed)] == sorted(
        object_name(key(n)).rpartition("/")[2] for n in range(6)
    )
    backend.close()


def refuse_signatures(s3: S3Server, patch: pytest.MonkeyPatch) -> list[str]:
    """Let the server refuse every signed URL. Returns the refused paths; more are added."""
    answer, refused = s3._answer, list[str]()

    def refuse(path: str, environ: dict[str, Any], start_response: Any) -> Any:
        if "X-Amz-Signature" in environ["QUERY_STRING"]:
            refused.append(path)
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        return answer(path, environ, start_response)

    patch.setattr(s3, "_answer", refuse)
    return refused


@pytest.mark.usefixtures("_all_lengths")
def test_a_refused_signature_costs_a_request_and_no_chunk(
    s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials may expire between signing and sending, and some proxies do not pass query parameters on."""
    backend = open_at(url, **OBSTORE, endpoint_url=s3.endpoint)
    put(backend, {key(1): FRAME})
    refused = refuse_signatures(s3, monkeypatch)
    assert get(backend, key(1)) == [FRAME]
    assert len(refused) == 1
    backend.close()


@pytest.mark.usefixtures("_all_lengths")
def test_a_server_that_never_answers_plainly_is_not_asked_twice_for_ever(
    s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a proxy that refuses signed URLs each object cost two requests, and nothing said so. One line does now,
    the second request rests, and another line says that it is no longer needed."""
    clock = ManualClock()
    monkeypatch.setattr(obstore_store, "PlainReads", partial(PlainReads, clock=clock))
    backend = open_at(url, **OBSTORE, endpoint_url=s3.endpoint)
    put(backend, {key(1): FRAME})
    with monkeypatch.context() as patch:
        refused = refuse_signatures(s3, patch)
        for expected in (FALLBACKS_MAX, FALLBACKS_MAX + 1):
            assert [get(backend, key(1)) for _ in range(2 * FALLBACKS_MAX)] == [[FRAME]] * 2 * FALLBACKS_MAX
            assert len(refused) == expected
            clock.now_s += REST_S
    assert [get(backend, key(1)) for _ in range(2)] == [[FRAME]] * 2
    lines = [record.getMessage() for record in caplog.records if "received" in record.getMessage()]
    assert ["status 403" in line for line in lines] == [True, False]
    assert "over plain HTTP again" in lines[1]
    backend.close()


@pytest.mark.usefixtures("_all_lengths")
def test_an_outage_is_the_same_error_as_without(s3: S3Server, url: str) -> None:
    """Users see one message for a server that is down, whatever receives the bytes."""
    backend = open_at(url, **OBSTORE, endpoint_url=s3.endpoint)
    put(backend, {key(1): FRAME})
    assert get(backend, key(1)) == [FRAME]
    s3.stop()
    try:
        (failure,) = get(backend, key(1))
        assert type(failure) is BackendUnavailableError
    finally:
        s3.start()
    assert get(backend, key(1)) == [FRAME]
    backend.close()


def test_check_says_how_objects_are_read(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS, through a proxy and for short objects obstore is the better client."""
    plainly = "received over plain HTTP"
    assert OBJECT_BYTES_MIN == 512 << 10
    assert plainly in check(url, **OBSTORE, endpoint_url=s3.endpoint)["package"].detail
    assert plainly not in check(url, **OBSTORE, endpoint_url="https://127.0.0.1:1")["package"].detail
    assert plainly not in check(url, implementation="fsspec", endpoint_url=s3.endpoint)["package"].detail
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    assert plainly not in check(url, **OBSTORE, endpoint_url=s3.endpoint)["package"].detail
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert plainly in check(url, **OBSTORE, endpoint_url=s3.endpoint)["package"].detail
