"""The plugin as users see it: options, packages to install, discovery, and messages without credentials."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec_support import check, get, key, open_at, put

from tierkv.config.tier_schema import TierConfig
from tierkv.errors import BackendError
from tierkv_fsspec import FsspecOptions
from tierkv_fsspec.failures import Failure, FailureKind, hide_secrets
from tierkv_fsspec.options import Location


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "s3://bucket/prefix"),
        ({"url": "bucket/prefix"}, "s3://bucket/prefix"),
        ({"url": "./relative"}, "absolute path"),
        ({"url": "file://relative/path"}, "absolute path"),
        ({"url": "file:///"}, "absolute path"),
        ({"url": "s4://bucket"}, "unknown scheme 's4' .did you mean 's3'"),
        ({"url": "s3://"}, "no bucket"),
        ({"url": "s3:///prefix"}, "empty parts|no bucket"),
        ({"url": "s3://bucket//prefix"}, "empty parts"),
        ({"url": "s3://bucket/a/../b"}, "'..'"),
        ({"url": "s3://bucket/a\nb"}, "control characters"),
        ({"url": "simplecache::s3://bucket"}, "chained"),
        ({"url": "s3://AKIA123:secret@bucket/prefix"}, "no credentials in URLs"),
        ({"url": "s3://b", "endpoint_url": "localhost:9000"}, "endpoint_url = 'localhost:9000': give http"),
        ({"url": "s3://b", "endpoint_url": "http://user:pass@host"}, "endpoint_url: no credentials"),
        ({"url": "file:///tmp/x", "endpoint_url": "http://host"}, "endpoint_url: only for s3"),
        ({"url": "gs://b", "region": "eu"}, "region: only for s3"),
        ({"url": "s3://b", "connect_timeout_s": 0.0}, "connect_timeout_s = 0.0: give seconds above 0"),
        ({"url": "s3://b", "read_timeout_s": float("inf")}, "read_timeout_s = inf: give seconds above 0"),
        ({"url": "s3://b", "concurrent_requests": 0}, "concurrent_requests = 0: give 1 to 256"),
        ({"url": "s3://b", "implementation": "boto"}, 'implementation = .boto.: allowed are "auto"'),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    """A typing error in the configuration must stop the start, with the option, its value and the allowed values."""
    with pytest.raises(ValueError, match=message) as failure:
        FsspecOptions(**options)
    assert "secret" not in str(failure.value).replace("AWS_SECRET_ACCESS_KEY", "")


@pytest.mark.parametrize(
    "name",
    ["key", "secret", "token", "password", "aws_secret_access_key", "aws_access_key_id", "account_key", "sas_token"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_credentials_in_the_configuration_are_refused(name: str, nested: bool) -> None:
    """Configuration files are committed, mailed and logged; the message names the usual chains."""
    options = {"client_kwargs": {name: "hush-hush"}} if nested else {name: "hush-hush"}
    with pytest.raises(ValueError, match=rf"storage_options\.(client_kwargs\.)?{name}.*AWS_ACCESS_KEY_ID") as failure:
        FsspecOptions(url="s3://bucket", storage_options=options)
    assert "hush-hush" not in str(failure.value)


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint_url": "http://10.0.0.7:9000"},
        {"anon": True},
        {"client_kwargs": {"region_name": "eu-central-1", "verify": False}},
        {"config_kwargs": {"signature_version": "s3v4", "s3": {"addressing_style": "path"}}},
        {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/x"}},
    ],
)
def test_harmless_storage_options_are_accepted(options: dict[str, Any]) -> None:
    """The search for credentials must not refuse ordinary settings."""
    assert FsspecOptions(url="s3://bucket", storage_options=options).storage_options == options


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", ("s3", "bucket", "")),
        ("s3a://bucket/a/b/", ("s3", "bucket", "a/b")),
        ("gcs://bucket/a", ("gs", "bucket", "a")),
        ("abfs://container/a", ("az", "container", "a")),
        ("/mnt/x/", ("file", "", "/mnt/x")),
        ("local:///mnt/x", ("file", "", "/mnt/x")),
        ("memory://a/b", ("memory", "a", "b")),
    ],
)
def test_urls_mean(url: str, location: tuple[str, str, str]) -> None:
    """Different spellings of a URL are one location."""
    read = Location.parse(url)
    assert (read.protocol, read.bucket, read.prefix) == location
    assert Location.parse(read.url) == read


def test_no_request_outlives_the_deadline_of_its_read_by_default() -> None:
    """A call of a server that hangs keeps its thread. When the server is well again, a trial waits for the thread."""
    assert FsspecOptions(url="s3://bucket").read_timeout_s <= TierConfig(backend="fsspec").read_deadline_s


def test_options_travel_between_processes() -> None:
    """The framework may open a backend in another process than the one that read the configuration."""
    options = FsspecOptions(url="s3://b/c", storage_options={"anon": True})
    assert pickle.loads(pickle.dumps(options)) == options


def test_entry_point_leads_to_the_plugin() -> None:
    """`pip install tierkv-fsspec` and `backend = "fsspec"` must be sufficient."""
    (entry_point,) = importlib.metadata.entry_points(group="tierkv", name="fsspec")
    module = entry_point.load()
    assert module.TIERKV_SPI == 1
    assert [plugin.name for plugin in module.tierkv_backends()] == ["fsspec", "fsspec-read-only"]


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make packages appear not installed."""
    find_spec, get_class = importlib.util.find_spec, fsspec.get_filesystem_class

    def hiding_find_spec(name: str, package: str | None = None) -> object:
        return None if name in packages else find_spec(name, package)

    def hiding_get_class(protocol: str) -> object:
        if protocol == "s3" and "s3fs" in packages:
            raise ImportError("Install s3fs to access S3")
        return get_class(protocol)

    monkeypatch.setattr(importlib.util, "find_spec", hiding_find_spec)
    monkeypatch.setattr(fsspec, "get_filesystem_class", hiding_get_class)


URL = "s3://bucket/prefix"
NOWHERE = "http://127.0.0.1:9"


def served_by(**options: Any) -> str:
    """The check's report on the implementation."""
    return check(URL, endpoint_url=NOWHERE, connect_timeout_s=1.0, read_timeout_s=1.0, **options)["package"].detail


def test_fastest_implementation_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Obstore if it can serve the URL; s3fs if obstore is missing or lacks the options. The reason is named."""
    assert "obstore" in served_by()
    assert "s3fs" in served_by(implementation="fsspec")
    assert "storage_options has use_ssl" in served_by(storage_options={"use_ssl": False})
    hide(monkeypatch, "obstore")
    assert "s3fs" in served_by()
    assert "pip install 'tierkv-fsspec[obstore]'" in served_by()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package for the URL is installed: open and check name the package to install."""
    hide(monkeypatch, "obstore", "s3fs")
    with pytest.raises(BackendError, match=r"pip install 'tierkv-fsspec\[obstore\]'") as failure:
        open_at(URL)
    assert failure.value.tier == "remote"
    found = check(URL)
    assert not found["package"].ok
    assert "tierkv-fsspec[s3]" in found["package"].detail
    with pytest.raises(BackendError, match='implementation = "obstore" cannot be used: not installed'):
        open_at(URL, implementation="obstore")
    with pytest.raises(BackendError, match="gcsfs"):
        open_at("gs://bucket")


def test_profile_without_boto3_is_read_by_s3fs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Obstore reads ~/.aws through boto3 only; without it the credentials there must still be used."""
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = x\naws_secret_access_key = y\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    hide(monkeypatch, "boto3")
    assert "s3fs" in served_by()
    assert "pip install boto3" in served_by()


def test_memory_is_for_trials() -> None:
    """Memory URLs work, and the check reports that they are for trials."""
    url = "memory://tierkv-tests/plugin"
    backend = open_at(url)
    put(backend, {key(1): b"frame"})
    assert get(backend, key(1)) == [b"frame"]
    backend.close()
    assert "ends with the process" in check(url)["durable"].detail


@pytest.mark.parametrize(
    "text",
    [
        "<AWSAccessKeyId>hush-hush</AWSAccessKeyId>",
        "<StringToSign>AWS4-HMAC hush-hush\n more</StringToSign>",
        "https://user:hush-hush@host/bucket",
        "GET /x?X-Amz-Signature=hush-hush&X-Amz-Credential=hush-hush/2026",
        "Authorization: hush-hush",
        'secret_access_key: "hush-hush"',
        "token=hush-hush",
        "AKIAHUSHHUSHHUSHHUSH",
    ],
)
def test_messages_hide_credentials(text: str) -> None:
    """Libraries quote requests and responses in their errors; messages of this plugin are logged."""
    shown = Failure.of(OSError(f"it failed: {text} (end)")).detail
    assert "hush" not in shown.lower()
    assert "it failed" in shown


def test_messages_are_short() -> None:
    """A page of XML or a debug dump becomes one line of up to a few hundred characters."""
    assert len(hide_secrets("x\n" * 5000)) < 300


def test_only_the_ends_of_a_long_error_page_are_read() -> None:
    """The search of a page of 100 MB for codes and credentials kept every other thread waiting for seconds."""
    middle = f"{'x' * 10**6}<Code>NoSuchKey</Code>{'x' * 10**6}"
    failure = Failure.of(OSError(f"status code: 500: {middle}\n\nDebug source: InvalidCertificate(Expired)"))
    assert (failure.kind, failure.detail) == (FailureKind.UNTRUSTED, "Expired")
    assert Failure.of(OSError(f"status code: 500: {middle}")).kind is FailureKind.BUSY


def test_an_error_is_not_classified_by_the_one_before_it() -> None:
    """A directory that cannot be made at present, after its file was not found, once read "no such bucket"."""
    error = OSError(11, "Resource temporarily unavailable")
    error.__context__ = FileNotFoundError(2, "No such file or directory")
    assert Failure.of(error).kind is FailureKind.BUSY


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("x"), FailureKind.REFUSED),
        (TimeoutError("x"), FailureKind.LATE),
        (ConnectionRefusedError("x"), FailureKind.DOWN),
        (OSError(28, "No space left on device"), FailureKind.FULL),
        (OSError(116, "Stale file handle"), FailureKind.DOWN),
        (BlockingIOError(11, "Resource temporarily unavailable"), FailureKind.BUSY),
        (OSError(24, "Too many open files"), FailureKind.BUSY),
        (RuntimeError("x"), FailureKind.OTHER),
        (OSError("Server returned non-2xx status code: 503 Slow Down: "), FailureKind.BUSY),
        (OSError("status code: 301: <Error><Code>PermanentRedirect</Code></Error>"), FailureKind.OTHER_REGION),
        (FileNotFoundError("status code: 404: <Code>NoSuchBucket</Code>"), FailureKind.NO_BUCKET),
    ],
)
def test_exceptions_are_classified(error: Exception, kind: FailureKind) -> None:
    """The kind decides whether the framework retries, and which fix is named."""
    assert Failure.of(error).kind is kind
