"""Manifest of a namespace in a directory: refused where it is foreign, written anew where it is damaged."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fsspec_support import S3Server, get, key, names, namespace, open_at, put

from tierkv.errors import NamespaceMismatchError
from tierkv.testing.manual_clock import ManualClock
from tierkv_fsspec.manifest import REPEAT_S, claim_namespace
from tierkv_fsspec.stores.local_store import LocalStore

FRAME = bytes(range(256)) * 200


@pytest.mark.parametrize("content", ["{}", '{"format": "tierkv-fsspec", "version": 2}'])
def test_foreign_manifest_is_refused_and_unchanged(tmp_path: Path, content: str) -> None:
    """Data of another program, or of a later version, must not be written."""
    manifest = tmp_path / namespace().fingerprint().hex() / "namespace.json"
    manifest.parent.mkdir()
    manifest.write_text(content)
    with pytest.raises(NamespaceMismatchError, match="another url") as failure:
        open_at(f"file://{tmp_path}")
    assert str(manifest) in str(failure.value)
    assert manifest.read_text() == content


@pytest.mark.parametrize(
    "damage", ["cut", "flipped", "empty", "endless", "another program", "no version", "another dtype", "no groups"]
)
def test_a_damaged_manifest_is_written_anew(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """One bad byte in a side file keeps no engine from starting, a long one does not fill its memory, and every chunk
    stays.
    """
    backend = open_at(f"file://{tmp_path}")
    put(backend, {key(1): FRAME})
    backend.close()
    manifest = tmp_path / namespace().fingerprint().hex() / "namespace.json"
    content = manifest.read_bytes()
    if damage == "endless":
        os.truncate(manifest, 1 << 40)
    else:
        damaged = {
            "cut": content[:-20],
            "flipped": bytes([content[0] ^ 0x80]) + content[1:],
            "empty": b"",
            "another program": content.replace(b"tierkv-fsspec", b"tierkv-fssped"),
            "no version": content.replace(b"version", b"vershon"),
            "another dtype": content.replace(b'"dtype": "b', b'"dtype": "c'),
            "no groups": content.replace(b"groups", b"groupr"),
        }
        assert damaged[damage] != content
        manifest.write_bytes(damaged[damage])
    backend = open_at(f"file://{tmp_path}")
    assert get(backend, key(1)) == [FRAME]
    backend.close()
    assert "written anew" in caplog.text
    assert json.loads(manifest.read_bytes())["fingerprint"] == namespace().fingerprint().hex()


def test_first_manifest_stays(tmp_path: Path) -> None:
    """Two processes that look at once both find no manifest; the second writer must see the first one's."""
    other = json.dumps({"format": "tierkv-fsspec", "version": 1, "fingerprint": "of another"}).encode()

    class SlowToSee(LocalStore):
        looks = 0

        def read(self, name: str) -> bytes:
            self.looks += 1
            if self.looks == 1:
                raise FileNotFoundError(name)
            return super().read(name)

    store = SlowToSee(tmp_path)
    assert LocalStore(tmp_path).create("namespace.json", other)
    with pytest.raises(NamespaceMismatchError):
        claim_namespace(store, namespace(), "file:///x", datetime.now(UTC))
    assert (tmp_path / "namespace.json").read_bytes() == other


def test_a_manifest_that_is_removed_while_an_engine_runs_is_stored_again(
    s3: S3Server, url: str, options: dict[str, Any]
) -> None:
    """A lifecycle rule removes it with the chunks of its day: no tool may lose a namespace until the next restart."""
    backend = open_at(url, **options)
    clock = backend._clock = ManualClock()
    backend._described_s = clock()
    name = f"pre/fix/{namespace().fingerprint().hex()}/namespace.json"
    first = json.loads(s3.client.get_object(Bucket=url.split("/")[2], Key=name)["Body"].read())
    s3.client.delete_object(Bucket=url.split("/")[2], Key=name)
    assert put(backend, {key(1): FRAME}) == [None]
    assert name not in names(s3, url)
    clock.advance(REPEAT_S)
    asked = len(s3.requests)
    assert put(backend, {key(2): FRAME}) == [None]
    again = json.loads(s3.client.get_object(Bucket=url.split("/")[2], Key=name)["Body"].read())
    assert again | {"created": ""} == first | {"created": ""}
    assert put(backend, {key(3): FRAME}) == [None]
    assert len([line for line in s3.requests[asked:] if line == f"PUT /{url.split('/')[2]}/{name}"]) == 1
    backend.close()


def test_a_manifest_of_the_first_release_is_accepted(tmp_path: Path) -> None:
    """A bucket outlives the program that began it. This text is not made by the code of today."""
    manifest = tmp_path / namespace().fingerprint().hex() / "namespace.json"
    manifest.parent.mkdir()
    content = {"format": "tierkv-fsspec", "version": 1, "created": "2026-11-30T00:00:00+00:00"}
    content |= {"fingerprint": namespace().fingerprint().hex(), "namespace": namespace().describe()}
    manifest.write_text(json.dumps(content))
    text = manifest.read_text()
    open_at(f"file://{tmp_path}").close()
    assert manifest.read_text() == text
