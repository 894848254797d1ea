"""Content of a tier for tests, from pairs of a key and the bytes of its frame."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from tierkv.types.keys import Key
from tierkv.types.tier_ops import TierContent


def content_of(entries: Iterable[tuple[Key, int]], ranks: Sequence[int] = ()) -> TierContent:
    """Content of these chunks; ranks: one per chunk, or none."""
    pairs = list(entries)
    return TierContent(
        [key for key, _ in pairs], array("Q", [frame_bytes for _, frame_bytes in pairs]), array("Q", ranks)
    )
