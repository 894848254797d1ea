"""Snapshots as bytes, for a file.

All numbers are little-endian and unsigned: format (1 byte), flags (1), group (2), number of hashes (2), number of
tokens (4); adapter number (8, signed) and name if flagged; the parent's hash if flagged; the hashes; the tokens, 4
bytes each; if flagged, what the hashes have beside tokens, as JSON. A hash and a name have a length byte in front. That
is 1 KiB for the tokens of a chunk of 256.
"""

from __future__ import annotations

import json
import struct
from array import array
from typing import Any

from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.engine import GroupKind
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, split_key

FORMAT = 1
_HEAD = struct.Struct("<BBHHI")
_NUMBER = struct.Struct("<q")
_HAS_PARENT, _HAS_LORA_ID, _HAS_LORA_NAME, _HAS_EXTRA_KEYS = 1, 2, 4, 8
_FLAGS = _HAS_PARENT | _HAS_LORA_ID | _HAS_LORA_NAME | _HAS_EXTRA_KEYS


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """Snapshot as bytes.

    Raises:
        ValueError: a number or a length does not fit its field.
    """
    flags = (
        _HAS_PARENT * (snapshot.parent_block_hash is not None)
        | _HAS_LORA_ID * (snapshot.lora_id is not None)
        | _HAS_LORA_NAME * (snapshot.lora_name is not None)
        | _HAS_EXTRA_KEYS * (snapshot.extra_keys is not None)
    )
    hashes = snapshot.block_hashes
    try:
        parts = [_HEAD.pack(FORMAT, flags, snapshot.group.index, len(hashes), len(snapshot.tokens))]
        if snapshot.lora_id is not None:
            parts.append(_NUMBER.pack(snapshot.lora_id))
        if snapshot.lora_name is not None:
            parts.append(_with_length(snapshot.lora_name.encode()))
        if snapshot.parent_block_hash is not None:
            parts.append(_with_length(snapshot.parent_block_hash))
        parts += map(_with_length, hashes)
        parts.append(struct.pack(f"<{len(snapshot.tokens)}I", *snapshot.tokens))
        if snapshot.extra_keys is not None:
            parts.append(json.dumps(list(map(_as_json, snapshot.extra_keys))).encode())
    except struct.error as error:
        raise ValueError(f"a chunk's tokens cannot be kept: {error}") from error
    return b"".join(parts)


def _as_json(value: Any) -> Any:  # noqa: ANN401 - as the engine has it
    """Value in the form of JSON, which has no bytes: these are a mapping to their hex."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, tuple | list):
        return [_as_json(one) for one in value]
    if value is None or isinstance(value, str | int):
        return value
    raise ValueError(f"{value!r:.80} in a chunk's extra keys cannot be kept: it is no text, number, bytes or tuple")


def _from_json(value: Any) -> Any:  # noqa: ANN401 - (the same)
    """Value of :func:`_as_json`."""
    match value:
        case {"hex": str(digits)}:
            return bytes.fromhex(digits)
        case list():
            return tuple([_from_json(one) for one in value])
        case None | str() | int():
            return value
    raise ValueError(f"{value!r:.80} is no extra key")


def _extra_keys_of(data: bytes, num_blocks: int) -> tuple[tuple[Any, ...] | None, ...]:
    """Values that the hash of each block has beside tokens."""
    try:
        found = _from_json(json.loads(data))
    except RecursionError as error:
        raise ValueError("extra keys are nested too deep") from error
    if not isinstance(found, tuple) or len(found) != num_blocks or {type(one) for one in found} - {tuple, type(None)}:
        raise ValueError(f"extra keys of {num_blocks} blocks are expected, not {data!r:.80}")
    return found


def _with_length(value: bytes) -> bytes:
    return bytes((len(value),)) + value  # ValueError: it is longer than 255


def unpack_snapshot(data: bytes, key: Key, geometry: Geometry) -> Snapshot:
    """Snapshot of the chunk ``key`` from bytes of :func:`pack_snapshot`, which are not trusted.

    Raises:
        ValueError: the bytes describe no chunk of this key and geometry.
    """
    chunk_hash, index = split_key(key)
    group = geometry.groups[index] if index < len(geometry.groups) else None
    if group is None or group.kind is not GroupKind.FULL_ATTENTION:
        raise ValueError(f"group {index} has no described chunks")
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are too few")
    head = _HEAD.unpack_from(data)
    flags, num_hashes, num_tokens = head[1], head[3], head[4]
    expected = (FORMAT, flags & _FLAGS, index, group.hashes_per_chunk, group.chunk_tokens)
    if head != expected:
        raise ValueError(f"format, flags, group, hashes and tokens are {head}, expected {expected}")
    fields = _Fields(data, _HEAD.size)
    lora_id = _NUMBER.unpack(fields.take(_NUMBER.size))[0] if flags & _HAS_LORA_ID else None
    lora_name = fields.take_counted().decode() if flags & _HAS_LORA_NAME else None
    parent = fields.take_counted() if flags & _HAS_PARENT else None
    hashes = tuple(fields.take_counted() for _ in range(num_hashes))
    tokens = struct.unpack(f"<{num_tokens}I", fields.take(4 * num_tokens))
    extra_keys = None
    if flags & _HAS_EXTRA_KEYS:
        extra_keys = _extra_keys_of(fields.take(fields.left), group.chunk_tokens // group.block_tokens)
    if fields.left or hashes[-1] != chunk_hash:
        raise ValueError(f"{fields.left} bytes are left, and the chunk's hash is {hashes[-1].hex()}")
    words = array("q", tokens)
    return Snapshot(hashes, parent, words, lora_id, lora_name, group, extra_keys, is_kept=True, is_restored=True)


class _Fields:
    """Reader of fields in turn."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._at = start

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, length: int) -> bytes:
        if length > self.left:
            raise ValueError(f"{self.left} bytes are left of a field of {length}")
        self._at += length
        return self._data[self._at - length : self._at]

    def take_counted(self) -> bytes:
        return self.take(self.take(1)[0])
