"""Header page of a frame: golden bytes, documented offsets, and detection of every changed byte."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.abc import CODEC_NOTES_BYTES
from tierkv.errors import CorruptFrameError
from tierkv.frames import frame
from tierkv.frames.frame import (
    _FIXED,
    HEADER_BYTES,
    KEY_BYTES_MAX,
    PARTS_MAX,
    FrameHeader,
    checksum,
    checksum_of_parts,
    frame_bytes,
    pack_header,
    parse_header,
    raw_page,
)
from tierkv.types.keys import make_key

GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = bytes(range(16))
KEY = make_key(b"chunk-hash-of-thirty-two-bytes..", 3)


def golden_cases() -> list[str]:
    """Return the names of the golden files."""
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


def golden_header(name: str) -> FrameHeader:
    """Return the fields of a golden page."""
    fields = json.loads((GOLDEN / f"{name}.json").read_text())
    parts = tuple(bytes.fromhex(part) for part in fields.pop("part_checksums", ()))
    return FrameHeader(
        **{
            field: bytes.fromhex(value) if isinstance(value, str) and field != "codec" else value
            for field, value in fields.items()
        },
        part_checksums=parts,
    )


@pytest.mark.parametrize("name", golden_cases())
def test_golden_header_is_written_unchanged(name: str) -> None:
    """Frames on users' disks outlive releases: the bytes of a header may change with the format version only."""
    page = bytearray(b"\xee" * HEADER_BYTES)
    pack_header(golden_header(name), memoryview(page))
    assert bytes(page) == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", golden_cases())
def test_golden_header_is_read_unchanged(name: str) -> None:
    """Every release reads the headers of all earlier ones."""
    page = memoryview((GOLDEN / f"{name}.bin").read_bytes())
    assert parse_header(page) == golden_header(name)


def test_there_are_golden_files() -> None:
    """Without golden files the two tests above would always pass."""
    assert golden_cases() == ["approximate", "encrypted", "longest", "lossy", "none", "parts", "zstd"]


def test_header_has_the_documented_offsets() -> None:
    """The bytes match docs/reference/frame-format.md, from which others may write a reader."""
    page = (GOLDEN / "zstd.bin").read_bytes()
    header = golden_header("zstd")
    assert page[0:8] == b"\x89TIERKV\n"
    assert int.from_bytes(page[8:10], "little") == 1
    assert int.from_bytes(page[10:12], "little") == 0
    assert int.from_bytes(page[12:16], "little") == 4096
    assert page[16:32] == b"zstd".ljust(16, b"\0")
    assert page[32:48] == header.namespace
    assert int.from_bytes(page[48:50], "little") == len(header.key)
    assert page[50:306] == header.key.ljust(256, b"\0")
    assert int.from_bytes(page[306:314], "little") == header.raw_bytes
    assert int.from_bytes(page[314:322], "little") == header.stored_bytes
    assert page[322:338] == header.stored_checksum
    assert page[338:354] == header.raw_checksum
    assert page[362:] == bytes(4096 - 362)


def test_part_table_has_the_documented_offsets() -> None:
    """The bytes of a frame of several workers match the page."""
    page = (GOLDEN / "parts.bin").read_bytes()
    header = golden_header("parts")
    assert int.from_bytes(page[10:12], "little") == 1
    assert int.from_bytes(page[362:364], "little") == len(header.part_checksums) == 4
    assert page[364:428] == b"".join(header.part_checksums)
    assert page[428:] == bytes(4096 - 428)
    assert header.raw_checksum == checksum(page[364:428])


def test_flags_and_notes_have_the_documented_offsets() -> None:
    """The bytes of frames of concealing or lossy codecs match the page."""
    flags = {name: (GOLDEN / f"{name}.bin").read_bytes()[10] for name in ("encrypted", "lossy", "approximate")}
    assert flags == {"encrypted": 1 + 2 + 8, "lossy": 2 + 4, "approximate": 4}
    page = (GOLDEN / "encrypted.bin").read_bytes()
    assert page[338:354] == bytes(16)
    assert page[364:428] == bytes(64)
    assert page[4032:4096] == golden_header("encrypted").notes == bytes([*range(54), *[0] * 10])


def test_a_raw_frame_withholds_nothing() -> None:
    """Otherwise a flag would suffice to accept a payload without its checksum."""
    page = memoryview(bytearray(HEADER_BYTES))
    pack_header(FrameHeader("none", NAMESPACE, KEY, 5, 5, bytes(16), bytes(16), withheld=True), page)
    with pytest.raises(CorruptFrameError, match="flags"):
        parse_header(page)


@pytest.mark.parametrize(
    ("raw_checksum", "parts"), [(b"\1" + bytes(15), ()), (bytes(16), (bytes(16), bytes(15) + b"\1"))]
)
def test_what_is_withheld_is_zero(raw_checksum: bytes, parts: tuple[bytes, ...]) -> None:
    """A checksum of the raw payload beside the encrypted payload would confirm a guess."""
    page = memoryview(bytearray(HEADER_BYTES))
    pack_header(FrameHeader("x", NAMESPACE, KEY, 10, 5, bytes(16), raw_checksum, parts, withheld=True), page)
    with pytest.raises(CorruptFrameError, match="raw checksum"):
        parse_header(page)


@pytest.mark.parametrize("flags", [0, 8])
def test_notes_are_as_safe_as_the_header(flags: int) -> None:
    """A changed byte of the notes is detected by the header's checksum, or as a byte that must be zero."""
    page = bytearray(HEADER_BYTES)
    header = FrameHeader("x", NAMESPACE, KEY, 10, 5, bytes(16), bytes(16), notes=bytes(range(1, 65)) if flags else b"")
    pack_header(header, memoryview(page))
    for place in range(4032, 4096):
        damaged = bytearray(page)
        damaged[place] ^= 1
        with pytest.raises(CorruptFrameError, match="header checksum" if flags else "zero"):
            parse_header(memoryview(damaged))


@pytest.mark.parametrize("length", [1, 63, 65])
def test_notes_of_another_length_are_a_mistake(length: int) -> None:
    """They would overwrite a part table, or be truncated."""
    header = FrameHeader("x", NAMESPACE, KEY, 10, 5, bytes(16), bytes(16), notes=b"n" * length)
    with pytest.raises(ValueError, match="notes have 64 bytes"):
        pack_header(header, memoryview(bytearray(HEADER_BYTES)))


def test_the_reference_page_leaves_no_gap(root: Path) -> None:
    """The page is a contract for other programs: its rows must join, add up to a page, and agree with the code."""
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| ([\w' ]+) \|", (root / "docs/reference/frame-format.md").read_text(), flags=re.MULTILINE
    )
    table = [(int(offset), int(length)) for offset, length, _ in rows]
    assert [offset for offset, _ in table] == [sum(length for _, length in table[:row]) for row in range(len(table))]
    assert sum(length for _, length in table) == HEADER_BYTES
    in_code = [struct.calcsize(f"<{part}") for part in re.findall(r"\d*[sHIQ]", _FIXED.format.replace("HH", "H H"))]
    assert [length for _, length in table] == [
        *in_code,
        8,
        HEADER_BYTES - _FIXED.size - 8 - CODEC_NOTES_BYTES,
        CODEC_NOTES_BYTES,
    ]
    for field in (name for _, _, name in rows):
        assert re.search(rf"^ +\d+ +\d+ {field} ", frame.__doc__ or "", flags=re.MULTILINE), field


headers = st.builds(
    FrameHeader,
    codec=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=16),
    namespace=st.binary(min_size=16, max_size=16),
    key=st.binary(min_size=1, max_size=KEY_BYTES_MAX),
    raw_bytes=st.integers(0, 2**64 - 1),
    stored_bytes=st.integers(0, 2**64 - 1),
    stored_checksum=st.binary(min_size=16, max_size=16),
    raw_checksum=st.binary(min_size=16, max_size=16),
    part_checksums=st.just(()),  # these hang together with the raw checksum: they have a test of their own
    withheld=st.just(value=False),  # and so does this
    approximate=st.booleans(),
    notes=st.one_of(st.just(b""), st.binary(min_size=CODEC_NOTES_BYTES, max_size=CODEC_NOTES_BYTES)),
)


@given(headers)
def test_any_header_is_read_back(header: FrameHeader) -> None:
    """Every valid value must survive, also keys that end in zeros."""
    page = memoryview(bytearray(HEADER_BYTES))
    pack_header(header, page)
    assert parse_header(page) == header


@given(
    key=st.binary(min_size=1, max_size=KEY_BYTES_MAX),
    raw_bytes=st.integers(0, 2**64 - 1),
    digest=st.binary(min_size=16, max_size=16),
)
def test_a_raw_page_is_the_packed_header(key: bytes, raw_bytes: int, digest: bytes) -> None:
    """Frames are sealed and checked by the one, described and parsed by the other."""
    page = bytearray(b"\xee" * HEADER_BYTES)
    pack_header(FrameHeader("none", NAMESPACE, key, raw_bytes, raw_bytes, digest, digest), memoryview(page))
    assert raw_page(NAMESPACE, key, raw_bytes, digest) == page


@pytest.mark.parametrize(("key", "digest"), [(b"", bytes(16)), (bytes(257), bytes(16)), (KEY, bytes(15))])
def test_a_raw_page_of_wrong_lengths_is_a_mistake(key: bytes, digest: bytes) -> None:
    """The fields would be cut off or padded in silence."""
    with pytest.raises(ValueError, match="has"):
        raw_page(NAMESPACE, key, 5, digest)


@given(digests=st.lists(st.binary(min_size=16, max_size=16), min_size=2, max_size=PARTS_MAX))
def test_any_part_table_is_read_back(digests: list[bytes]) -> None:
    """From two parts to the maximum of a page, none is lost or added."""
    raw = checksum_of_parts(digests)
    header = FrameHeader("none", NAMESPACE, KEY, 4096, 4096, raw, raw, tuple(digests))
    page = memoryview(bytearray(b"\xee" * HEADER_BYTES))
    pack_header(header, page)
    assert parse_header(page) == header


@pytest.mark.parametrize("digests", [[bytes(16)], [bytes(16)] * (PARTS_MAX + 1), [bytes(16), bytes(15)]])
def test_pack_refuses_a_part_table_that_does_not_fit(digests: list[bytes]) -> None:
    """A single part needs no table, and a table must not exceed its page."""
    with pytest.raises(ValueError, match="parts"):
        pack_header(
            FrameHeader("none", NAMESPACE, KEY, 1, 1, bytes(16), bytes(16), tuple(digests)),
            memoryview(bytearray(HEADER_BYTES)),
        )


@pytest.mark.parametrize("name", ["zstd", "parts"])
@given(data=st.data())
def test_any_damaged_header_byte_is_detected(name: str, data: st.DataObject) -> None:
    """Promise 1: no wrong byte in a header page may pass, not even in its unused rest."""
    page = bytearray((GOLDEN / f"{name}.bin").read_bytes())
    page[data.draw(st.integers(0, HEADER_BYTES - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptFrameError):
        parse_header(memoryview(page))


@pytest.mark.parametrize("name", ["zstd", "parts"])
def test_every_header_byte_is_verified(name: str) -> None:
    """Each of the 4096 bytes is changed once, without random choice."""
    good = (GOLDEN / f"{name}.bin").read_bytes()
    for offset in range(HEADER_BYTES):
        page = bytearray(good)
        page[offset] ^= 0x01
        with pytest.raises(CorruptFrameError):
            parse_header(memoryview(page))


def test_frame_bytes_is_the_aligned_total() -> None:
    """Arena, tiers and backends must agree on lengths."""
    assert [frame_bytes(n) for n in (0, 1, 4096, 4097)] == [4096, 8192, 8192, 12288]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codec", ""),
        ("codec", "x" * 17),
        ("namespace", b"short"),
        ("key", b""),
        ("key", b"k" * 257),
        ("stored_checksum", b""),
    ],
)
def test_pack_refuses_fields_that_do_not_fit(field: str, value: object) -> None:
    """Struct would truncate them silently."""
    fields = {
        "codec": "none",
        "namespace": NAMESPACE,
        "key": KEY,
        "raw_bytes": 1,
        "stored_bytes": 1,
        "stored_checksum": bytes(16),
        "raw_checksum": bytes(16),
    }
    with pytest.raises(ValueError, match=r"codec name|key has|bytes each"):
        pack_header(FrameHeader(**{**fields, field: value}), memoryview(bytearray(HEADER_BYTES)))
