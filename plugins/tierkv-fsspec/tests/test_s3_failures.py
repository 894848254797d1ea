"""An S3 server that refuses, hangs, disappears and returns, through both implementations."""

from __future__ import annotations

import contextlib
import gc
import mmap
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec_support import S3Server, check, get, key, names, object_name, open_at, put

from tierkv.abc import ReadRequest, WriteRequest
from tierkv.errors import (
    BackendError,
    BackendUnavailableError,
    DeadlineExceededError,
    OutOfSpaceError,
    TierKVError,
)
from tierkv_fsspec import FsspecOptions
from tierkv_fsspec.failures import Failure, FailureKind
from tierkv_fsspec.stores.fsspec_store import NAME_S
from tierkv_fsspec.stores.selection import choose_store

FRAME = bytes(range(256)) * 200


def test_server_disappears_and_returns(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """An outage is a retryable error for each key; afterwards the same backend works."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME})
    s3.stop()
    try:
        failures = [
            *get(backend, key(1), key(2)),
            *put(backend, {key(3): FRAME, key(4): FRAME}),
            *backend.delete([key(1), key(2)]),
            *backend.contains([key(1), key(2)]),
        ]
        assert [type(failure) for failure in failures] == [BackendUnavailableError] * 8
        assert all(failure.retryable and failure.tier == "remote" and url in str(failure) for failure in failures)
        assert [failure.key for failure in failures] == [key(n) for n in (1, 2, 3, 4, 1, 2, 1, 2)]
        with pytest.raises(BackendUnavailableError, match="endpoint_url"):
            open_at(url, **options)
        found = check(url, **options)
        assert not found["access"].ok
        assert "endpoint_url" in found["access"].fix
    finally:
        s3.start()
    assert get(backend, key(1), key(3)) == [FRAME, None]
    assert put(backend, {key(3): FRAME}) == [None]
    assert backend.contains([key(3)]) == [True]
    backend.close()


def test_a_server_that_moves_to_another_address_is_found(
    s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of services in clusters lead elsewhere after a restart. A client kept the address for ten seconds."""
    look_up, address = socket.getaddrinfo, ["127.0.0.1"]

    def look_up_elsewhere(host: Any, *arguments: Any, **more: Any) -> Any:
        return look_up(address[0] if host in ("localhost", b"localhost") else host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_elsewhere)
    endpoint = s3.endpoint.replace("127.0.0.1", "localhost")
    backend = open_at(url, implementation="fsspec", endpoint_url=endpoint, warm_up_keys_max=0)
    put(backend, {key(1): FRAME})
    s3.stop()  # and with it the connections that are open
    s3.start()
    address[0] = "127.0.0.2"
    time.sleep(NAME_S + 0.1)
    (failure,) = get(backend, key(1))
    assert isinstance(failure, BackendUnavailableError), "the name was not looked up again"
    address[0] = "127.0.0.1"
    time.sleep(NAME_S + 0.1)
    assert get(backend, key(1)) == [FRAME]
    backend.close()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in taken:
        connection.close()


def test_server_that_hangs(url: str, options: dict[str, Any]) -> None:
    """A server that accepts connections and never answers must cost the timeout, and be named."""
    with silent_server() as endpoint:
        slow = options | {"endpoint_url": endpoint, "read_timeout_s": 0.2}
        with pytest.raises(DeadlineExceededError, match="read_timeout_s"):
            open_at(url, **slow)
        assert "no answer in time" in check(url, **slow)["access"].detail


def test_a_write_that_waits_for_permission_ends(url: str, options: dict[str, Any]) -> None:
    """s3fs asks whether it may send the body (``Expect: 100-continue``), and waits without end for the answer: a server
    that hung for a while kept the tier's threads, and the tier out of service, until a restart."""
    with silent_server() as endpoint:
        slow = options | {"endpoint_url": endpoint, "connect_timeout_s": 0.2, "read_timeout_s": 0.2}
        store = choose_store(FsspecOptions(url=url, **slow)).open(FsspecOptions(url=url).location)
        with pytest.raises(Exception) as failure:  # noqa: PT011 - any error of a library; its kind is judged
            store.write("object", memoryview(FRAME))
        assert Failure.of(failure.value).kind is FailureKind.LATE
        store.close()


def test_a_listing_may_take_longer_than_a_request(s3: S3Server, url: str) -> None:
    """A folder of many objects is listed in many requests: the bound of one must not end it."""
    at = FsspecOptions(url=url, endpoint_url=s3.endpoint, implementation="fsspec")
    store = choose_store(at).open(at.location)
    store.write("ab/object", memoryview(FRAME))
    store._call_s = 1e-6
    with pytest.raises(Exception) as failure:  # noqa: PT011 - any error of a library; its kind is judged
        store.exists("ab/object")
    assert Failure.of(failure.value).kind is FailureKind.LATE
    assert [listed.name for some in store.list_objects() for listed in some] == ["ab/object"]
    store.close()


def test_bucket_that_does_not_exist(options: dict[str, Any]) -> None:
    """The most common mistake: reported at open and at check, by name, with the fix; no bucket is created."""
    url = "s3://tierkv-no-such-bucket/prefix"
    with pytest.raises(BackendError, match="no such bucket") as failure:
        open_at(url, **options)
    assert url in str(failure.value)
    assert "create the bucket" in str(failure.value).lower()
    found = check(url, **options)
    assert "no such bucket" in found["access"].detail
    with pytest.raises(BackendError, match="no such bucket"):
        open_at(url, **options)


def test_bucket_removed_under_the_tier(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Reads are misses or errors, writes are errors, and the bucket is not created again without its owner."""
    backend = open_at(url, **options)
    bucket = url.split("/")[2]
    s3.client.delete_object(Bucket=bucket, Key=names(s3, url)[0])
    s3.client.delete_bucket(Bucket=bucket)
    (result,) = put(backend, {key(1): FRAME})
    assert isinstance(result, BackendError)
    assert "no such bucket" in str(result)
    assert get(backend, key(1)) == [None]
    assert bucket not in [entry["Name"] for entry in s3.client.list_buckets()["Buckets"]]
    backend.close()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("503 Slow Down", BackendUnavailableError),
        ("500 Internal Server Error", BackendUnavailableError),
        ("403 Forbidden", BackendError),
        ("507 Insufficient Storage", OutOfSpaceError),
    ],
)
def test_failure_of_one_object_is_its_own(
    s3: S3Server, url: str, options: dict[str, Any], status: str, kind: type[TierKVError]
) -> None:
    """One bad object must not fail its batch."""
    backend = open_at(url, **options)
    put(backend, {key(n): FRAME for n in (1, 2, 3)})
    s3.refuse[object_name(key(2))] = status
    try:
        probes = backend.contains([key(1), key(2), key(3), key(4)])
        reads = get(backend, key(1), key(2), key(3))
        writes = put(backend, {key(n): b"new" for n in (1, 2, 3)})
    finally:
        s3.refuse.clear()
    assert (reads[0], reads[2]) == (FRAME, FRAME)
    assert (writes[0], writes[2]) == (None, None)
    assert (probes[0], probes[2], probes[3]) == (True, True, False)
    for failure in (probes[1], reads[1], writes[1]):
        assert type(failure) is kind
        assert failure.key == key(2)
        assert object_name(key(2)) in str(failure)
    assert get(backend, key(1), key(2), key(3)) == [b"new", FRAME, b"new"]
    backend.close()


def test_a_wrong_clock_is_named(s3: S3Server, url: str) -> None:
    """The server refuses signatures of another time with the status for lacking rights, and rights are no cure."""
    backend = open_at(url, endpoint_url=s3.endpoint)
    put(backend, {key(1): FRAME})
    s3.refuse[object_name(key(1))] = "403 Forbidden <Error><Code>RequestTimeTooSkewed</Code></Error>"
    try:
        (failure,) = get(backend, key(1))
    finally:
        s3.refuse.clear()
    assert "Set the clock" in str(failure)
    backend.close()


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        ("301 Moved Permanently <Error><Code>PermanentRedirect</Code></Error>", "Set region"),
        ("400 Bad Request <Error><Code>ExpiredToken</Code></Error>", "expired|Correct or renew"),
        ("403 Forbidden <Error><Code>RequestTimeTooSkewed</Code></Error>", "clock"),
    ],
)
def test_a_refusal_names_its_fix_whatever_the_request(
    s3: S3Server, url: str, options: dict[str, Any], status: str, fix: str
) -> None:
    """Lookups are HEAD, whose answers have a status alone, and the reason in the log is often that of a lookup."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME})
    s3.refuse[object_name(key(1))] = status
    try:
        failures = [*backend.contains([key(1)]), *get(backend, key(1)), *put(backend, {key(1): FRAME})]
    finally:
        s3.refuse.clear()
    for failure in failures:
        assert isinstance(failure, BackendError)
        assert re.search(fix, str(failure)), failure
    backend.close()


def test_an_answer_without_length_names_its_fix(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a proxy that compresses or sends pieces: obstore refuses them, with no word of what accepts them."""
    backend = open_at(url, endpoint_url=s3.endpoint, implementation="obstore")
    other = open_at(url, endpoint_url=s3.endpoint, implementation="fsspec")
    assert put(backend, {key(1): FRAME}) == [None]
    answer = s3._answer

    def without_length(path: str, environ: dict[str, Any], start_response: Any) -> Any:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            return start_response(status, [each for each in headers if each[0].lower() != "content-length"], *more)

        return iter(list(answer(path, environ, start if environ["REQUEST_METHOD"] == "GET" else start_response)))

    monkeypatch.setattr(s3, "_answer", without_length)
    (failure,) = get(backend, key(1))
    assert 'set implementation = "fsspec"' in str(failure)
    assert get(other, key(1)) == [FRAME]
    monkeypatch.undo()
    assert get(backend, key(1)) == [FRAME]
    backend.close()
    other.close()


def test_no_view_of_a_buffer_remains(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """A library's exception in a reference cycle must not keep the arena mapped until the next garbage collection."""
    backend = open_at(url, **options)
    buffer = mmap.mmap(-1, 4096)
    gc.disable()
    try:
        backend.write([WriteRequest(key(1), memoryview(buffer))])
        backend.read_into([ReadRequest(key(2), memoryview(buffer))])
        s3.refuse[object_name(key(1))] = "403 Forbidden"
        backend.write([WriteRequest(key(1), memoryview(buffer))])
        backend.read_into([ReadRequest(key(1), memoryview(buffer))])
        buffer.close()  # BufferError while any view exists
    finally:
        gc.enable()
        s3.refuse.clear()
    backend.close()
