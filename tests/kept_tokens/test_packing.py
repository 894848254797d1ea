"""Snapshots as bytes: what was packed comes back, and nothing else is ever accepted."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from core_truth import engine_spec
from hypothesis import given
from hypothesis import strategies as st

from tierkv.kept_tokens.packing import pack_snapshot, unpack_snapshot
from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.engine import GroupKind, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key

GEOMETRY = Geometry.of(engine_spec((16, 32), 16), blocks=4)
"""Two groups: chunks of 64 and of 128 tokens."""

HASHES = st.binary(min_size=1, max_size=40)
EXTRA_KEYS = st.none() | st.lists(st.text(max_size=9) | HASHES | st.tuples(st.text(max_size=9), st.integers())).map(
    tuple
)


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[Key, Snapshot]:
    """A chunk of one of the groups, with or without parent and adapter."""
    group = draw(st.sampled_from(GEOMETRY.groups))
    hashes = tuple(draw(st.lists(HASHES, min_size=group.hashes_per_chunk, max_size=group.hashes_per_chunk)))
    words = draw(st.lists(st.integers(0, 2**32 - 1), min_size=group.chunk_tokens, max_size=group.chunk_tokens))
    parent, lora_id = draw(st.none() | HASHES), draw(st.none() | st.integers(-(2**63), 2**63 - 1))
    name, blocks = draw(st.none() | st.text(max_size=40)), group.chunk_tokens // group.block_tokens
    extra_keys = draw(st.none() | st.lists(EXTRA_KEYS, min_size=blocks, max_size=blocks).map(tuple))
    snapshot = Snapshot(hashes, parent, array("q", words), lora_id, name, group, extra_keys)
    return make_key(hashes[-1], group.index), snapshot


@given(snapshots())
def test_a_snapshot_comes_back_from_its_bytes(case: tuple[Key, Snapshot]) -> None:
    """A router after a restart receives the same tokens, hashes, parent, adapter and pictures as before."""
    key, snapshot = case
    assert unpack_snapshot(pack_snapshot(snapshot), key, GEOMETRY) == replace(snapshot, is_kept=True, is_restored=True)


@given(snapshots(), st.data())
def test_bytes_of_another_length_are_refused(case: tuple[Key, Snapshot], data: st.DataObject) -> None:
    """A row that was cut off, or has something behind it, describes no chunk."""
    key, snapshot = case
    packed = pack_snapshot(snapshot)
    end = data.draw(st.integers(0, len(packed) - 1))
    for wrong in (packed[:end], packed + b"\0"):
        with pytest.raises(ValueError, match=r"."):
            unpack_snapshot(wrong, key, GEOMETRY)


@given(snapshots(), st.data())
def test_changed_bytes_raise_nothing_but_a_value_error(case: tuple[Key, Snapshot], data: st.DataObject) -> None:
    """The file has a checksum; where that fails too, a stack must still open."""
    key, snapshot = case
    packed = bytearray(pack_snapshot(snapshot))
    for _ in range(3):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = unpack_snapshot(bytes(packed), key, GEOMETRY)
    except ValueError:
        return
    assert len(found.tokens) == snapshot.group.chunk_tokens
    assert found.block_hashes[-1] == snapshot.block_hashes[-1]


def test_a_snapshot_of_another_chunk_is_refused() -> None:
    """The last hash is the chunk's own: tokens under another key would lead traffic astray."""
    group = GEOMETRY.groups[0]
    hashes = tuple(bytes([number]) * 32 for number in range(group.hashes_per_chunk))
    packed = pack_snapshot(Snapshot(hashes, None, array("q", range(64)), None, None, group))
    assert unpack_snapshot(packed, make_key(hashes[-1], 0), GEOMETRY).block_hashes == hashes
    for key in (make_key(hashes[0], 0), make_key(hashes[-1], 1), make_key(hashes[-1], 9)):
        with pytest.raises(ValueError, match=r"hash|expected|group"):
            unpack_snapshot(packed, key, GEOMETRY)


def test_a_group_with_a_window_has_no_snapshots() -> None:
    """Its events are placeholders before a restart, and stay so."""
    window = GroupSpec(16, (16,), kind=GroupKind.SLIDING_WINDOW, window_tokens=64)
    geometry = Geometry.of(engine_spec((16,), 16, [window]), blocks=4)
    group = GEOMETRY.groups[0]
    packed = pack_snapshot(Snapshot((b"a", b"b", b"c", b"d"), None, array("q", range(64)), None, None, group))
    with pytest.raises(ValueError, match="group 0"):
        unpack_snapshot(packed, make_key(b"d", 0), geometry)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_beyond_four_bytes_are_not_kept(token: int) -> None:
    """A number that does not fit would come back as another one."""
    group = GEOMETRY.groups[0]
    snapshot = Snapshot((b"a",) * 4, None, array("q", [token] * 64), None, None, group)
    with pytest.raises(ValueError, match="cannot be kept"):
        pack_snapshot(snapshot)
