"""Codecs, opened as by a stack, and their arguments."""

from __future__ import annotations

from typing import Any

from tierkv.abc import CODEC_NOTES_BYTES, Codec, CodecContext, CodecFrame, CodecPlugin
from tierkv.codecs.aes_gcm import AesGcmCodec
from tierkv.codecs.builtin import CODEC_PLUGINS
from tierkv.types.namespace import Namespace

KEY = bytes(range(32))
PLUGINS: dict[str, CodecPlugin] = {plugin.name: plugin for plugin in CODEC_PLUGINS}


def namespace(
    dtype: str = "bfloat16", *, page_bytes: tuple[int, ...] = (4096,), kind: str = "full_attention"
) -> Namespace:
    """Return the namespace of one group."""
    return Namespace("model", "", dtype, "page", ((16, page_bytes, kind, None),), 4, 16)


def open_codec(name: str, dtype: str = "bfloat16", **options: Any) -> Codec:
    """Open a built-in codec."""
    plugin = PLUGINS[name]
    return plugin.open(CodecContext(namespace(dtype)), plugin.options(**options))


def aes(*keys: bytes, inner: str = "none") -> Codec:
    """Return the encrypting codec; the first key encrypts."""
    codecs = {name: open_codec(name) for name in ("zstd", "bf16")}
    return AesGcmCodec(keys or (KEY,), inner, codecs)


def frame_of(identity: bytes = b"a frame", checksum: bytes = b"sixteen bytes...") -> CodecFrame:
    """Return the frame argument of encode."""
    return CodecFrame(identity, memoryview(bytearray(CODEC_NOTES_BYTES)), memoryview(checksum))


def opened_frame(written: CodecFrame, identity: bytes | None = None) -> CodecFrame:
    """Return the frame argument of decode: the same notes, and room for the checksum."""
    notes = memoryview(bytes(written.notes))
    return CodecFrame(written.identity if identity is None else identity, notes, memoryview(bytearray(16)))


def encoded(codec: Codec, raw: bytes, frame: CodecFrame | None = None) -> bytes | None:
    """Return the stored form, or None."""
    out = memoryview(bytearray(len(raw)))
    written = codec.encode(memoryview(raw), out, frame or frame_of())
    return None if written is None else bytes(out[:written])


def decoded(codec: Codec, stored: bytes, raw_bytes: int, frame: CodecFrame | None = None) -> bytes:
    """Return the payload, decoded into a buffer full of other bytes."""
    out = bytearray(b"\x5a" * raw_bytes)
    codec.decode(memoryview(stored), memoryview(out), frame or frame_of())
    return bytes(out)
