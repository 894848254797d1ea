"""Golden stored payloads of every codec: once written, they stay readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from codec_parts import aes, decoded, encoded, frame_of, open_codec

from tierkv.abc import CODEC_NOTES_BYTES, CodecFrame

GOLDEN = Path(__file__).parent / "golden" / "payloads"
CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))


def test_every_codec_has_golden_files() -> None:
    """With an empty folder every test below would pass."""
    assert {json.loads((GOLDEN / f"{case}.json").read_text())["codec"] for case in CASES} == {
        *("zstd", "bf16", "fp8", "int8", "aes-256-gcm"),
    }
    assert len(CASES) >= 9


@pytest.mark.parametrize("case", CASES)
def test_golden_payloads_are_read_unchanged(case: str) -> None:
    """The bytes of a payload may change with the format version only."""
    fields = json.loads((GOLDEN / f"{case}.json").read_text())
    codec = aes() if fields["codec"] == "aes-256-gcm" else open_codec(fields["codec"], fields["dtype"])
    notes = bytes.fromhex(fields.get("notes", "00" * CODEC_NOTES_BYTES))
    frame = CodecFrame(bytes.fromhex(fields.get("identity", "")), memoryview(notes), memoryview(bytearray(16)))
    raw = (GOLDEN / f"{case}.raw").read_bytes()
    assert decoded(codec, (GOLDEN / f"{case}.stored").read_bytes(), len(raw), frame) == raw
    assert bytes(frame.raw_checksum).hex() == fields.get("raw_checksum", "00" * 16)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("fp8", "int8"))])
def test_lossy_codecs_write_golden_payloads_unchanged(case: str) -> None:
    """Their output depends on arithmetic only, not on a library: the same values give the same codes."""
    fields = json.loads((GOLDEN / f"{case}.json").read_text())
    codec = open_codec(fields["codec"], fields["dtype"])
    source = (GOLDEN / f"{case}.source").read_bytes()
    assert encoded(codec, source, frame_of()) == (GOLDEN / f"{case}.stored").read_bytes()
