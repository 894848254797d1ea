"""Requests to an S3 server, through both implementations; failures and users have their own files."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from fsspec_support import S3Server, get, key, namespace, object_name, open_at, put

from tierkv.errors import BackendError
from tierkv_fsspec.backend import object_name as name_below_namespace
from tierkv_fsspec.presence_hints import ListedNames

FRAME = bytes(range(256)) * 200


def warmed(url: str, options: dict[str, Any], **more: Any) -> Any:
    """Backend whose listing has ended: requests counted from now on belong to the test."""
    backend = open_at(url, **options, **more)
    if backend._warming is not None:
        backend._warming.join(10)
        assert not backend._warming.is_alive()
    return backend


def test_stored_frames_are_not_uploaded_again(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Several engines compute the same prefix; a second upload is a waste. A different frame replaces it."""
    backend = warmed(url, options)
    put(backend, {key(1): FRAME, key(2): FRAME})
    s3.requests.clear()
    assert put(backend, {key(1): FRAME}) == [None]
    assert backend.contains([key(1)]) == [True]
    assert put(backend, {key(1): FRAME}) == [None]
    assert not [request for request in s3.requests if request.startswith("PUT")]
    assert put(backend, {key(1): FRAME[:-1]}) == [None]
    assert put(backend, {key(2): b"x" + FRAME[1:]}) == [None]
    assert get(backend, key(1), key(2)) == [FRAME[:-1], b"x" + FRAME[1:]]
    backend.close()


@pytest.mark.parametrize("verb", ["contains", "read_into"])
def test_absent_frames_are_stored_by_one_request(s3: S3Server, url: str, options: dict[str, Any], verb: str) -> None:
    """Engines look up before they compute and store: a second lookup would be the third request for a chunk."""
    backend = warmed(url, options)
    keys = [key(number) for number in range(4)]
    if verb == "contains":
        assert backend.contains(keys) == [False] * 4
    else:
        assert get(backend, *keys) == [None] * 4
    s3.requests.clear()
    assert put(backend, dict.fromkeys(keys, FRAME)) == [None] * 4
    assert [request.split()[0] for request in s3.requests] == ["PUT"] * 4
    assert get(backend, *keys) == [FRAME] * 4
    backend.close()


def test_conditions_travel(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Without the header the server would accept the second of two writers, and the upload would go unnoticed."""
    backend = warmed(url, options)
    backend.contains([key(1)])
    s3.headers.clear()
    put(backend, {key(1): FRAME})
    assert [headers.get("HTTP_IF_NONE_MATCH") for headers in s3.headers] == ["*"]
    backend.close()


@pytest.mark.parametrize(
    "status",
    ["412 Precondition Failed", "409 Conflict <Error><Code>ConditionalRequestConflict</Code></Error>"],
    ids=["Ceph", "AWS, while another writer is not done"],
)
def test_refused_condition_without_an_explanation(s3: S3Server, url: str, options: dict[str, Any], status: str) -> None:
    """Ceph refuses with a bare status, AWS with an explanation: both mean that the name exists."""
    backend = open_at(url, **options)
    s3.refuse["/taken"] = status
    try:
        assert not backend._store.create("taken", FRAME)
    finally:
        s3.refuse.clear()
    backend.close()


def test_server_without_conditions(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Some S3 servers answer 501 to the header: from then on a lookup precedes each put, and nothing fails."""
    backend = open_at(url, **options)
    s3.refuse_conditions = True
    try:
        backend.contains([key(1)])
        assert put(backend, {key(1): FRAME}) == [None]
        assert get(backend, key(1)) == [FRAME]
        assert not backend._store.create(name_below_namespace(key(1)), FRAME)
    finally:
        s3.refuse_conditions = False
    backend.close()


def test_storage_class_and_tags_travel(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Lifecycle rules select by them; both ways to store an object must set them."""
    tags = {"owner": "team a", "kind": "kv:cache"}
    backend = open_at(url, storage_class="STANDARD_IA", tags=tags, **options)
    backend.contains([key(1)])
    put(backend, {key(1): FRAME, key(2): FRAME})
    for number in (1, 2):
        where = {"Bucket": url.split("/")[2], "Key": f"pre/fix/{object_name(key(number))}"}
        assert s3.client.head_object(**where)["StorageClass"] == "STANDARD_IA"
        found = s3.client.get_object_tagging(**where)["TagSet"]
        assert {tag["Key"]: tag["Value"] for tag in found} == tags
    backend.close()


def test_listing_is_bounded(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """A bucket may hold millions of chunks: memory holds up to the configured number; 0 requests none."""
    backend = warmed(url, options)
    keys = [key(number) for number in range(30)]
    put(backend, dict.fromkeys(keys, b"x"))
    backend.close()
    for keys_max, listed in ((0, 0), (7, 7), (100, 30)):
        s3.requests.clear()
        backend = warmed(url, options, warm_up_keys_max=keys_max)
        assert len(backend._listed) == listed
        listings = [line for line in s3.requests if line.rstrip("/").endswith(url.split("/")[2])]
        assert bool(listings) == (keys_max > 0)
        s3.requests.clear()
        assert backend.contains(keys) == [True] * 30
        assert len(s3.requests) == 30 - listed
        backend.close()


def test_without_a_thread_nothing_is_listed(url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of threads the tier opens all the same, and its first lookups are sent to the server."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("tierkv-"):  # the server has a thread for each connection
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        backend = open_at(url, **options)
    assert put(backend, {key(1): FRAME}) == [None]
    assert backend.contains([key(1), key(2)]) == [True, False]
    assert get(backend, key(1)) == [FRAME]
    backend.close()


def test_listing_that_is_refused_changes_nothing(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Permission to read objects may come without permission to list them: then each is looked up."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME})
    backend.close()
    s3.refuse[f"/{url.split('/')[2]}"] = "403 Forbidden"
    s3.refuse[f"/{url.split('/')[2]}/"] = "403 Forbidden"
    try:
        backend = warmed(url, options)
        assert len(backend._listed) == 0
        assert backend.contains([key(1)]) == [True]
        backend.close()
    finally:
        s3.refuse.clear()


def test_listing_does_not_restore_deleted_names(url: str, options: dict[str, Any]) -> None:
    """A page of a listing may be older than a deletion by this process: the chunk must not seem present."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME, key(2): FRAME})
    backend.close()
    backend = open_at(url, warm_up_keys_max=0, **options)
    pages = list(backend._store.list_names())
    backend._listed = ListedNames(100, 10.0)
    backend.delete([key(1)])
    backend._listed.add_pages(pages)
    assert backend.contains([key(1), key(2)]) == [False, True]
    backend.close()


def test_listings_are_not_cached(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Some file systems list a directory to look up one object; objects that others then delete must be misses."""
    if options["implementation"] == "obstore":
        pytest.skip("obstore keeps no listings")
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME})
    backend._store.present._fs.ls(f"{url}/{object_name(key(1))}".rpartition("/")[0])
    s3.client.delete_object(Bucket=url.split("/")[2], Key=f"pre/fix/{object_name(key(1))}")
    assert backend.contains([key(1)]) == [False]
    backend.close()


def test_object_longer_than_the_buffer(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """A foreign object under the name of a chunk must not be truncated, nor fail its neighbours."""
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
    """Tiers of two machines may use different implementations: each must find the other's objects, under the
    name in the URL.
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


@pytest.mark.parametrize("implementation", ["obstore", "fsspec"])
def test_an_endless_manifest_is_not_fetched(s3: S3Server, implementation: str) -> None:
    """A user who can write to the bucket must not fill the memory of every engine that starts."""
    bucket = s3.new_bucket()
    name = f"{namespace().fingerprint().hex()}/namespace.json"
    s3.client.put_object(Bucket=bucket, Key=name, Body=bytes(3 << 20))
    open_at(f"s3://{bucket}", endpoint_url=s3.endpoint, implementation=implementation).close()
    assert s3.client.head_object(Bucket=bucket, Key=name)["ContentLength"] < 1 << 12, "it was written anew"


def test_requests_at_once_are_bounded(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Requests of a batch run side by side, up to the configured number over all calls."""
    backend = open_at(url, concurrent_requests=3, warm_up_keys_max=0, **options)
    s3.in_flight_max = 0
    threads = [threading.Thread(target=backend.contains, args=([key(n) for n in range(8)],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 2 <= s3.in_flight_max <= 3
    backend.close()


def test_closed_backend_is_named(url: str, options: dict[str, Any]) -> None:
    """A call after the close is an error that names the tier, not a crash of a library."""
    backend = open_at(url, **options)
    backend.close()
    for call in (lambda: get(backend, key(1)), lambda: backend.contains([key(1), key(2)])):
        with pytest.raises(BackendError, match="closed"):
            call()


def test_close_does_not_wait_but_a_call_waits_for_its_requests(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """Requests in flight write into the caller's buffers: the call must not return before they end."""
    backend = open_at(url, concurrent_requests=2, warm_up_keys_max=0, **options)
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
