"""Any manifest in a bucket, any name of an object, and any text of an error."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from fsspec_support import namespace
from parser_inputs import any_bytes, any_json, parser_test

from tierkv.abc import StoredNamespace
from tierkv.errors import NamespaceMismatchError, TierKVError
from tierkv_fsspec import FsspecOptions
from tierkv_fsspec.at_rest import stored_namespaces
from tierkv_fsspec.failures import Failure
from tierkv_fsspec.manifest import FORMAT, VERSION, claim_namespace
from tierkv_fsspec.options import Location
from tierkv_fsspec.presence_hints import ListedNames
from tierkv_fsspec.stores.local_store import LocalStore

HERE = Path(__file__).parent
FINGERPRINT = namespace().fingerprint().hex()
MANIFEST = {
    "format": FORMAT,
    "version": VERSION,
    "created": "2026-11-24T10:00:00+00:00",
    "fingerprint": FINGERPRINT,
    "namespace": namespace().describe(),
}


@parser_test(HERE / "corpus" / "manifest", any_json([MANIFEST]), share=2)
def test_any_manifest_is_read_replaced_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Every user of a bucket may write manifests: an engine starts or names the difference, and tools list."""
    root = tmp_path_factory.mktemp("place", numbered=True)
    directory = root / FINGERPRINT
    directory.mkdir()
    (directory / "namespace.json").write_bytes(data)
    options = FsspecOptions(url=f"file://{root}")
    for found in stored_namespaces(options):
        assert isinstance(found, StoredNamespace | TierKVError)
    store = LocalStore(directory)
    try:
        claim_namespace(store, namespace(), str(root), datetime.now(UTC))
    except NamespaceMismatchError as error:
        message = str(error)
        assert str(root) in message
    else:
        (listed,) = stored_namespaces(options)
        assert isinstance(listed, StoredNamespace)
        assert listed.namespace == namespace()


@parser_test(HERE / "corpus" / "names", any_bytes([b"ab/" + b"ab" * 16, b"00 11 22 33 44 55 66 77 88 99 a"], 40))
def test_any_name_of_an_object_is_listed_or_left_out(data: bytes) -> None:
    """A bucket may hold objects of others: their names answer no lookup, and end no listing."""
    name = data.decode(errors="replace")
    listed = ListedNames(10, 1000.0)
    listed.add_pages([[name, "ab/" + "cd" * 16]])
    assert listed.take_listed("cd" * 16)
    listed.forget_name(name)
    assert not listed.take_listed(name)


URLS = [b"s3://bucket/a/b", b"file:///mnt/x", b"/mnt/x", b"http://host:80/p", b"sftp://user@host/p", b"s3://k:s@b"]
XML = b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code><Message>No AKIAABCDEFGHIJKLMNOP</Message></Error>'


@parser_test(HERE / "corpus" / "urls", any_bytes(URLS, 40))
def test_any_url_is_a_location_or_refused(data: bytes) -> None:
    """A URL is typed by hand; one that is accepted is shown as a URL of the same place."""
    try:
        location = Location.parse(data.decode(errors="replace"))
    except ValueError:
        return
    assert Location.parse(location.url) == location


@parser_test(HERE / "corpus" / "errors", any_bytes([XML, b"Generic S3 error: status code: 503", b"token=abc def"], 80))
def test_any_error_of_a_library_becomes_a_short_line(data: bytes) -> None:
    """Servers and libraries word errors as they like: the message is one line, bounded, and hides the key's id."""
    text = data.decode(errors="replace")
    line = str(Failure.of(RuntimeError(text)).to_error("cannot read", tier="s3"))
    assert "\n" not in line
    assert len(line) < 800
    assert "AKIAABCDEFGHIJKLMNOP" not in line
