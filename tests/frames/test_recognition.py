"""A frame is known by its first page: the right key and length, or nothing. Never an exception."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.frames.frame import HEADER_BYTES, MAGIC, FrameHeader, FrameSealer, frame_bytes, pack_header
from tierkv.frames.recognition import recognise_frame

NAMESPACE = bytes(range(16))
KEY = b"some key"


def page_of(codec: str, raw_bytes: int, stored_bytes: int, namespace: bytes = NAMESPACE) -> memoryview:
    """A header page as a tier writes it."""
    page = memoryview(bytearray(HEADER_BYTES))
    digest = bytes(16)
    pack_header(FrameHeader(codec, namespace, KEY, raw_bytes, stored_bytes, digest, digest), page)
    return page


@pytest.mark.parametrize("raw_bytes", [1, 4096, 4097, 20_000])
def test_a_raw_frame_has_the_length_that_was_written(raw_bytes: int) -> None:
    """Raw frames end with a page whatever the tier's alignment; of the frame's rest nothing is needed."""
    slot = memoryview(bytearray(frame_bytes(raw_bytes)))
    FrameSealer(NAMESPACE).seal(slot, KEY, raw_bytes)
    for alignment in (1, 512, 4096):
        assert recognise_frame(NAMESPACE, alignment, slot[:HEADER_BYTES]) == (KEY, len(slot))


@pytest.mark.parametrize(("alignment", "length"), [(1, 4096 + 700), (512, 4096 + 1024), (4096, 8192)])
def test_an_encoded_frame_has_the_length_that_was_written(alignment: int, length: int) -> None:
    """Frames of a codec end with the alignment of the tier."""
    assert recognise_frame(NAMESPACE, alignment, page_of("zstd", 20_000, 700)) == (KEY, length)


def test_frames_of_other_namespaces_are_none() -> None:
    """Another model's chunk under the same key must not be taken for ours."""
    assert recognise_frame(NAMESPACE, 4096, page_of("none", 10, 10, bytes(16))) is None


def test_every_flipped_bit_is_noticed() -> None:
    """A header that rotted would name another key, or a length that is not its own."""
    page = page_of("none", 10, 10)
    for offset in range(HEADER_BYTES):
        page[offset] ^= 1 << random.Random(offset).randrange(8)
        assert recognise_frame(NAMESPACE, 4096, page) is None
        page[offset] = page_of("none", 10, 10)[offset] if offset < 512 else 0
    assert recognise_frame(NAMESPACE, 4096, page) is not None


@given(page=st.binary(max_size=HEADER_BYTES), begin=st.sampled_from([b"", MAGIC, bytes(page_of("none", 10, 10))[:400]]))
def test_anything_else_is_none(page: bytes, begin: bytes) -> None:
    """Payloads, zeros, cut pages: an exception here would stop a tier from opening."""
    mixed = begin + page[len(begin) :]
    if mixed.ljust(HEADER_BYTES, b"\0") != page_of("none", 10, 10):
        assert recognise_frame(NAMESPACE, 4096, memoryview(mixed)) is None
