"""Any page: a header that is written as it was read, or a word that it is damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash
from hypothesis import strategies as st
from parser_inputs import any_bytes, parser_test

from tierkv.abc import CODEC_NOTES_BYTES
from tierkv.errors import CorruptFrameError
from tierkv.frames.frame import HEADER_BYTES, checksum_of_parts, pack_header, parse_header
from tierkv.frames.recognition import recognise_frame

HERE = Path(__file__).parent
PAGES = [path.read_bytes() for path in sorted((HERE / "golden").glob("*.bin"))]
FIXED_BYTES, FLAGS_AT, RAW_SUM_AT, PARTS_AT, NOTES_AT = 354, 10, 338, 362, HEADER_BYTES - CODEC_NOTES_BYTES
NAMESPACE = PAGES[0][32:48]


def with_checksums(page: bytes) -> bytes:
    """Return a page with checksums that fit it, as a writer who means to deceive would make them."""
    whole = bytearray(page.ljust(HEADER_BYTES, b"\0"))
    flags = whole[FLAGS_AT]
    count = int.from_bytes(whole[PARTS_AT : PARTS_AT + 2], "little") if flags & 1 else 0
    if count and not flags & 2:
        table = [bytes(whole[start : start + 16]) for start in range(PARTS_AT + 2, PARTS_AT + 2 + 16 * count, 16)]
        whole[RAW_SUM_AT:FIXED_BYTES] = checksum_of_parts(table)
    covered = bytes(whole[:FIXED_BYTES]) + (bytes(whole[NOTES_AT:HEADER_BYTES]) if flags & 8 else b"")
    struct.pack_into("<Q", whole, FIXED_BYTES, xxhash.xxh3_64_intdigest(covered))
    return bytes(whole)


def headers() -> st.SearchStrategy[bytes]:
    """Draw pages whose fields are changed, with and without the checksums that would betray it."""
    changed = any_bytes([page[:480] for page in PAGES])
    return changed | changed.map(with_checksums) | any_bytes(PAGES).map(with_checksums)


@parser_test(HERE / "corpus" / "header", headers())
def test_any_page_is_a_header_or_damaged(data: bytes) -> None:
    """A tier reads pages from disks and buckets that others write: one header has one form, and nothing else passes."""
    page = memoryview(data)
    for verify in (True, False):
        try:
            header = parse_header(page, verify=verify)
        except CorruptFrameError:
            continue
        again = memoryview(bytearray(HEADER_BYTES))
        pack_header(header, again)
        found = recognise_frame(header.namespace, 512, page)
        if verify:
            assert again == page[:HEADER_BYTES]
            assert found is not None
            assert found[0] == header.key
            assert found[1] >= HEADER_BYTES + header.stored_bytes
    assert recognise_frame(bytes(16), 4096, page) is None or data[32:48] == bytes(16)
