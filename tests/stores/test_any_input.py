"""Any manifest of an export, any file that names namespaces, and any words of the store commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from filled_stores import model_namespace
from parser_inputs import any_bytes, any_json, parser_test

from tierkv.errors import ConfigError, TierKVError
from tierkv.stores.folder import FORMAT, MANIFEST, VERSION, read_manifest
from tierkv.stores.selection import parse_age, parse_key, parse_tenant, read_namespace_file

HERE = Path(__file__).parent
DESCRIBED = model_namespace().describe()
EXPORT = {
    "format": FORMAT,
    "version": VERSION,
    "namespaces": [{"fingerprint": "00", "namespace": DESCRIBED, "chunks": 3, "frame_bytes": None}],
}
LISTED = {"namespaces": [{"place": "disk", "namespace": DESCRIBED}]}


@parser_test(HERE / "corpus" / "manifest", any_json([EXPORT, LISTED, DESCRIBED]))
def test_any_manifest_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """An export is carried between machines: what is damaged on the way is named, not taken for another namespace."""
    path = tmp_path_factory.getbasetemp() / MANIFEST
    path.write_bytes(data)
    try:
        for exported in read_manifest(path.parent):
            assert exported.namespace.payload_bytes_max > 0
            assert exported.chunks is None or exported.chunks >= 0
    except TierKVError as error:
        message = str(error)
        assert str(path) in message
    try:
        assert all(namespace.payload_bytes_max > 0 for namespace in read_namespace_file(path))
    except ConfigError as error:
        message = str(error)
        assert message.startswith(str(path))


@parser_test(HERE / "corpus" / "words", any_bytes([b"1.5h", b"7d", b"id:0011223344556677", b"a salt", b"aabb.0"], 30))
def test_any_word_is_an_age_a_tenant_a_key_or_refused(data: bytes) -> None:
    """They choose what is removed: nothing may be read as something else than was meant."""
    text = data.decode(errors="replace")
    for parse in (parse_age, parse_tenant, parse_key):
        try:
            found = parse(text)
        except ValueError as error:
            message = str(error)
            assert repr(text)[:80] in message, "a file of anything is shortened in an error"
            continue
        assert found == parse(text)
