"""Keys name one chunk of one group, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.types.keys import make_key, split_key


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
