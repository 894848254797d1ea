"""Any stored bytes: each codec restores a payload of the wanted length, or says that the frame is damaged."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
from codec_parts import PLUGINS, aes, decoded, encoded, frame_of, open_codec, opened_frame
from parser_inputs import any_bytes, parser_test

from tierkv.abc import Codec, CodecFrame
from tierkv.abc.codec import CODEC_NOTES_BYTES
from tierkv.errors import CorruptFrameError, UnreadableFrameError

HERE = Path(__file__).parent
AES = "aes-256-gcm"
RAW_BYTES = 2001
RAW = random.Random(1).randbytes(40) * (RAW_BYTES // 40) + b"!"


@functools.cache
def opened(name: str) -> Codec:
    """Return a codec; the encrypting one has an inner codec."""
    return aes(inner="zstd") if name == AES else open_codec(name)


def stored_forms() -> list[bytes]:
    """Return notes and stored form of the payload by each codec."""
    forms = []
    for name in PLUGINS:
        frame = frame_of()
        stored = encoded(opened(name), RAW, frame)
        forms.append(bytes(frame.notes) + (RAW if stored is None else stored))
    return forms


@pytest.mark.parametrize("name", list(PLUGINS))
@parser_test(HERE / "corpus" / "stored", any_bytes(stored_forms()), share=2)
def test_any_stored_bytes_decode_or_are_damaged(name: str, data: bytes) -> None:
    """A checksum may be forged with the bytes: what a codec makes of them must be a payload or an error of ours."""
    notes, stored = data[:CODEC_NOTES_BYTES], data[CODEC_NOTES_BYTES:]
    frame = CodecFrame(b"a frame", memoryview(notes.ljust(CODEC_NOTES_BYTES, b"\0")), memoryview(bytearray(16)))
    for raw_bytes in {RAW_BYTES, len(stored), 0, 3}:
        try:
            assert len(decoded(opened(name), stored, raw_bytes, frame)) == raw_bytes
        except (CorruptFrameError, UnreadableFrameError):
            continue


@pytest.mark.parametrize("name", list(PLUGINS))
@parser_test(HERE / "corpus" / "payloads", any_bytes([RAW, bytes(64), b"\x80\x3f" * 99]), share=2)
def test_any_payload_comes_back(name: str, data: bytes) -> None:
    """Stored and read again, a payload is the same, byte for byte; a lossy codec's second trip changes nothing more."""
    codec, frame = opened(name), frame_of()
    stored = encoded(codec, data, frame)
    if stored is None:
        return
    back = decoded(codec, stored, len(data), opened_frame(frame))
    if not PLUGINS[name].lossy:
        assert back == data
        return
    again = encoded(codec, back)
    assert again is not None
    assert decoded(codec, again, len(back)) == back
