"""Conformance of codecs: what a tier relies on, as a test class to inherit from.

::

    from tierkv.testing import CodecConformance

    class TestFoo(CodecConformance):
        plugin = tierkv_foo.CODEC

The payloads are pages of bfloat16 values, as a tier hands them over, and pages of other bytes.
"""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from tierkv.abc import CODEC_NOTES_BYTES, Codec, CodecContext, CodecFrame, CodecPlugin
from tierkv.errors import CorruptFrameError, UnreadableFrameError
from tierkv.types.namespace import Namespace

NAMESPACE = Namespace("tests", "r1", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 4, 16)
"""Namespace of the payloads: pages of 4 KiB, up to four in a chunk."""
CHANGES = 300
"""Damaged forms of each payload that are decoded."""
_CHECKSUM = b"sixteen bytes..."
_MARGIN = 64
"""Bytes on both sides of a buffer, which a codec must leave alone."""


def _payloads() -> dict[str, bytes]:
    rng = random.Random(7)
    values = b"".join(struct.pack("<f", rng.gauss(0.0, 1.0))[2:] for _ in range(8192))
    return {
        "values": values,
        "one page of values": values[:4096],
        "zeros": bytes(8192),
        "random bytes": rng.randbytes(8192),
        "text": (b"key value " * 1000)[:8192],
    }


PAYLOADS = _payloads()
"""Payloads by what is in them."""


class _Buffer:
    """Memory between two margins. ``view`` is what a codec gets."""

    def __init__(self, size: int) -> None:
        self._memory = bytearray(b"\xa5" * (size + 2 * _MARGIN))
        self.view = memoryview(self._memory)[_MARGIN : _MARGIN + size]

    def require_margins(self) -> None:
        """Fail if a codec wrote outside of its buffer."""
        ends = self._memory[:_MARGIN] + self._memory[-_MARGIN:]
        assert ends == b"\xa5" * 2 * _MARGIN, "bytes outside of `out` were written"


class CodecConformance:
    """Inherit, and set ``plugin``; and ``options``, where the defaults cannot be opened."""

    plugin: ClassVar[CodecPlugin]
    """The codec under test."""
    options: ClassVar[Any] = None
    """Its options. Default: those of an empty table."""

    @pytest.fixture
    def codec(self) -> Codec:
        """Codec, opened as by a tier."""
        return self.open_codec()

    def open_codec(self) -> Codec:
        """Return one more instance, as another process would have."""
        return self.plugin.open(
            CodecContext(NAMESPACE), self.plugin.options() if self.options is None else self.options
        )

    def encoded(self, codec: Codec, raw: bytes, identity: bytes = b"a frame") -> tuple[bytes, CodecFrame] | None:
        """Encode a payload. Returns the stored form, and what ``decode`` is given beside it; None: it is stored raw."""
        frame = CodecFrame(identity, memoryview(bytearray(CODEC_NOTES_BYTES)), memoryview(bytearray(_CHECKSUM)))
        out, given = _Buffer(len(raw)), bytearray(raw)
        written = codec.encode(memoryview(given), out.view, frame)
        out.require_margins()
        assert given == raw, "encode has changed the payload, which the engine may still read"
        if written is None:
            assert not self.plugin.conceals, "a codec that conceals must accept every payload"
            return None
        assert 0 < written <= len(raw), f"encode returned {written} for {len(raw)} bytes"
        assert self.plugin.conceals or written < len(raw), "a stored form that is not shorter: return None"
        return bytes(out.view[:written]), frame

    def decoded(self, codec: Codec, stored: bytes, size: int, frame: CodecFrame) -> bytes:
        """Decode a stored form to ``size`` bytes."""
        checksum = bytearray(16 if self.plugin.conceals else frame.raw_checksum)
        given = replace(frame, notes=memoryview(bytes(frame.notes)), raw_checksum=memoryview(checksum))
        out = _Buffer(size)
        try:
            codec.decode(memoryview(stored), out.view, given)
        finally:
            out.require_margins()
        if self.plugin.conceals and frame.identity == given.identity:
            assert checksum == _CHECKSUM, "decode must restore frame.raw_checksum, which nothing else stores"
        return bytes(out.view)

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_a_payload_comes_back(self, payload: str) -> None:
        """It is read after a restart, by another instance. A buffer has other bytes before."""
        raw = PAYLOADS[payload]
        if (form := self.encoded(self.open_codec(), raw)) is None:
            return
        back = self.decoded(self.open_codec(), form[0], len(raw), form[1])
        if not self.plugin.lossy:
            assert back == raw

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_a_damaged_form_is_an_error_of_ours(self, codec: Codec, payload: str) -> None:
        """Checksums can be forged by a writer to the storage. Any other exception counts as a defect of the plugin."""
        raw, rng = PAYLOADS[payload], random.Random(payload)
        if (form := self.encoded(codec, raw)) is None:
            return
        stored = form[0]
        changed = [bytearray(stored) for _ in range(CHANGES)]
        for one in changed:
            one[rng.randrange(len(one))] ^= 1 << rng.randrange(8)
        cuts = [stored[: rng.randrange(len(stored))] for _ in range(CHANGES)]
        for wrong in (*map(bytes, changed), *cuts, b"", stored + b"\0", stored + stored, rng.randbytes(len(stored))):
            try:
                self.decoded(codec, wrong, len(raw), form[1])
            except (CorruptFrameError, UnreadableFrameError):
                continue

    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_another_length_is_refused(self, codec: Codec, payload: str) -> None:
        """The end of the buffer would keep bytes of another chunk."""
        raw = PAYLOADS[payload]
        if (form := self.encoded(codec, raw)) is None:
            return
        for size in (len(raw) - 4096, len(raw) + 4096):
            with pytest.raises((CorruptFrameError, UnreadableFrameError)):
                self.decoded(codec, form[0], size, form[1])

    def test_threads_do_not_share_state(self, codec: Codec) -> None:
        """A tier calls one codec on all of its threads at once."""

        def trip(number: int) -> bool:
            raw = bytes([number]) * 4096 + PAYLOADS["values"][:4096]
            if (form := self.encoded(codec, raw)) is None:
                return True
            return self.plugin.lossy or self.decoded(codec, form[0], len(raw), form[1]) == raw

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(trip, range(200)))

    def test_a_concealed_payload_is_bound_to_its_frame(self, codec: Codec) -> None:
        """Nothing of it is at rest in the clear, and the frame of another chunk cannot take its place."""
        if not self.plugin.conceals:
            pytest.skip("it does not conceal (CodecPlugin.conceals)")
        raw = PAYLOADS["text"]
        form = self.encoded(codec, raw)
        assert form is not None
        assert raw[:16] not in form[0]
        assert _CHECKSUM not in form[0] + bytes(form[1].notes), "the checksum of a payload tells what it is"
        with pytest.raises((CorruptFrameError, UnreadableFrameError)):
            self.decoded(codec, form[0], len(raw), replace(form[1], identity=b"another frame"))
