"""An S3 server that works, refuses, hangs, goes away and comes back, through both implementations."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from fsspec_support import S3Server, check, get, key, namespace, object_name, open_at, put, run_child

from tierkv.abc import ReadRequest, WriteRequest
from tierkv.errors import (
    BackendError,
    BackendUnavailableError,
    DeadlineExceededError,
    NamespaceMismatchError,
    OutOfSpaceError,
    TierKVError,
)

FRAME = bytes(range(256)) * 200


@pytest.fixture(params=["obstore", "fsspec"])
def options(request: pytest.FixtureRequest, s3: S3Server) -> dict[str, Any]:
    """Options of a tier on the server, once for each implementation."""
    return {
        "endpoint_url": s3.endpoint,
        "implementation": request.param,
        "connect_timeout_s": 2.0,
        "read_timeout_s": 10.0,
    }


@pytest.fixture
def url(s3: S3Server) -> str:
    """A prefix in a bucket of its own."""
    return f"s3://{s3.new_bucket()}/pre/fix"


def names(s3: S3Server, url: str) -> list[str]:
    """All objects in the bucket of ``url``, looked at from outside."""
    listed = s3.client.list_objects_v2(Bucket=url.split("/")[2])
    return [entry["Key"] for entry in listed.get("Contents", [])]


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


def test_server_goes_away_and_comes_back(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """An outage is an error for each key that says it may be tried again; when it is over, the same backend works."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME})
    s3.stop()
    try:
        failures = [
            *get(backend, key(1), key(2)),
            *put(backend, {key(3): FRAME, key(4): FRAME}),
            *backend.delete([key(1), key(2)]),
        ]
        assert [type(failure) for failure in failures] == [BackendUnavailableError] * 6
        assert all(failure.retryable and failure.tier == "remote" and url in str(failure) for failure in failures)
        assert [failure.key for failure in failures] == [key(n) for n in (1, 2, 3, 4, 1, 2)]
        with pytest.raises(BackendUnavailableError):
            backend.contains([key(1), key(2)])
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


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
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
    """A server that takes connections and says nothing is the worst: it must cost the timeout, and be named."""
    with silent_server() as endpoint:
        slow = options | {"endpoint_url": endpoint, "read_timeout_s": 0.2}
        with pytest.raises(DeadlineExceededError, match="read_timeout_s"):
            open_at(url, **slow)
        assert "no answer in time" in check(url, **slow)["access"].detail


def test_bucket_that_does_not_exist(options: dict[str, Any]) -> None:
    """The most common mistake: told at open and at check, by name, with the fix; and no bucket is made."""
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
    """Reads are misses or errors, writes are errors, and the bucket is not made anew behind its owner's back."""
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
    """One bad object must not fail the batch that it is in."""
    backend = open_at(url, **options)
    put(backend, {key(n): FRAME for n in (1, 2, 3)})
    s3.refuse[object_name(key(2))] = status
    try:
        reads = get(backend, key(1), key(2), key(3))
        writes = put(backend, {key(n): b"new" for n in (1, 2, 3)})
    finally:
        s3.refuse.clear()
    assert (reads[0], reads[2]) == (FRAME, FRAME)
    assert (writes[0], writes[2]) == (None, None)
    for failure in (reads[1], writes[1]):
        assert type(failure) is kind
        assert failure.key == key(2)
        assert object_name(key(2)) in str(failure)
    assert get(backend, key(1), key(2), key(3)) == [b"new", FRAME, b"new"]
    backend.close()


def test_no_view_of_a_buffer_is_kept(s3: S3Server, url: str, options: dict[str, Any]) -> None:
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
        buffer.close()  # BufferError while anybody holds a view
    finally:
        gc.enable()
        s3.refuse.clear()
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


# Rights and credentials.

SECRETS = ("AKIATIERKVTESTS00001", "the-secret-of-the-tests")


def make_user(s3: S3Server, monkeypatch: pytest.MonkeyPatch, *actions: str) -> list[str]:
    """Become a user who may do only these; its credentials."""
    iam = boto3.client("iam", endpoint_url=s3.endpoint)
    name = f"user-{uuid.uuid4().hex}"
    iam.create_user(UserName=name)
    if actions:
        statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="tests", PolicyDocument=policy)
    made = iam.create_access_key(UserName=name)["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", made["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", made["SecretAccessKey"])
    return [made["AccessKeyId"], made["SecretAccessKey"]]


def test_bucket_that_refuses(s3: S3Server, url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without rights is told so at open and at check, and no message holds the credentials."""
    secrets = make_user(s3, monkeypatch)
    with s3.enforcing_rights():
        with pytest.raises(BackendError, match="access is refused") as failure:
            open_at(url, **options)
        found = check(url, **options)
    assert "access is refused" in found["access"].detail
    assert "403" in found["access"].detail
    assert "right" in found["access"].fix
    said = [str(failure.value), *(f"{finding}" for finding in found.values())]
    assert not [secret for secret in secrets for text in said if secret in text]
    assert failure.value.__cause__ is None, "the library's own words would be printed with a traceback"


def test_unknown_credentials(s3: S3Server, url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that the server does not know are a refusal, too; they are not shown."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN000000001")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    with s3.enforcing_rights(), pytest.raises(BackendError, match="access is refused") as failure:
        open_at(url, **options)
    assert "AKIAUNKNOWN000000001" not in str(failure.value)
    assert "hush-hush" not in str(failure.value)


def test_user_who_may_only_read(
    s3: S3Server, url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of somebody else's cache: opens, reads, and is refused by key where it writes; check says read-only."""
    owner = open_at(url, **options)
    put(owner, {key(1): FRAME})
    owner.close()
    make_user(s3, monkeypatch, "s3:GetObject", "s3:ListBucket")
    with s3.enforcing_rights():
        backend = open_at(url, **options)
        assert get(backend, key(1)) == [FRAME]
        assert put(backend, {key(1): FRAME}) == [None], "what is there need not be written"
        (result,) = put(backend, {key(1): b"other"})
        found = check(url, **options)
        with pytest.raises(BackendError, match="access is refused"):
            open_at(url, model="another", **options)
        backend.close()
    assert type(result) is BackendError
    assert "access is refused" in str(result)
    assert found["access"].ok
    assert not found["write"].ok
    assert "read_only" in found["write"].fix


def test_check_of_a_good_bucket(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """All is good, it says who serves the URL and where the credentials come from, and it leaves nothing behind."""
    found = check(url, **options)
    assert all(finding.ok for finding in found.values())
    assert ("obstore" if options["implementation"] == "obstore" else "s3fs") in found["package"].detail
    assert "AWS_ACCESS_KEY_ID" in found["credentials"].detail
    assert not [secret for secret in SECRETS if secret in str(found)]
    assert names(s3, url) == []


def test_no_credentials(url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials, and where the machine's role may not be asked for, nobody is asked over the network."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(BackendError, match="no credentials"):
        open_at(url, **options)
    found = check(url, **options)
    assert not found["credentials"].ok
    assert "AWS_EC2_METADATA_DISABLED" in found["credentials"].detail


def test_credentials_in_a_profile(
    s3: S3Server, url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """~/.aws is where people keep credentials; both implementations must find them there."""
    owner = open_at(url, **options)
    put(owner, {key(1): FRAME})
    owner.close()
    key_id, secret = make_user(s3, monkeypatch, "s3:*")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    file.write_text(f"[work]\naws_access_key_id = {key_id}\naws_secret_access_key = {secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "work")
    with s3.enforcing_rights():
        backend = open_at(url, **options)
        assert get(backend, key(1)) == [FRAME]
        assert "'work'" in check(url, **options)["credentials"].detail
        backend.close()
