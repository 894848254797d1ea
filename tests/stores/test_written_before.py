"""Literal names, files and bytes that version 0.1.0 wrote, which this one must find. No code of today makes them.

A test that writes and reads with the same code passes with any format. Here a changed format fails, so its version
goes up on purpose, readers of the old one stay, and the changelog says so.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from core_truth import engine_spec
from filled_stores import chunk_key, model_namespace, sealed_frame

from tierkv.abc import StoredFrame
from tierkv.kept_tokens.packing import pack_snapshot, unpack_snapshot
from tierkv.recording.reading import read_entries
from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.stores.places import folder_place
from tierkv.stores.store import Store
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key
from tierkv.types.namespace import Namespace

FINGERPRINT = "5000440688f0cfd9748b9316c3f0f1aa"
DESCRIPTION = {
    "model": "llama-3-8b",
    "revision": "r1",
    "dtype": "bfloat16",
    "layout": "page",
    "groups": [[16, [1024], "full_attention", None]],
    "blocks_per_chunk": 4,
    "hash_block_tokens": 16,
    "rank": 0,
    "world_size": 1,
    "epoch": "0",
    "kv_format": 2,
}
SNAPSHOT = (
    "010f00000100100000000700000000000000046c6f726104726f6f7406686173682d31000000000100000002000000030000000400000005"
    "000000060000000700000008000000090000000a0000000b0000000c0000000d0000000e0000000f0000005b5b7b22686578223a20223031"
    "227d2c202273616c74225d5d"
)
"""Row of kept tokens: 16 tokens with a parent, an adapter, and extra keys of one block."""


def test_a_namespace_keeps_its_name() -> None:
    """Another fingerprint for the same model would make every store look empty."""
    assert Namespace.from_description(DESCRIPTION) == model_namespace()
    assert json.loads(json.dumps(model_namespace().describe())) == DESCRIPTION
    assert model_namespace().fingerprint().hex() == FINGERPRINT


def test_an_export_folder_is_read(tmp_path: Path) -> None:
    """A backup is older than the program that imports it."""
    exported = {"fingerprint": FINGERPRINT, "namespace": DESCRIPTION, "chunks": 1, "frame_bytes": 8192}
    manifest = {"format": "tierkv-export", "version": 1, "namespaces": [exported]}
    (tmp_path / "tierkv-export.json").write_text(json.dumps(manifest))
    frame = tmp_path / FINGERPRINT / "7c" / "7c65cc7be630be2f11838765978849a2.frame"
    frame.parent.mkdir(parents=True)
    frame.write_bytes(sealed_frame(model_namespace(), 0))
    place = folder_place(str(tmp_path))
    (stored,) = place.list_namespaces()
    with Store(place, stored.namespace, writes=False) as store:  # type: ignore[union-attr]
        (found,) = store.list_frames()
        assert isinstance(found, StoredFrame)
        assert found.key == chunk_key(0)
        assert store.contains([chunk_key(0)]) == [True]


def test_kept_tokens_are_read() -> None:
    """A router would otherwise learn nothing of a disk after an update."""
    group = (geometry := Geometry.of(engine_spec((16,), 16), blocks=1)).groups[0]
    words, extra_keys = array("q", range(16)), ((b"\x01", "salt"),)
    snapshot = Snapshot((b"hash-1",), b"root", words, 7, "lora", group, extra_keys)
    assert pack_snapshot(snapshot).hex() == SNAPSHOT
    assert unpack_snapshot(bytes.fromhex(SNAPSHOT), make_key(b"hash-1", 0), geometry).tokens == words


def test_records_of_both_versions_are_read(tmp_path: Path) -> None:
    """A record is kept to explain an incident of last month."""
    for version in (1, 2):
        file = tmp_path / f"{version}.jsonl"
        line = {"is": "record", "step": 0, "t": 0, "version": version, "model": "m", "pid": 1, "tiers": ["host"]}
        line |= {"opened": "2026-11-30T11:57:39.817Z", "chunk_tokens": 32, "chunk_bytes": 45056}
        file.write_text(json.dumps(line) + "\n")
        assert [entry["version"] for entry in read_entries(file)] == [version]
