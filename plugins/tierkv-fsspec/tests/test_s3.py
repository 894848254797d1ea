"""An S3 server that works, through both implementations; troubles and users have files of their own."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from fsspec_support import S3Server, get, key, names, namespace, object_name, open_at, put, run_child

from tierkv.errors import (
    BackendError,
    NamespaceMismatchError,
)

FRAME = bytes(range(256)) * 200

OTHER_PROCESS = """
import sys, json, fsspec_support as s
backend = s.open_at(sys.argv[1], **json.loads(sys.argv[2]))
assert s.get(backend, s.key(1)) == [b"from the first"]
assert s.put(backend, {s.key(2): b"from the second"}) == [None]
backend.delete([s.key(3)])
"""


def test_two_processes_share_a_bucket(url: str, options: dict[str, Any]) -> None:
    """What one process stores is a hit in the other, and what one deletes is a miss, without a reopen."""
    backend = open_at(url, **options)
    put(backend, {key(1): b"from the first", key(3): b"to be deleted"})
    assert backend.contains([key(1), key(2), key(3)]) == [True, False, True]
    run_child(OTHER_PROCESS, url, json.dumps(options))
    assert backend.contains([key(1), key(2), key(3)]) == [True, True, False]
    assert get(backend, key(1), key(2), key(3)) == [b"from the first", b"from the second", None]
    backend.close()


def test_names_are_as_documented(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Other tools clean up and count by prefix: names are part of the format."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME})
    backend.close()
    manifest = f"{namespace().fingerprint().hex()}/namespace.json"
    assert sorted(names(s3, url)) == sorted([f"pre/fix/{manifest}", f"pre/fix/{object_name(key(1))}"])


def test_what_is_there_is_not_uploaded_again(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Several engines compute the same prefix; the upload of the second is a waste. Another frame does replace it."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME, key(2): FRAME})
    s3.requests.clear()
    assert put(backend, {key(1): FRAME}) == [None]
    assert not [request for request in s3.requests if request.startswith("PUT")]
    assert put(backend, {key(1): FRAME[:-1]}) == [None]
    assert put(backend, {key(2): b"x" + FRAME[1:]}) == [None]
    assert get(backend, key(1), key(2)) == [FRAME[:-1], b"x" + FRAME[1:]]
    backend.close()


def test_deleted_out_of_band(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """A lifecycle rule or a person removes objects: misses, at once, and they can be stored again."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME, key(2): FRAME})
    assert backend.contains([key(1), key(2)]) == [True, True]
    s3.client.delete_object(Bucket=url.split("/")[2], Key=f"pre/fix/{object_name(key(1))}")
    assert backend.contains([key(1), key(2)]) == [False, True]
    assert get(backend, key(1), key(2)) == [None, FRAME]
    assert put(backend, {key(1): FRAME}) == [None]
    assert get(backend, key(1)) == [FRAME]
    backend.close()


def test_listings_are_not_remembered(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Some file systems list a directory to learn about one object; what others then delete must be a miss."""
    if options["implementation"] == "obstore":
        pytest.skip("obstore keeps no listings")
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME})
    backend._store._fs.ls(f"{url}/{object_name(key(1))}".rpartition("/")[0])
    s3.client.delete_object(Bucket=url.split("/")[2], Key=f"pre/fix/{object_name(key(1))}")
    assert backend.contains([key(1)]) == [False]
    backend.close()


def test_first_manifest_stays(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Two processes that look at once both find nothing; the second to write must see the first one's manifest."""
    backend = open_at(url, **options)
    store = backend._store
    assert store.create("once", b"first")
    monkey_exists = store.exists
    store.exists = lambda _name: False  # it looked before the other one wrote
    assert not store.create("once", b"second")
    store.exists = monkey_exists
    assert store.read("once") == b"first"
    backend.close()


def test_object_longer_than_the_buffer(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """A foreign object under the name of a chunk must not be cut to fit, nor fail its neighbours."""
    backend = open_at(url, **options)
    put(backend, {key(1): b"one", key(2): b"two"})
    name = f"pre/fix/{object_name(key(1))}"
    s3.client.put_object(Bucket=url.split("/")[2], Key=name, Body=bytes(70_000))
    too_long, fits = get(backend, key(1), key(2))
    assert isinstance(too_long, BackendError)
    assert "70000" in str(too_long)
    assert fits == b"two"
    backend.close()


ODD_PREFIXES = ["", "a b%20c+d", "ü/ñ", "a#b", "a?b", "a*[b]&c=~d", "a'b\"c\\d", "x/" * 20 + "y"]


def test_odd_prefixes_mean_the_same_to_all(s3: S3Server) -> None:
    """Tiers of two machines may use different implementations: each must find what the other stored, under the name
    that stands in the URL.
    """
    bucket = s3.new_bucket()
    for prefix in ODD_PREFIXES:
        url = f"s3://{bucket}/{prefix}".rstrip("/")
        one = open_at(url, endpoint_url=s3.endpoint, implementation="obstore")
        two = open_at(url + "/", endpoint_url=s3.endpoint, implementation="fsspec")
        put(one, {key(1): b"one"})
        put(two, {key(2): b"two"})
        assert get(two, key(1)) == [b"one"], f"prefix {prefix!r}"
        assert get(one, key(2)) == [b"two"], f"prefix {prefix!r}"
        name = "/".join(part for part in (prefix, object_name(key(1))) if part)
        assert s3.client.get_object(Bucket=bucket, Key=name)["Body"].read() == b"one"
        one.close()
        two.close()


@pytest.mark.parametrize("content", [b"{}", b"\xff not json", b'{"format": "tierkv-fsspec", "version": 2}', b""])
def test_foreign_manifest_is_refused_and_kept(s3: S3Server, url: str, options: dict[str, Any], content: bytes) -> None:
    """Data of another program, or of a later version, is not ours to write to."""
    where = {"Bucket": url.split("/")[2], "Key": f"pre/fix/{namespace().fingerprint().hex()}/namespace.json"}
    s3.client.put_object(**where, Body=content)
    with pytest.raises(NamespaceMismatchError, match="another url"):
        open_at(url, **options)
    assert s3.client.get_object(**where)["Body"].read() == content


def test_many_open_at_once(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """All ranks of a server start together: whoever writes the manifest, all of them open."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(6)

    def start() -> None:
        barrier.wait()
        try:
            open_at(url, **options).close()
        except BaseException as error:  # noqa: BLE001  the thread's failure is judged below
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(names(s3, url)) == 1


def test_requests_at_once_are_bounded(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Requests of a batch run side by side, and never more than configured over all calls."""
    backend = open_at(url, concurrent_requests=3, **options)
    s3.in_flight_max = 0
    threads = [threading.Thread(target=backend.contains, args=([key(n) for n in range(8)],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 2 <= s3.in_flight_max <= 3
    backend.close()


def test_closed_backend_says_so(url: str, options: dict[str, Any]) -> None:
    """A call after the close is an error with a name, not a crash of some library."""
    backend = open_at(url, **options)
    backend.close()
    for call in (lambda: get(backend, key(1)), lambda: backend.contains([key(1), key(2)])):
        with pytest.raises(BackendError, match="closed"):
            call()


def test_close_waits_for_nobody_but_a_call_for_its_requests(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Requests in flight write into the caller's buffers: the call may not return before they ended."""
    backend = open_at(url, concurrent_requests=2, **options)
    put(backend, {key(n): FRAME for n in range(8)})
    answers: list[object] = []

    def read() -> None:
        try:
            answers.extend(get(backend, *[key(n) for n in range(8)]))
        except BackendError as error:
            answers.append(error)

    thread = threading.Thread(target=read)
    with s3.held_up():
        s3.in_flight_max = 0
        thread.start()
        while s3.in_flight_max < 2:
            time.sleep(0.01)
        backend.close()
        thread.join(0.2)
        assert thread.is_alive(), "the call returned while requests use its buffers"
    thread.join()
    assert [type(answer) for answer in answers] == [BackendError]
    assert "closed" in str(answers[0])
