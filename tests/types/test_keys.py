"""Keys name one chunk of one group, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.types.keys import NO_TENANT, make_key, make_scope, split_key, tenant_of, tenant_of_salt


@pytest.mark.parametrize("group", [0, 1, 2**32 - 1])
def test_s1_round_trip(group: int) -> None:
    """S1: a key gives back the hash and the group it was made of, at both ends of the range."""
    assert split_key(make_key(b"hash", group)) == (b"hash", group)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**32 - 1))
def test_s1_any_round_trip(chunk_hash: bytes, group: int) -> None:
    """S1: whatever the hash function and its length, nothing is lost."""
    assert split_key(make_key(chunk_hash, group)) == (chunk_hash, group)


@pytest.mark.parametrize("group", [-1, 2**32])
def test_s1_group_out_of_range(group: int) -> None:
    """S1: a group that four bytes cannot hold would silently become another group."""
    with pytest.raises(ValueError, match=str(group)):
        make_key(b"hash", group)


def test_s1_too_short_to_split() -> None:
    """S1: a foreign file name is no key."""
    with pytest.raises(ValueError, match="too short"):
        split_key(b"abcd")


def test_s2_groups_do_not_share_keys() -> None:
    """S2: the same prefix has other bytes in another group."""
    assert make_key(b"hash", 0) != make_key(b"hash", 1)


SCOPES = st.tuples(st.none() | st.text(), st.none() | st.text())


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**32 - 1), SCOPES)
def test_a_scope_comes_off_again(chunk_hash: bytes, group: int, said: tuple[str | None, str | None]) -> None:
    """Events name the engine's own hashes, so they must come back as they were."""
    assert split_key(make_key(chunk_hash, group, make_scope(*said))) == (chunk_hash, group)


@given(SCOPES, SCOPES)
def test_scopes_do_not_share_keys(one: tuple[str | None, str | None], other: tuple[str | None, str | None]) -> None:
    """Another tenant's answer, or another adapter's, would be wrong bytes; a salt is not an adapter's name."""
    same = make_key(b"hash", 0, make_scope(*one)) == make_key(b"hash", 0, make_scope(*other))
    assert same == (one == other)


@given(st.none() | st.text(), st.none() | st.text())
def test_a_key_says_whose_it_is(salt: str | None, adapter: str | None) -> None:
    """After a restart quotas know the tenants of chunks at rest only from their keys."""
    key = make_key(b"hash", 0, make_scope(salt, adapter))
    assert tenant_of(key) == tenant_of_salt(salt)
    assert (tenant_of(key) == NO_TENANT) == (salt is None)


def test_plain_requests_keep_their_keys() -> None:
    """Chunks stored by requests without salt and adapter are still found."""
    assert make_key(b"hash", 0, make_scope(None, None)) == b"hash\0\0\0\0"
    assert make_scope("", None) != b""
