"""Frame header: golden bytes, and detection of every damage, mix-up and truncation."""

from __future__ import annotations

import json
import random
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
)
from tierkv.frames.sealer import FrameSealer
from tierkv.types.keys import make_key

GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = bytes(range(16))
KEY = make_key(b"chunk-hash-of-thirty-two-bytes..", 3)
RAW_BYTES = 5000
SEALER = FrameSealer(NAMESPACE)


def sealed(key: bytes = KEY, raw_bytes: int = RAW_BYTES, sealer: FrameSealer = SEALER) -> bytearray:
    """Return a slot of one frame with random payload, sealed over other bytes."""
    slot = bytearray(b"\xee" * frame_bytes(raw_bytes))
    slot[HEADER_BYTES : HEADER_BYTES + raw_bytes] = random.Random(7).randbytes(raw_bytes)
    sealer.seal(memoryview(slot), key, raw_bytes)
    return slot


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


@pytest.mark.parametrize("bit", range(4, 16))
def test_an_unknown_flag_is_refused(bit: int) -> None:
    """This version cannot obey a flag that it does not know."""
    slot = memoryview(sealed())
    slot[10:12] = (1 << bit).to_bytes(2, "little")
    with pytest.raises(CorruptFrameError, match="flags"):
        SEALER.check_slot(slot, KEY)


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


@given(offset=st.integers(0, RAW_BYTES - 1), flip=st.integers(1, 255))
def test_any_damaged_payload_byte_is_detected(offset: int, flip: int) -> None:
    """Promise 1, for the payload."""
    slot = sealed()
    SEALER.check_slot(memoryview(slot), KEY)
    slot[HEADER_BYTES + offset] ^= flip
    with pytest.raises(CorruptFrameError, match="stored checksum"):
        SEALER.check_slot(memoryview(slot), KEY)


def sealed_in_parts(parts: int = 4) -> bytearray:
    """Return a slot whose parts were checksummed one by one."""
    slot = sealed()
    size = RAW_BYTES // parts
    digests = [checksum(memoryview(slot)[start : start + size]) for start in range(4096, 4096 + RAW_BYTES, size)]
    SEALER.seal_parts(memoryview(slot), KEY, RAW_BYTES, digests)
    return slot


@given(offset=st.integers(0, RAW_BYTES - 1), flip=st.integers(1, 255))
def test_any_damaged_payload_byte_is_detected_in_its_part(offset: int, flip: int) -> None:
    """Promise 1, for four parts: a check of all parts detects it, and of the single checks only that of its part."""
    slot = memoryview(sealed_in_parts())
    header = SEALER.check_slot(slot, KEY)
    assert header.raw_checksum == checksum_of_parts(header.part_checksums)
    slot[HEADER_BYTES + offset] ^= flip
    with pytest.raises(CorruptFrameError, match=f"checksum of part {offset // 1250}"):
        SEALER.check_slot(slot, KEY)
    with pytest.raises(CorruptFrameError, match="checksum of part"):
        SEALER.check_raw(slot, header)
    for part in range(4):
        if part == offset // 1250:
            with pytest.raises(CorruptFrameError):
                SEALER.check_parts(slot, header, (part,))
        else:
            SEALER.check_parts(slot, header, (part,))


def test_parts_that_do_not_divide_the_payload() -> None:
    """Such a header is invalid, and sealing such parts raises."""
    slot = memoryview(sealed())
    digests = (bytes(16),) * 3
    with pytest.raises(ValueError, match="no 3 parts of one length"):
        SEALER.seal_parts(slot, KEY, RAW_BYTES, digests)
    SEALER.seal_as(slot, KEY, RAW_BYTES, checksum_of_parts(digests), digests)
    with pytest.raises(CorruptFrameError, match="no 3 parts of one length"):
        SEALER.check_slot(slot, KEY)


@pytest.mark.parametrize("count", [0, 1, PARTS_MAX + 1, 2**16 - 1])
@pytest.mark.parametrize("verify", [True, False])
def test_an_invalid_part_count_is_refused(count: int, verify: bool) -> None:
    """Also without verification, a table is never read beyond its page, and no division by zero occurs."""
    slot = memoryview(sealed_in_parts())
    slot[362:364] = count.to_bytes(2, "little")
    with pytest.raises(CorruptFrameError, match="part count"):
        FrameSealer(NAMESPACE, verify=verify).check_slot(slot, KEY)


@given(length=st.integers(0, frame_bytes(RAW_BYTES) - 1))
def test_a_truncated_frame_is_detected(length: int) -> None:
    """A short read or a half-written file must be a miss, wherever it ends."""
    with pytest.raises(CorruptFrameError, match="cut off"):
        SEALER.check_slot(memoryview(sealed())[:length], KEY)


def test_swapped_keys_are_detected() -> None:
    """An intact frame of another chunk must not be accepted."""
    other = make_key(b"another-chunk-hash-of-the-same-l", 3)
    with pytest.raises(CorruptFrameError, match=r"'key' is .*expected"):
        SEALER.check_slot(memoryview(sealed(other)), KEY)


def test_same_hash_of_another_group_is_detected() -> None:
    """Two groups share chunk hashes; their bytes differ (spec S2)."""
    with pytest.raises(CorruptFrameError, match="'key'"):
        SEALER.check_slot(memoryview(sealed(make_key(b"chunk-hash-of-thirty-two-bytes..", 4))), KEY)


def test_foreign_namespace_is_detected() -> None:
    """Bytes of another model under the same key must never be read."""
    foreign = FrameSealer(bytes(16))
    with pytest.raises(CorruptFrameError, match="'namespace'"):
        SEALER.check_slot(memoryview(sealed(sealer=foreign)), KEY)


def test_an_encoded_frame_is_not_a_raw_frame() -> None:
    """A slot with zstd bytes must not be copied to the GPU, even if the frame is intact."""
    slot = sealed()
    header = parse_header(memoryview(slot))
    pack_header(
        FrameHeader("zstd", NAMESPACE, KEY, 5000, 5000, header.stored_checksum, header.raw_checksum), memoryview(slot)
    )
    with pytest.raises(CorruptFrameError, match="'codec'"):
        SEALER.check_slot(memoryview(slot), KEY)
    assert SEALER.check_frame(memoryview(slot), KEY).codec == "zstd"


@pytest.mark.parametrize(("raw", "stored"), [(5000, 4999), (4999, 5000), (2**40, 2**40), (0, 5000)])
def test_contradicting_lengths_are_detected(raw: int, stored: int) -> None:
    """A header with a valid checksum may still be invalid; its lengths control memory access."""
    slot = sealed()
    digest = checksum(memoryview(slot)[HEADER_BYTES : HEADER_BYTES + min(stored, 5000)])
    pack_header(FrameHeader("none", NAMESPACE, KEY, raw, stored, digest, digest), memoryview(slot))
    with pytest.raises(CorruptFrameError):
        SEALER.check_slot(memoryview(slot), KEY)


def test_payload_false_reads_the_header_only() -> None:
    """Before a write only the header is checked, not megabytes of payload."""
    slot = sealed()
    slot[HEADER_BYTES] ^= 1
    SEALER.check_slot(memoryview(slot), KEY, payload=False)
    with pytest.raises(CorruptFrameError):
        SEALER.check_slot(memoryview(slot), KEY)


def test_without_verification_damage_passes_and_mix_ups_do_not() -> None:
    """The switch disables checksums, but not the identity of a chunk."""
    blind = FrameSealer(NAMESPACE, verify=False)
    slot = sealed()
    slot[HEADER_BYTES + 17] ^= 1
    slot[355] ^= 1
    assert blind.check_slot(memoryview(slot), KEY).raw_bytes == RAW_BYTES
    with pytest.raises(CorruptFrameError, match="'key'"):
        blind.check_slot(memoryview(slot), make_key(b"x", 0))
    with pytest.raises(CorruptFrameError, match="'namespace'"):
        FrameSealer(bytes(16), verify=False).check_slot(memoryview(slot), KEY)
    with pytest.raises(CorruptFrameError, match="cut off"):
        blind.check_slot(memoryview(slot)[:-1], KEY)


@given(raw_bytes=st.integers(0, 3 * HEADER_BYTES))
def test_seal_leaves_no_old_bytes(raw_bytes: int) -> None:
    """Frames are written as they are in memory: bytes of another chunk in the padding must not be written."""
    slot = sealed(raw_bytes=raw_bytes)
    assert len(slot) % HEADER_BYTES == 0
    assert slot[HEADER_BYTES + raw_bytes :] == bytes(len(slot) - HEADER_BYTES - raw_bytes)
    header = SEALER.check_slot(memoryview(slot), KEY)
    assert (header.raw_bytes, header.stored_bytes) == (raw_bytes, raw_bytes)
    assert header.raw_checksum == checksum(memoryview(slot)[HEADER_BYTES : HEADER_BYTES + raw_bytes])


def test_frame_bytes_is_the_aligned_total() -> None:
    """Arena, tiers and backends must agree on lengths."""
    assert [frame_bytes(n) for n in (0, 1, 4096, 4097)] == [4096, 8192, 8192, 12288]


@pytest.mark.parametrize("raw_bytes", [-1, RAW_BYTES + 4096])
def test_seal_refuses_what_does_not_fit(raw_bytes: int) -> None:
    """A payload longer than its slot would overwrite the next slot."""
    slot = memoryview(bytearray(frame_bytes(RAW_BYTES)))
    with pytest.raises(ValueError, match="does not fit"):
        SEALER.seal(slot, KEY, raw_bytes)


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


def test_messages_name_the_field() -> None:
    """The message tells the operator which part of a frame is corrupt."""
    slot = sealed()
    for offset, field in ((0, "magic"), (8, "format version"), (10, "flags"), (12, "header length")):
        damaged = bytearray(slot)
        damaged[offset] ^= 0x40
        with pytest.raises(CorruptFrameError, match=f"'{field}'"):
            parse_header(memoryview(damaged))
    damaged = bytearray(slot)
    damaged[340] ^= 1
    with pytest.raises(CorruptFrameError, match="'header checksum'"):
        parse_header(memoryview(damaged))
