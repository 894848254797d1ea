"""Chunk keys: the hash of the chunk's last hash block, then the group index as four big-endian bytes (S1 to S3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType, cast

Key = NewType("Key", bytes)
"""Identity of one chunk of one KV cache group. Opaque bytes; hashes are chained, so it names the whole prefix."""

GROUP_BYTES = 4
"""Bytes of the group index at the end of a key."""
_GROUP_MAX = 2**32 - 1


def make_key(chunk_hash: bytes, group: int) -> Key:
    """Join a chunk hash and a group index.

    Raises:
        ValueError: the group index does not fit four unsigned bytes.
    """
    if not 0 <= group <= _GROUP_MAX:
        raise ValueError(f"group index {group} is outside 0..{_GROUP_MAX}")
    return Key(chunk_hash + group.to_bytes(GROUP_BYTES, "big"))


def make_keys(chunk_hashes: Iterable[bytes], group: int) -> list[Key]:
    """Join many chunk hashes with one group index; see :func:`make_key`."""
    suffix = make_key(b"", group)
    return cast("list[Key]", [chunk_hash + suffix for chunk_hash in chunk_hashes])


def split_key(key: bytes) -> tuple[bytes, int]:
    """The chunk hash and the group index of a key.

    Raises:
        ValueError: the key is too short to carry a group index.
    """
    if len(key) <= GROUP_BYTES:
        raise ValueError(f"key {key.hex()} is too short: a hash and {GROUP_BYTES} bytes of group index are needed")
    return key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")
