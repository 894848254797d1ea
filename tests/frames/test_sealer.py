"""Sealing and checking of frames: every damage, mix-up and truncation is detected."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import CorruptFrameError
from tierkv.frames.frame import (
    HEADER_BYTES,
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


@pytest.mark.parametrize("bit", range(4, 16))
def test_an_unknown_flag_is_refused(bit: int) -> None:
    """This version cannot obey a flag that it does not know."""
    slot = memoryview(sealed())
    slot[10:12] = (1 << bit).to_bytes(2, "little")
    with pytest.raises(CorruptFrameError, match="flags"):
        SEALER.check_slot(slot, KEY)


@given(offset=st.integers(0, RAW_BYTES - 1), flip=st.integers(1, 255))
def test_any_damaged_payload_byte_is_detected(offset: int, flip: int) -> None:
    """Promise 1, for the payload."""
    slot = sealed()
    SEALER.check_slot(memoryview(slot), KEY)
    slot[HEADER_BYTES + offset] ^= flip
    with pytest.raises(CorruptFrameError, match="stored checksum"):
        SEALER.check_slot(memoryview(slot), KEY)


def test_any_damaged_header_byte_is_detected() -> None:
    """Promise 1, for the header page: of a frame in a cache, and of one on a disk."""
    slot = sealed()
    for offset in range(HEADER_BYTES):
        slot[offset] ^= 0x41
        with pytest.raises(CorruptFrameError):
            SEALER.check_slot(memoryview(slot), KEY, payload=False)
        slot[offset] ^= 0x41
    SEALER.check_slot(memoryview(slot), KEY)


def test_an_undamaged_frame_is_not_parsed_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is checked twice on its way to the GPU: fields took a third of the time that copies 64 KiB."""
    slot = memoryview(sealed())
    monkeypatch.setattr("tierkv.frames.sealer.parse_header", None)
    monkeypatch.setattr("tierkv.frames.sealer.pack_header", None)
    SEALER.seal(slot, KEY, RAW_BYTES)
    digest = checksum(slot[HEADER_BYTES : HEADER_BYTES + RAW_BYTES])
    header = FrameHeader("none", NAMESPACE, KEY, RAW_BYTES, RAW_BYTES, digest, digest)
    assert SEALER.check_slot(slot, KEY) == SEALER.check_slot(slot, KEY, payload=False) == header


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


@pytest.mark.parametrize("raw_bytes", [-1, RAW_BYTES + 4096])
def test_seal_refuses_what_does_not_fit(raw_bytes: int) -> None:
    """A payload longer than its slot would overwrite the next slot."""
    slot = memoryview(bytearray(frame_bytes(RAW_BYTES)))
    with pytest.raises(ValueError, match="does not fit"):
        SEALER.seal(slot, KEY, raw_bytes)


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
