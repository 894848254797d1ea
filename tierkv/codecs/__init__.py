"""Frames and the codecs that come with tierkv."""

from __future__ import annotations

from tierkv.abc.codec import Codec
from tierkv.abc.plugin import CodecPlugin
from tierkv.codecs.none import NoneCodec
from tierkv.codecs.zstd import ZstdCodec


def _open_bf16() -> Codec:
    from tierkv.codecs.bf16 import Bf16Codec  # noqa: PLC0415 - numpy; listing plugins must not wait for it

    return Bf16Codec()


CODEC_PLUGINS: tuple[CodecPlugin, ...] = (
    CodecPlugin(name="none", summary="Store payloads as they are; fastest.", open=NoneCodec),
    CodecPlugin(name="zstd", summary="Zstandard level 1; for slow or metered tiers.", open=ZstdCodec),
    CodecPlugin(name="bf16", summary="Lossless, for bfloat16 KV: exponents through Zstandard.", open=_open_bf16),
)
"""What :func:`tierkv.hookspecs.tierkv_codecs` returns for tierkv itself."""
