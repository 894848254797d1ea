"""Chunk keys: the hash of the chunk's last hash block, then the group index as four big-endian bytes (S1 to S3).

The keys of a request with a cache salt or an adapter begin with a *scope*. So two tenants never share a chunk, even
where the engine's hashes are equal, and the key of a stored chunk names its tenant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, NewType, cast

Key = NewType("Key", bytes)
"""Identity of one chunk of one KV cache group. Opaque bytes. Hashes are chained, so a key identifies a whole prefix."""

Tenant = NewType("Tenant", bytes)
"""Owner of a chunk: a digest of the cache salt; empty for requests without a salt."""

NO_TENANT = Tenant(b"")

GROUP_BYTES = 4
"""Bytes of the group index at the end of a key."""

DIGEST_BYTES = 8
"""Bytes of the digest of a salt, or of an adapter's name."""

_SCOPE_MARK = bytes.fromhex("d7f31c5a90e24b86")
"""First bytes of a key with a scope. A hash begins with them with a chance of one in 2**64."""
_SCOPE_BYTES = len(_SCOPE_MARK) + 2 * DIGEST_BYTES
_GROUP_MAX = 2**32 - 1


def make_key(chunk_hash: bytes, group: int, scope: bytes = b"") -> Key:
    """Join a scope (:func:`make_scope`), a chunk hash and a group index.

    Raises:
        ValueError: the group index does not fit four unsigned bytes.
    """
    if not 0 <= group <= _GROUP_MAX:
        raise ValueError(f"group index {group} is outside 0..{_GROUP_MAX}")
    return Key(scope + chunk_hash + group.to_bytes(GROUP_BYTES, "big"))


def make_keys(chunk_hashes: Iterable[bytes], group: int, scope: bytes = b"") -> list[Key]:
    """Join each chunk hash with one scope and one group index, as :func:`make_key` does."""
    suffix = make_key(b"", group)
    if scope:
        return cast("list[Key]", [scope + chunk_hash + suffix for chunk_hash in chunk_hashes])
    return cast("list[Key]", [chunk_hash + suffix for chunk_hash in chunk_hashes])


def make_scope(cache_salt: str | None, adapter: str | None) -> bytes:
    """Prefix of the keys of a request; empty without salt and adapter.

    Args:
        cache_salt: salt that separates the user's cache, or None.
        adapter: name of the LoRA adapter, or None.
    """
    if cache_salt is None and adapter is None:
        return b""
    return _SCOPE_MARK + tenant_of_salt(cache_salt).ljust(DIGEST_BYTES, b"\0") + _digest(adapter, b"tierkv-adapter")


def tenant_of_salt(cache_salt: str | None) -> Tenant:
    """Digest of a cache salt, or NO_TENANT without one. The salt itself is never stored."""
    return NO_TENANT if cache_salt is None else Tenant(_digest(cache_salt, b"tierkv-tenant"))


def tenant_of(key: bytes) -> Tenant:
    """Tenant that a chunk belongs to."""
    if not key.startswith(_SCOPE_MARK):
        return NO_TENANT
    digest = key[len(_SCOPE_MARK) : len(_SCOPE_MARK) + DIGEST_BYTES]
    return Tenant(digest) if any(digest) else NO_TENANT


class Scope(NamedTuple):
    """Digests in the key of a chunk that not all requests share."""

    tenant: Tenant = NO_TENANT
    """Tenant; empty: none."""
    adapter: bytes = b""
    """Digest of the adapter; empty: none."""


NO_SCOPE = Scope()
"""Scope of a chunk of the plain model, without a tenant."""


def scope_of_key(key: bytes) -> Scope:
    """Tenant and adapter that a chunk belongs to."""
    if not key.startswith(_SCOPE_MARK):
        return NO_SCOPE
    adapter = key[len(_SCOPE_MARK) + DIGEST_BYTES : _SCOPE_BYTES]
    return Scope(tenant_of(key), adapter if any(adapter) else b"")


def split_key(key: bytes) -> tuple[bytes, int]:
    """Chunk hash without its scope, and group index of a key.

    Raises:
        ValueError: the key is too short to carry a group index.
    """
    if len(key) <= GROUP_BYTES:
        raise ValueError(f"key {key.hex()} is too short: a hash and {GROUP_BYTES} bytes of group index are needed")
    start = _SCOPE_BYTES if key.startswith(_SCOPE_MARK) else 0
    return key[start:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")


def _digest(text: str | None, purpose: bytes) -> bytes:
    """Digest of a text; never zeros, which represent None."""
    if text is None:
        return bytes(DIGEST_BYTES)
    data = text.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=purpose.ljust(16, b"\0")).digest()
    return digest if any(digest) else b"\1" * DIGEST_BYTES
