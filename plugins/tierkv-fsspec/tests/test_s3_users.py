"""Permissions in a bucket, and sources of credentials, through both implementations."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import boto3
import pytest
from fsspec_support import S3Server, check, get, key, names, open_at, put

from tierkv.errors import (
    BackendError,
)

FRAME = bytes(range(256)) * 200

SECRETS = ("AKIATIERKVTESTS00001", "the-secret-of-the-tests")


def make_user(s3: S3Server, monkeypatch: pytest.MonkeyPatch, *actions: str) -> list[str]:
    """Switch to a user with only these permissions. Returns its credentials."""
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
    """Missing permissions are reported at open and at check, and no message holds the credentials."""
    secrets = make_user(s3, monkeypatch)
    with s3.enforcing_rights():
        with pytest.raises(BackendError, match="access is refused") as failure:
            open_at(url, **options)
        found = check(url, **options)
    assert "access is refused" in found["access"].detail
    assert "403" in found["access"].detail
    assert "the right to list, read, write and delete" in found["access"].fix
    assert "lifecycle" not in found, "its rules would be refused as well, in more lines"
    texts = [str(failure.value), *(f"{check_result}" for check_result in found.values())]
    assert not [secret for secret in secrets for text in texts if secret in text]
    assert failure.value.__cause__ is None, "the library's own text would be printed with a traceback"


@pytest.mark.parametrize("known", [True, False])
def test_wrong_credentials_are_no_outage(
    s3: S3Server, url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """A key that the server does not know, and a wrong secret of one that it does: named as such, and not shown."""
    user = make_user(s3, monkeypatch, "s3:*")[0] if known else "AKIAUNKNOWN000000001"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", user)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    with s3.enforcing_rights():
        with pytest.raises(BackendError, match="the credentials are wrong") as failure:
            open_at(url, **options)
        found = check(url, **options)["access"]
    assert type(failure.value) is BackendError, "another kind would be tried again as an outage"
    assert not found.ok
    assert found.detail.startswith("the credentials are wrong (HTTP 403 ")
    assert "correct or renew them" in found.fix
    assert not [text for text in (str(failure.value), f"{found}") if user in text or "hush-hush" in text]


def test_user_who_may_only_read(
    s3: S3Server, url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of another user's cache opens, reads, and is refused by key on writes; check reports read-only."""
    owner = open_at(url, **options)
    put(owner, {key(1): FRAME})
    owner.close()
    make_user(s3, monkeypatch, "s3:GetObject", "s3:ListBucket")
    with s3.enforcing_rights():
        backend = open_at(url, **options)
        assert get(backend, key(1)) == [FRAME]
        assert put(backend, {key(1): FRAME}) == [None], "a stored frame need not be written"
        (result,) = put(backend, {key(1): b"other"})
        found = check(url, **options)
        with pytest.raises(BackendError, match="access is refused"):
            open_at(url, model="another", **options)
        backend.close()
    assert type(result) is BackendError
    assert "access is refused" in str(result)
    assert found["access"].ok
    assert not found["write"].ok
    assert "fsspec-read-only" in found["write"].fix


def test_check_of_a_good_bucket(s3: S3Server, url: str, options: dict[str, Any]) -> None:
    """All results are good, name implementation and source of credentials, and no object remains."""
    found = check(url, **options)
    assert all(check_result.ok for check_result in found.values())
    assert ("obstore" if options["implementation"] == "obstore" else "s3fs") in found["package"].detail
    assert "AWS_ACCESS_KEY_ID" in found["credentials"].detail
    assert not [secret for secret in SECRETS if secret in str(found)]
    assert names(s3, url) == []


def test_no_credentials(url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials, and if the machine's role may not be requested, no request is sent."""
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
    """Users keep credentials in ~/.aws; both implementations must find them there."""
    owner = open_at(url, **options)
    put(owner, {key(1): FRAME})
    owner.close()
    key_id, secret = make_user(s3, monkeypatch, "s3:*")
    write_profile(tmp_path / "credentials", monkeypatch, key_id, secret)
    with s3.enforcing_rights():
        backend = open_at(url, **options)
        assert get(backend, key(1)) == [FRAME]
        assert "'work'" in check(url, **options)["credentials"].detail
        backend.close()


def write_profile(file: Path, monkeypatch: pytest.MonkeyPatch, key_id: str, secret: str) -> None:
    """Let credentials be those of a profile in a file, and not of the environment."""
    file.write_text(f"[work]\naws_access_key_id = {key_id}\naws_secret_access_key = {secret}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "work")


def test_credentials_that_are_replaced_in_a_file_cost_no_hit(
    s3: S3Server, url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Short-lived credentials are written to the file again and again: an engine must not need a restart for each."""
    first = make_user(s3, monkeypatch, "s3:*")
    second = make_user(s3, monkeypatch, "s3:*")
    users = boto3.client("iam", endpoint_url=s3.endpoint)
    file = tmp_path / "credentials"
    write_profile(file, monkeypatch, *first)
    backend = open_at(url, **options)
    frames = {key(number): FRAME for number in range(8)}
    put(backend, frames)
    file.write_text(file.read_text().replace(first[0], second[0]).replace(first[1], second[1]))
    users.delete_access_key(
        UserName=users.get_access_key_last_used(AccessKeyId=first[0])["UserName"], AccessKeyId=first[0]
    )
    with s3.enforcing_rights():
        assert get(backend, *frames) == [FRAME] * 8
        assert backend.contains([*frames, key(99)]) == [True] * 8 + [False]
        assert put(backend, {key(9): FRAME}) == [None]
    backend.close()
