"""Pages in host memory, gathered into a part of a payload piece by piece."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.frames.frame import checksum, checksum_of_pieces
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.worker.pages import HostPages

LAYOUTS = {
    "small pages of many tensors": ((24 << 10,) * 40, 1),
    "many pages of a tensor": ((48 << 10,), 16),
    "pages of several lengths": ((4 << 10, 300 << 10, 8 << 10), 3),
    "one small page": ((8 << 10,), 1),
}


def pages_of(name: str) -> tuple[HostPages, Geometry, list[np.ndarray]]:
    """Random pages of 40 blocks in this layout."""
    page_bytes, blocks = LAYOUTS[name]
    geometry = Geometry.of(EngineSpec("m", "uint8", (GroupSpec(16, page_bytes),), 16), blocks=blocks)
    rng = np.random.default_rng(7)
    tensors = [rng.integers(256, size=(40, size), dtype=np.uint8) for size in page_bytes]
    return HostPages(geometry, [tensors]), geometry, tensors


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("skip", "missing"), [(0, 0), (1, 0), (0, 1), (2, 3)])
def test_pieces_are_the_part_in_order(name: str, skip: int, missing: int) -> None:
    """The checksum of a chunk is computed from its pieces: one that is left out, or early, damages every chunk."""
    pages, geometry, tensors = pages_of(name)
    blocks = geometry.blocks_per_chunk
    if skip + missing >= blocks:
        skip = missing = 0
    ids = list(range(30, 30 - (blocks - skip - missing), -1))
    part = np.full(geometry.payload_bytes_max, 0xDB, np.uint8)
    pieces = [bytes(piece) for piece in pages.gather_in_pieces(0, skip, ids, part)]
    expected = b"".join(
        bytes(skip * tensor.shape[1]) + tensor[ids].tobytes() + bytes(missing * tensor.shape[1]) for tensor in tensors
    )
    assert part.tobytes() == expected
    assert b"".join(pieces) == expected
    assert max(map(len, pieces)) <= 512 << 10
    again = np.full(geometry.payload_bytes_max, 0xDB, np.uint8)
    pages.gather(0, skip, ids, again)
    assert again.tobytes() == expected


@pytest.mark.parametrize("cuts", [(), (3,), (1, 2), (5, 70, 71)])
def test_the_checksum_of_pieces_is_that_of_the_whole(cuts: tuple[int, ...]) -> None:
    """A frame that was stored in pieces is read as a whole."""
    whole = bytes(range(100))
    pieces = [whole[start:end] for start, end in zip((0, *cuts), (*cuts, 100), strict=True)]
    assert checksum_of_pieces(pieces) == checksum(whole)
    assert checksum_of_pieces(iter(pieces)) == checksum(whole)
    assert checksum_of_pieces([]) == checksum(b"")
