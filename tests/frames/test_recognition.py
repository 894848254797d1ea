"""Recognition of frames by their first page: the right key and length, or None. Never an exception."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.frames.frame import HEADER_BYTES, MAGIC, FrameHeader, frame_bytes, pack_header
from tierkv.frames.recognition import recognise_frame
from tierkv.frames.sealer import FrameSealer

NAMESPACE = bytes(range(16))
KEY = b"some key"


def page_of(codec: str, raw_bytes: int, stored_bytes: int, namespace: bytes = NAMESPACE) -> memoryview:
    """Return a header page as a tier writes it."""
    page = memoryview(bytearray(HEADER_BYTES))
    digest = bytes(16)
    pack_header(FrameHeader(codec, namespace, KEY, raw_bytes, stored_bytes, digest, digest), page)
    return page


@pytest.mark.parametrize("raw_bytes", [1, 4096, 4097, 20_000])
def test_a_raw_frame_has_the_length_that_was_written(raw_bytes: int) -> None:
    """Raw frames end at a page boundary, whatever the tier's alignment. Only the first page is needed."""
    slot = memoryview(bytearray(frame_bytes(raw_bytes)))
    FrameSealer(NAMESPACE).seal(slot, KEY, raw_bytes)
    for alignment in (1, 512, 4096):
        assert recognise_frame(NAMESPACE, alignment, slot[:HEADER_BYTES]) == (KEY, len(slot))


@pytest.mark.parametrize(("alignment", "length"), [(1, 4096 + 700), (512, 4096 + 1024), (4096, 8192)])
def test_an_encoded_frame_has_the_length_that_was_written(alignment: int, length: int) -> None:
    """Frames of a codec end at the alignment of the tier."""
    assert recognise_frame(NAMESPACE, alignment, page_of("zstd", 20_000, 700)) == (KEY, length)


def test_frames_of_other_namespaces_are_ignored() -> None:
    """A chunk of another model under the same key must not be used."""
    assert recognise_frame(NAMESPACE, 4096, page_of("none", 10, 10, bytes(16))) is None


def test_every_flipped_bit_is_detected() -> None:
    """A damaged header would name another key, or a wrong length."""
    page = page_of("none", 10, 10)
    for offset in range(HEADER_BYTES):
        page[offset] ^= 1 << random.Random(offset).randrange(8)
        assert recognise_frame(NAMESPACE, 4096, page) is None
        page[offset] = page_of("none", 10, 10)[offset] if offset < 512 else 0
    assert recognise_frame(NAMESPACE, 4096, page) is not None


@given(page=st.binary(max_size=HEADER_BYTES), begin=st.sampled_from([b"", MAGIC, bytes(page_of("none", 10, 10))[:400]]))
def test_other_pages_are_ignored(page: bytes, begin: bytes) -> None:
    """Payloads, zeros, truncated pages: an exception would prevent a tier from opening."""
    mixed = begin + page[len(begin) :]
    if mixed.ljust(HEADER_BYTES, b"\0") != page_of("none", 10, 10):
        assert recognise_frame(NAMESPACE, 4096, memoryview(mixed)) is None
