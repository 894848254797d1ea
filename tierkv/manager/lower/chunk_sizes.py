"""Sizes of chunks, which depend on their groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tierkv.types.keys import GROUP_BYTES, Key

FRAME_PAGE_BYTES = 4096
"""A frame is a header page and a payload padded to pages (decision 3)."""


def frame_bytes_bound(raw_bytes: int) -> int:
    """Upper bound of the bytes at rest of a chunk of ``raw_bytes``."""
    return FRAME_PAGE_BYTES * (1 + -(-raw_bytes // FRAME_PAGE_BYTES))


class ChunkSizes:
    """Sizes of chunks by key.

    Args:
        group_bytes: bytes of one chunk of each group, before it is framed.
    """

    def __init__(self, group_bytes: Sequence[int]) -> None:
        groups = [group.to_bytes(GROUP_BYTES, "big") for group in range(len(group_bytes))]  # as a key ends with it
        self._raw = dict(zip(groups, group_bytes, strict=True))
        self._frames = {group: frame_bytes_bound(raw_bytes) for group, raw_bytes in self._raw.items()}
        sizes = set(zip(self._raw.values(), self._frames.values(), strict=True))
        self._every = sizes.pop() if len(sizes) == 1 else None  # usual: chunks of all groups are as long

    def raw(self, keys: Collection[Key]) -> int:
        """Bytes of these chunks together, before they are framed."""
        if self._every is not None:
            return self._every[0] * len(keys)
        raw = self._raw
        return sum([raw[key[-GROUP_BYTES:]] for key in keys])

    @property
    def frame_bound_max(self) -> int:
        """Upper bound of the bytes at rest of any chunk."""
        return max(self._frames.values())

    def frame_bound(self, key: Key) -> int:
        """Upper bound of the bytes at rest of a chunk."""
        return self._frames[key[-GROUP_BYTES:]]

    def frame_bounds(self, keys: Collection[Key]) -> int:
        """Upper bound of the bytes at rest of these chunks together."""
        if self._every is not None:
            return self._every[1] * len(keys)
        frames = self._frames
        return sum([frames[key[-GROUP_BYTES:]] for key in keys])
